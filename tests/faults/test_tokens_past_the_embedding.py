"""A tokenizer with a token that has no embedding row, as in Gemma 3: every verb names the token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantforge import api
from quantforge.api import quantize
from quantforge.api.imatrix import make_imatrix
from quantforge.api.plan import plan
from quantforge.errors import InputError
from quantforge.evaluation.reference_text import Prompts
from quantforge.evaluation.task_model import TaskModel
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests.conftest import VOCABULARY
from tests.evaluations import TEXT, evaluate_models, load_tokenizer, options
from tests.gguf_exports import copy_with_edited_tokenizer, export
from tests.runs import run_command

PAST_MESSAGE = f"'<image>' \\(id {VOCABULARY}\\) has no row .* which has {VOCABULARY} rows"
TEXT_WITH_TOKEN = "look at <image> and at that"


def add_token(tokenizer: dict, **values: object) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    flags = {"id": VOCABULARY, **flags, "special": True, **values}
    for number in range(len(tokenizer["model"]["vocab"]), VOCABULARY):  # added tokens have no gaps
        tokenizer["added_tokens"].append({**flags, "id": number, "content": f"<{number}>"})
    tokenizer["added_tokens"].append({**flags, "content": "<image>"})


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory) -> Path:
    return copy_with_edited_tokenizer(
        tiny("llama-tied"), tmp_path_factory.mktemp("past") / "m", add_token
    )


@pytest.fixture(scope="module")
def rounded(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rounded") / "m"
    quantize(str(model), Recipe(scheme="int8:g32:sym", scales="absmax"), out, Settings())
    return out


@pytest.fixture
def text(tmp_path) -> str:
    rows = [{"text": TEXT}, {"text": TEXT + TEXT_WITH_TOKEN}] + [{"text": TEXT}] * 40
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "t.jsonl")


def calibrated_recipe(text: str) -> Recipe:
    rows = CalibrationOptions(source=text, samples=4, length=32)
    return Recipe(method="gptq", scheme="int8:g32:sym", calibration=rows)


def quantize_or_plan(model, text, out, *, run):
    recipe = calibrated_recipe(text)
    settings = Settings(calibration=text)
    return (
        quantize(str(model), recipe, out, settings) if run else plan(str(model), recipe, settings)
    )


VERBS = {
    "generate": (lambda m, t, out: api.generate(m, TEXT_WITH_TOKEN, raw=True), "the prompt: "),
    "chat": (lambda m, t, out: api.generate(m, TEXT_WITH_TOKEN), "the prompt in the model's chat template: "),
    "eval": (
        lambda m, t, out: evaluate_models(m, [], options(text=TEXT_WITH_TOKEN + TEXT)),
        "the text that is scored: ",
    ),
    "eval --generated": (
        lambda m, t, out: evaluate_models(m, [], options(prompts=Prompts("p", ("a", TEXT_WITH_TOKEN), 4))),
        "--generated: prompt 2: "),
    "tasks": (
        lambda m, t, out: evaluate_tasks(m, [("a", "b"), (TEXT_WITH_TOKEN, " b")]),
        "the text that begins with 'look at <image> "),
    "plan": (lambda m, t, out: quantize_or_plan(m, t, out, run=False), "t.jsonl, document 2: "),
    "quantize": (lambda m, t, out: quantize_or_plan(m, t, out, run=True), "t.jsonl, document 2: "),
    "imatrix": (
        lambda m, t, out: make_imatrix(m, calibrated_recipe(t), out, Settings(calibration=t)),
        "t.jsonl, document 2: "),
}  # fmt: skip


def evaluate_tasks(model, pairs):
    from quantforge.runtime.text_processing import as_input_errors

    with as_input_errors():  # as `evaluate`
        return TaskModel(load(model).model, load_tokenizer(model), 64).score_continuations(pairs)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_names_the_token_without_an_embedding(name, model, text, tmp_path):
    call, context = VERBS[name]
    with pytest.raises(InputError, match=PAST_MESSAGE) as refused:
        call(model, text, tmp_path / "out")
    assert context in refused.value.message
    assert "leave it out" in refused.value.hint
    assert not (tmp_path / "out").exists()


def test_without_the_token_generation_works_and_verify_warns(model, rounded):
    report = verify(rounded, model)
    assert [(finding.check, finding.severity) for finding in report.findings] == [
        ("vocabulary", "warning")
    ]
    assert f"'<image>' (id {VOCABULARY})" in report.findings[0].detail
    assert api.generate(rounded, "the weights", raw=True, max_tokens=2)


def test_a_warning_fails_only_with_strict(rounded, capsys):
    words = ("verify", rounded, "--no-forward", "-q")
    for strict, code, verdict in (
        ((), 0, "verified, with 1 warning"),
        (("--strict",), 5, "1 warning: failed"),
    ):
        ended = run_command(capsys, *words, *strict)
        first, last = ended.out.splitlines()[1:]
        assert (ended.code, last) == (code, verdict)
        assert first.startswith("warning: model.embed_tokens.weight: ")


def test_a_chat_template_that_writes_the_token_is_refused(model, tmp_path):
    always = copy_with_edited_tokenizer(model, tmp_path / "m", lambda it: None)
    (always / "chat_template.jinja").write_text("<image>{{ messages[0].content }}")
    with pytest.raises(InputError, match=PAST_MESSAGE):
        api.generate(always, "hello")
    assert api.generate(always, "hello", raw=True, max_tokens=1)


def test_such_a_bos_token_is_refused_and_eos_is_ignored(model, tmp_path):
    config = json.loads((model / "tokenizer_config.json").read_text())
    both = copy_with_edited_tokenizer(model, tmp_path / "m", lambda it: None)
    ends = {**config, "eos_token": "<image>"}
    (both / "tokenizer_config.json").write_text(json.dumps(ends))
    assert load_tokenizer(both).eos_id is None
    begins = {**config, "bos_token": "<image>", "add_bos_token": True}
    (both / "tokenizer_config.json").write_text(json.dumps(begins))
    with pytest.raises(InputError, match="the token that begins every text"):
        load_tokenizer(both)


@pytest.mark.parametrize("values", [{}, {"special": False}, {"id": VOCABULARY + 7}])
def test_gguf_export_drops_the_token_with_an_event(values, tiny, tmp_path):
    source = copy_with_edited_tokenizer(
        tiny("llama-tied"), tmp_path / "m", lambda it: add_token(it, **values)
    )
    result = api.export(
        str(source), Recipe(type="F32", format="gguf"), tmp_path / "x.gguf", Settings()
    )
    (event,) = [item for item in result.events if item.kind == "tokens-dropped"]
    assert "'<image>'" in event.detail
    assert f"past the {VOCABULARY} rows" in event.detail
    assert verify(tmp_path / "x.gguf", source).findings == []
    pytest.importorskip("xllamacpp")
    from quantforge.evaluation.llama_cpp import LlamaCpp

    ids = LlamaCpp(tmp_path / "x.gguf", 32).tokenize(TEXT_WITH_TOKEN, special=True)
    assert ids == load_tokenizer(tmp_path / "x.gguf").encode(TEXT_WITH_TOKEN)
    assert max(ids) < VOCABULARY


def test_dropped_pad_token_has_no_key_and_bos_is_refused(tiny, tmp_path):
    """A pad token without a row gets no key; a token put before every text is refused."""
    source = copy_with_edited_tokenizer(tiny("llama-tied"), tmp_path / "m", add_token)
    path = source / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "pad_token": "<image>"}))
    file = read_gguf(export(source, tmp_path / "x.gguf", "F32"))
    assert "tokenizer.ggml.padding_token_id" not in file.metadata

    def begin(tokenizer: dict) -> None:
        ids = {"<image>": {"id": "<image>", "ids": [VOCABULARY], "tokens": ["<image>"]}}
        single = [
            {"SpecialToken": {"id": "<image>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": ids}  # fmt: skip

    begins = copy_with_edited_tokenizer(source, tmp_path / "b", begin)
    with pytest.raises(InputError, match=f"'<image>' has id {VOCABULARY}"):
        export(begins, tmp_path / "y.gguf", "F32")
