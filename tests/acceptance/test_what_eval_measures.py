"""`eval`: figures that transformers confirms, gates, reports, and the other texts and tasks that it scores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.acceptance.support import (
    EVALUATION,
    RTN,
    Make,
    Model,
    command,
    digests,
    document,
    refusal,
)
from tests.thorough import thorough_case

SCHEMA = Path(__file__).parents[2] / "docs" / "eval.schema.json"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "scored.txt"
    file.write_text("the weights of each matrix are rounded, row by row; 1 + 1 = 2. " * 20)
    return file


@pytest.fixture(scope="module")
def rounded(make: Make) -> Path:
    return make("quantize", "llama", RTN).path


@pytest.fixture(scope="module")
def evaluated(model: Model, rounded: Path, text: Path) -> Any:
    return document("eval", model("llama"), rounded, "--text", text, EVALUATION)


def test_perplexity_and_divergence_match_transformers(
    model: Model, rounded: Path, text: Path, evaluated: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    document("export", rounded, "--format plain -o", tmp_path / "plain")
    ids = AutoTokenizer.from_pretrained(model("llama"))(text.read_text(), return_tensors="pt")
    windows = ids["input_ids"][0, : 4 * 32].reshape(4, 32)
    logs = []
    for path in (model("llama"), tmp_path / "plain"):
        network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            logs.append(network(windows).logits[:, :-1].double().log_softmax(-1))
    rows, protocol = evaluated["models"], evaluated["protocol"]
    assert (protocol["windows"], protocol["length"], protocol["tokens_scored"]) == (4, 32, 4 * 31)
    for row, log in zip(rows, logs, strict=True):
        nll = -log.gather(2, windows[:, 1:, None]).mean(dim=(1, 2))
        assert row["nll"] == pytest.approx(float(nll.mean()), rel=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(float(nll.mean())), rel=1e-4)
        deviation = float(nll.std()) / 2  # of the mean over four windows
        assert row["perplexity_se"] == pytest.approx(row["perplexity"] * deviation, rel=0.02)
    each = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    assert rows[1]["kl_mean"] == pytest.approx(float(each.mean()), rel=1e-3)
    assert rows[1]["kl_se"] == pytest.approx(float(each.mean(1).std()) / 2, rel=0.02)
    agreement = (logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean()
    assert rows[1]["top1_agreement"] == pytest.approx(float(agreement), abs=1e-6)


def test_the_eval_document_conforms_to_its_schema(evaluated: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(evaluated, schema)


def test_an_unquantized_copy_has_zero_divergence(model: Model, make: Make) -> None:
    copy = make("export", "llama", "--format plain").path
    (_, row) = document("eval", model("llama"), copy, EVALUATION)["models"]
    assert row["kl_mean"] == pytest.approx(0, abs=1e-9)
    assert (row["top1_agreement"], row["perplexity_increase"]) == (1.0, 0.0)


def test_the_same_codes_score_the_same_in_every_format(
    model: Model, make: Make, rounded: Path
) -> None:
    """The same codes in other files have the same divergence, through packed weights."""
    others = [
        make("export", rounded, "--format", format_key).path
        for format_key in ("gguf", "gptq", "mlx")
    ]
    rows = document("eval", model("llama"), rounded, *others, EVALUATION)["models"][1:]
    assert [row["format"] for row in rows] == ["compressed-tensors", "gguf", "gptq", "mlx"]
    assert all(row["kl_mean"] == pytest.approx(rows[0]["kl_mean"], rel=1e-3) for row in rows)
    assert all(row["resident_bytes"] < 0.6 * rows[0]["weight_bytes"] * 16 / 4 for row in rows)


def test_the_eval_table_shows_names_errors_and_protocol(
    model: Model, rounded: Path, text: Path
) -> None:
    shown = command("eval", model("llama"), rounded, "--text", text, EVALUATION)
    assert shown.code == 0
    assert rounded.name in shown.out
    assert "±" in shown.out
    assert "protocol" in shown.out


def test_speed_and_memory_are_measured(model: Model, rounded: Path) -> None:
    rows = document("eval", model("llama"), rounded, "--windows 1 --length 16")["models"]
    for row in rows:
        assert row["decode_tokens_per_second"] > 0
        assert row["ttft_seconds"] > 0
        assert row["peak_bytes"] > 0
    assert rows[1]["weight_bytes"] < rows[0]["weight_bytes"] / 2


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("--max-kl 1e-6", 6), ("--max-ppl-increase -90%", 2), ("--max-ppl-increase 2", 2),
        ("--max-ppl-increase 90%", 0), thorough_case("--max-kl 5", 0), thorough_case("--max-ppl-increase 900%", 0),
    ],
)  # fmt: skip
def test_gates_set_the_exit_code(
    gate: tuple[str, str], code: int, model: Model, rounded: Path, text: Path
) -> None:
    ended = command("eval", model("llama"), rounded, "--text", text, EVALUATION, gate, "--json")
    assert ended.code == code, ended.err
    if code == 6:  # the figures are there all the same
        assert len(ended.document["models"]) == 2


def test_a_gate_without_a_candidate_model_is_refused(model: Model) -> None:
    refusal(2, "eval", model("llama"), EVALUATION, "--max-kl 0.1")


def test_reports_are_written_as_markdown_json_and_html(
    model: Model, rounded: Path, evaluated: Any, text: Path, tmp_path: Path
) -> None:
    files = [tmp_path / f"report.{kind}" for kind in ("md", "json", "html")]
    words = [word for file in files for word in ("--report", file)]
    base = ("eval", model("llama"), rounded, "--text", text, EVALUATION)
    evaluation = document(base, words, "--summary", tmp_path / "summary.md")
    table, data, page = (file.read_text() for file in files)
    assert json.loads(data)["models"][1]["kl_mean"] == evaluation["models"][1]["kl_mean"]
    for shown in (table, page, (tmp_path / "summary.md").read_text()):
        assert rounded.name in shown
        assert str(rounded.parent) not in shown  # no path of this machine
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    refusal(4, base, words)
    document(base, words, "--overwrite")
    refusal(2, base, "--report", tmp_path / "report.pdf")


def test_eval_card_changes_only_the_model_card(
    model: Model, rounded: Path, text: Path, copied: Any
) -> None:
    result = copied(rounded)
    before = digests(result)
    base = ("eval", model("llama"), result, "--text", text, EVALUATION, "--card", result)
    evaluation = document(base)
    after = digests(result)
    assert {name for name in after if after[name] != before[name]} == {"README.md"}
    card = (result / "README.md").read_text()
    assert f"{evaluation['models'][1]['kl_mean']:.3g}"[:5] in card
    document(base)  # replaces them
    assert digests(result) == after
    assert document("verify", result, "--source", model("llama"))["ok"] is True


def test_generated_answers_of_the_reference_are_scored(
    model: Model, rounded: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the weights of\n\nrow by row")
    words = ("--generated", prompts, "--generated-tokens 6")
    (_, row) = document("eval", model("llama"), rounded, EVALUATION, words)["models"]
    generated = row["generated"]
    assert generated["kl_mean"] > 0
    assert len(generated["answers"]) == 2
    assert 0 <= generated["diverged_answers"] <= 2


def test_eval_measures_the_divergence_of_quantized_caches(model: Model, rounded: Path) -> None:
    words = "--cache int8,int4,k=int8,v=int4 --windows 2 --length 64 --no-speed"
    (_, row) = document("eval", model("llama"), rounded, words)["models"]
    kinds = {cache["kind"]: cache for cache in row["caches"]}
    lost = {
        kind: cache["kl_mean"] for kind, cache in kinds.items() if cache.get("kl_mean") is not None
    }
    assert len(lost) >= 3
    assert lost["int8"] < lost["int4"]


def test_tasks_of_the_harness_run_on_packed_weights(
    model: Model, rounded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"{number} is", "answer": number % 2} for number in range(4)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = tmp_path / "own.yaml"
    task.write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs:\n  data_files: {data}\noutput_type: multiple_choice\n"
        'test_split: train\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        'doc_to_choice: ["even", "odd"]\nmetric_list:\n  - metric: acc\n'
    )
    words = ("eval", model("llama"), rounded, EVALUATION, "--tasks", task)
    for row in document(words)["models"]:
        assert 0 <= row["tasks"]["own"]["acc"] <= 1
    coded = tmp_path / "coded.yaml"
    coded.write_text(task.read_text().replace('"{{question}}"', "!function helper.text"))
    (tmp_path / "helper.py").write_text("raise SystemExit(99)")
    message = refusal(4, words[:-1], coded)
    assert "--allow-code" in message


def test_a_correction_adapter_is_applied_to_packed_weights(
    model: Model, rounded: Path, adapter: Path
) -> None:
    plain, corrected = (
        document("eval", model("llama"), rounded, EVALUATION, words)["models"][1]
        for words in ((), ("--correction", adapter))
    )
    assert corrected["kl_mean"] != plain["kl_mean"]
    assert corrected["weight_bytes"] > plain["weight_bytes"]


def test_a_model_of_another_vocabulary_is_refused(model: Model) -> None:
    message = refusal(3, "eval", model("llama"), model("demo"), EVALUATION)
    assert "vocabular" in message or "tokenizer" in message
