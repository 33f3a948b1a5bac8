"""Decoding steps have the same bits when they are recorded or padded."""

from __future__ import annotations

import pytest
import torch

from quantforge.api import quantize
from quantforge.recipe import Recipe
from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import GenerationRequest
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import padded_batch_size
from quantforge.runtime.load import load
from quantforge.runtime.sampling import choose_tokens
from quantforge.runtime.speculation import verify_drafts
from quantforge.settings import Settings
from quantforge_kernels.cpu.instruction_sets import best_instruction_set

PROMPTS = torch.randint(3, 300, (7, 30), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def packed(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "q"
    quantize(str(tiny("qwen3")), Recipe(scheme="int4:g32:sym", scales="absmax"), path, Settings())
    return Decoder(load(path, dtype=torch.bfloat16).model)


def logits_of(decoder, monkeypatch, *, recorded=True, **options):
    """Return the logits of every step; requests leave one after the other."""
    results = []
    monkeypatch.setattr(
        verify_drafts,
        "choose_tokens",
        lambda samplers, logits: results.append(logits.clone()) or choose_tokens(samplers, logits),
    )
    engine = ServingEngine(decoder, EngineOptions(rows=7, tokens=80, **options))
    if not recorded:
        engine._decoding_steps = None
    for number, prompt in enumerate(PROMPTS):
        engine.submit(
            GenerationRequest(str(number), tuple(prompt[: 9 + 3 * number]), 3 + 4 * number)
        )
    while not engine.idle:
        engine.step()
    assert engine.counters.pages_free == engine.counters.pages
    return results, engine


@pytest.mark.parametrize("kind", ["", "int4", "k=fp8,v=int4"])
def test_recorded_steps_have_the_same_bits(packed, monkeypatch, kind):
    plain, _ = logits_of(packed, monkeypatch, recorded=False, cache=kind)
    fast, engine = logits_of(packed, monkeypatch, cache=kind)
    assert {len(step) for step in plain} == set(range(1, 8))
    assert len(plain) == len(fast)
    for plain_step, recorded_step in zip(plain, fast, strict=True):
        assert torch.equal(plain_step, recorded_step)
    steps = engine._decoding_steps._steps
    assert set(steps) == {1, 2, 4, 8}
    if best_instruction_set() is not None:
        assert all(step.recorded is not None for _, step in steps.values())


def test_batch_sizes_are_padded_to_few_values():
    numbers = [padded_batch_size(rows) for rows in range(1, 65)]
    assert all(number >= rows for rows, number in enumerate(numbers, 1))
    assert sorted(set(numbers)) == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
