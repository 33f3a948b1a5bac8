"""Generated answers: scores along the reference's answers, divergence of a model's own, and block errors."""

from __future__ import annotations

import json

import pytest
import torch

from quantforge.api import quantize
from quantforge.api.scored_text import PROMPTS, prompts_name, read_prompts
from quantforge.errors import InputError, UsageError
from quantforge.evaluation.block_errors import block_errors, block_states
from quantforge.evaluation.reference_text import (
    Answer,
    Prompts,
    first_difference,
    summarize_answers,
)
from quantforge.recipe import Recipe
from quantforge.runtime.load import load
from quantforge.settings import Settings
from tests.evaluations import evaluate_models, evaluation_windows, load_tokenizer, options

PROMPTS_ASKED = Prompts("a test", ("the weights of", "1 + 1 = 2. the grid is the"), 12)


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    source = tiny("llama-tied")
    out = tmp_path_factory.mktemp("generated") / "int2"
    quantize(str(source), Recipe(scheme="int2:g32:sym", scales="absmax"), out, Settings())
    return source, out


@pytest.mark.tokens
def test_answers_and_divergence_equal_those_of_transformers(models):
    source, rounded = models
    _, itself, row = evaluate_models(source, [source, rounded], options(prompts=PROMPTS_ASKED)).rows
    assert itself["generated"]["kl_mean"] == 0
    assert itself["generated"]["diverged_answers"] == 0
    assert itself["generated"]["length_ratio"] == 1

    reference, model = load(source).model, load(rounded).model
    tokenizer = load_tokenizer(source)
    means, texts, first = [], [], []
    with torch.inference_mode():
        for text in PROMPTS_ASKED.texts:
            ids = torch.tensor([tokenizer.encode(text)])
            wholes = []
            for current_model in (reference, model):
                sequence = ids
                for _ in range(12):
                    token = current_model(sequence).logits[:, -1].argmax(-1)
                    sequence = torch.cat([sequence, token[:, None]], 1)
                    if token == 1:  # the end of a text
                        break
                wholes.append(sequence)
            sequence = wholes[0]
            ours, theirs = (
                current_model(sequence).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
                for current_model in (model, reference)
            )
            means.append((theirs.exp() * (theirs - ours)).sum(-1).mean().item())
            answers = [item[0, ids.shape[1] :].tolist() for item in wholes]
            first.append(
                next((i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), None)
            )
            texts.append(tokenizer.tokenizer.decode(answers[1]))
    generated = row["generated"]
    assert generated["kl_mean"] == pytest.approx(sum(means) / 2, rel=1e-3)
    assert [answer["text"] for answer in generated["answers"]] == texts
    assert [answer["diverges_at"] for answer in generated["answers"]] == first
    assert generated["diverged_answers"] == sum(point is not None for point in first) > 0


def test_summary_of_answers_that_diverge_or_end_early():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) == 2
    assert first_difference((1, 2), (1, 2, 3)) == 2
    kl, agrees = torch.tensor([0.2, 0.4]).double(), torch.tensor([True, True, False, True])
    result = summarize_answers(
        [(1, 2), (3, 4)], [Answer((1, 2), "a", True), Answer((3, 5, 6, 7), "b", False)], kl, agrees
    )
    assert result["kl_mean"] == pytest.approx(0.3)
    assert result["top1_agreement"] == 0.75
    assert result["diverged_answers"] == 1
    assert result["tokens_before_divergence"] == (2 + 1) / 2
    assert result["length_ratio"] == 6 / 4


def test_prompts_too_long_for_the_positions_are_refused(models):
    prompts = Prompts("long", ("short", "the weights " * 60), 64)
    with pytest.raises(InputError, match=r"prompt 2 has \d+ tokens, 64 are generated"):
        evaluate_models(models[0], [], options(prompts=prompts))


def test_prompts_are_paragraphs_or_records(tmp_path):
    text, records = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\nstill one\n\n\n  \ntwo\n")
    records.write_text(json.dumps({"prompt": "a\n\nb"}) + "\n" + json.dumps({"prompt": "c"}) + "\n")
    assert read_prompts(str(text), None, offline=True) == ["one\nstill one", "two"]
    assert read_prompts(str(records), None, offline=True) == ["a\n\nb", "c"]
    assert read_prompts("builtin", None, offline=True) == list(PROMPTS)
    assert str(tmp_path) not in prompts_name(str(text))
    with pytest.raises(InputError, match="--generated: there is no file"):
        read_prompts(str(tmp_path / "none.txt"), None, offline=True)
    with pytest.raises(UsageError, match="one source of prompts"):
        read_prompts("builtin=1,self=2", None, offline=True)
    text.write_text("\n\n".join(["one"] * 1000))
    assert len(read_prompts(str(text), None, offline=True)) == 1000
    text.write_text("\n\n".join(["one"] * 1001))
    with pytest.raises(InputError, match="1001 prompts, more than 1000"):
        read_prompts(str(text), None, offline=True)
    text.write_text("\u20ac" * (1 << 19))  # three bytes each: nothing is cut without a word
    with pytest.raises(InputError, match="more than 1048576 bytes"):
        read_prompts(str(text), None, offline=True)
    text.write_text("x" * (1 << 20))
    assert read_prompts(str(text), None, offline=True) == ["x" * (1 << 20)]


def test_prompts_are_rendered_with_the_chat_template(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    )
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo")
    assert read_prompts(str(text), tmp_path, offline=True) == ["[user] one", "[user] two"]


def test_prompts_are_rendered_with_tools_and_unused_columns_noted(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ tools[0].name }}: {{ messages[0].content }}")
    row = {"messages": [{"role": "user", "content": "one"}], "tools": [{"name": "sun"}], "id": 1}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    notes: list[str] = []
    source = str(tmp_path / "p.jsonl")
    result = read_prompts(source, tmp_path, offline=True, note=notes.append)
    assert result == ["sun: one"]
    assert notes == ["--generated: columns that are not used: id in p.jsonl"]


def test_block_errors_exclude_errors_of_earlier_blocks(models):
    source, _ = models
    window = evaluation_windows(source).ids[0]
    reference, other = load(source).model, load(source).model
    reference_states = block_states(reference, window)
    assert block_errors(other, reference_states) == [0, 0, 0]
    other.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    errors = block_errors(other, reference_states)
    assert errors[0] == errors[2] == 0  # the third block reads what the reference's second returned
    with torch.inference_mode():
        states = reference(window[None], output_hidden_states=True).hidden_states
        assert torch.equal(reference_states.inputs[1], states[1])
        changed = other(window[None], output_hidden_states=True).hidden_states[2]
        added = states[2] - states[1]
        assert errors[1] == pytest.approx(
            float((changed - states[2]).norm() / added.norm()), rel=1e-5
        )


def test_a_block_error_relative_to_zero_is_none(models):
    source, _ = models
    reference, other = load(source).model, load(source).model
    for layer in (reference.model.layers[1], other.model.layers[1]):
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.zero_()
    reference_states = block_states(reference, evaluation_windows(source).ids[0])
    assert torch.equal(reference_states.inputs[1], reference_states.outputs[1])
    assert block_errors(other, reference_states) == [0, 0, 0]
    other.model.layers[1].mlp.down_proj.weight.add_(0.1)
    assert block_errors(other, reference_states) == [0, None, 0]


def test_block_errors_need_the_same_number_of_blocks(models, tiny):
    window = evaluation_windows(models[0]).ids[0]
    reference_states = block_states(load(models[0]).model, window)
    shorter = load(models[0]).model
    shorter.model.layers = shorter.model.layers[:2]
    assert block_errors(shorter, reference_states) is None
    assert block_errors(
        load(tiny("gpt2")).model, block_states(load(tiny("gpt2")).model, window)
    ) == [0, 0, 0]
