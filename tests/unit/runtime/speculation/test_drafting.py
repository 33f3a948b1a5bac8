"""Drafting options keep the text the same, and invalid drafters are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantforge
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.runtime.load import load
from quantforge.runtime.speculation.draft_model import quantize_draft, recover_weight
from tests.conftest import Tiny
from tests.runs import quantize, recipe
from tests.thorough import parametrize_each_value

DEMO = Path(__file__).parents[4] / "models/demo"
PROMPT = "import os, json, json, json"


@pytest.fixture(scope="module")
def loaded():
    return quantforge.load(DEMO)


@pytest.mark.tokens
@parametrize_each_value(
    ("draft", ["ngram", "int3", str(DEMO)]),
    ("temperature", [0.0, 0.9]),
)
def test_text_is_the_same_with_any_draft(loaded, draft, temperature) -> None:
    options = {"raw": True, "max_tokens": 30, "temperature": temperature, "seed": 1, "logprobs": 1}
    plain = quantforge.generate(loaded, PROMPT, **options)
    drafted = quantforge.generate(loaded, PROMPT, draft=draft, draft_tokens=4, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    pairs = zip(drafted.choices[0].logprobs, plain.choices[0].logprobs, strict=True)
    assert all(abs(item.chosen.logprob - two.chosen.logprob) < 1e-3 for item, two in pairs)
    assert plain.speculation is None
    assert drafted.speculation["passes"] <= drafted.steps


def test_low_bit_draft_shares_unrounded_weights() -> None:
    model = load(DEMO).model
    before = {name: value.clone() for name, value in model.named_parameters()}
    draft = quantize_draft(model, "int2")
    assert draft.get_input_embeddings().weight is model.get_input_embeddings().weight
    original, rounded = (
        part.get_submodule("model.layers.0.self_attn.q_proj") for part in (model, draft)
    )
    error = (recover_weight(original) - recover_weight(rounded)).norm() / recover_weight(
        original
    ).norm()
    assert 0.1 < float(error) < 0.6  # two bits are coarse, and not nothing
    assert all(value.equal(before[name]) for name, value in model.named_parameters())


@pytest.mark.tokens
@pytest.mark.thorough
def test_packed_model_is_rounded_to_fewer_bits_as_draft(tmp_path) -> None:
    quantize(DEMO, tmp_path / "q", recipe(scheme="int4:g64:sym", scales="absmax"))
    model = load(tmp_path / "q").model
    draft = quantize_draft(model, "int2")
    name = "model.layers.0.self_attn.q_proj"
    original, rounded = (part.get_submodule(name) for part in (model, draft))
    assert (original.problem.bits, rounded.problem.bits) == (4, 2)
    error = (recover_weight(original) - recover_weight(rounded)).norm() / recover_weight(
        original
    ).norm()
    assert 0.1 < float(error) < 0.6
    options = {"raw": True, "max_tokens": 20}
    plain = quantforge.generate(tmp_path / "q", PROMPT, **options)
    for more in ({}, {"draft_tree": "2x2"}):
        assert (
            quantforge.generate(tmp_path / "q", PROMPT, draft="int2", **more, **options).tokens
            == plain.tokens
        )
    with pytest.raises(InputError, match="no linear"):
        quantize_draft(model, "int4")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"draft": "int5"}, UsageError),  # no such path
        ({"draft": "ngram", "draft_tokens": 0}, UsageError),
        ({"draft": "ngram", "draft_tokens": 1000}, UsageError),
        ({"draft": "ngram", "n": 2, "temperature": 1.0}, UsageError),
        ({"draft": "ngram", "beams": 2}, UsageError),
    ],
)
def test_invalid_drafters_are_refused(loaded, options, error) -> None:
    with pytest.raises(error):
        quantforge.generate(loaded, PROMPT, raw=True, max_tokens=4, **options)


def test_draft_of_another_vocabulary_is_refused(loaded, tiny: Tiny) -> None:
    with pytest.raises(InputError, match="tokens"):
        quantforge.generate(loaded, PROMPT, raw=True, max_tokens=4, draft=str(tiny("llama")))


def test_drafting_for_an_unsupported_family_is_refused(tiny: Tiny) -> None:
    with pytest.raises(RefusedError):
        quantforge.generate(str(tiny("falcon-h1")), "a", raw=True, max_tokens=4, draft="ngram")
