"""The engine on the demo model: greedy tokens are those of `generate`, prompt by prompt, whatever is switched on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generate import StopLimits, generate
from quantforge.runtime.load import load
from quantforge.runtime.serving.engine import ServingEngine
from quantforge.runtime.serving.engine_options import EngineOptions
from quantforge.runtime.serving.generation_requests import Finished, GenerationRequest

DEMO = Path(__file__).parents[4] / "models" / "demo"
LENGTHS = [
    (40, 90), (25, 60), (100, 5), (1, 60), (64, 20), (33, 3), (70, 28),
]  # of prompts, of answers  # fmt: skip
MARGIN = 1e-3  # of logits: nearer ones may change places by rounding


@cache
def decoder():
    return Decoder(load(DEMO, dtype=torch.float32).model)


@cache
def requests():
    ids = torch.randint(
        300, 3000, (len(LENGTHS), 100), generator=torch.Generator().manual_seed(3)
    ).tolist()
    return [
        GenerationRequest(str(n), tuple(row[:length]), new)
        for n, (row, (length, new)) in enumerate(zip(ids, LENGTHS, strict=True))
    ]


@cache
def wanted(kind):
    """Return the tokens of every request alone, up to the first that is nearly a tie."""
    found = []
    for request in requests():
        tokens = generate(decoder(), [request.ids], StopLimits(request.new_tokens, cache=kind))[0]
        held = decoder().cache(1, 200, kind)
        held.reserve(0, 200)
        with torch.inference_mode():
            ids = torch.tensor([[*request.ids, *tokens]])
            logits = decoder().logits(decoder().hidden(ids, held))[0, len(request.ids) - 1 : -1]
        best = logits.topk(2).values
        clear = (best[:, 0] - best[:, 1] > MARGIN).tolist()
        found.append(tokens[: clear.index(False)] if False in clear else tokens)
    assert sum(map(len, found)) > 0.75 * sum(new for _, new in LENGTHS)
    return found


def answers(engine, kind):
    """Return whether every request is answered as it is alone."""
    for request in requests():
        engine.submit(request)
    finished = {}
    while not engine.idle:
        finished |= {one.id: one.tokens for one in engine.step() if isinstance(one, Finished)}
    for request, tokens in zip(requests(), wanted(kind), strict=True):
        assert len(finished[request.id]) == request.new_tokens
        assert list(finished[request.id][: len(tokens)]) == tokens
    return len(finished) == len(LENGTHS)


OPTIONS = [
    {}, {"chunked_prefill": False}, {"batching": "static"}, {"rows": 1}, {"pages": 5}, {"admission": "whole"},
    {"prefix_cache": True}, {"pages": 5, "prefix_cache": True},
]  # fmt: skip
# Kinds of a cache share everything but how a page holds numbers: the two ends with all options, all with two.
CASES = [
    *((kind, options) for kind in ("", "k=int8,v=int4") for options in OPTIONS),
    *((kind, OPTIONS[at]) for kind in ("int8", "fp8", "int4") for at in (0, -1)),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_greedy_tokens_are_those_of_each_request_alone(kind, options):
    given = {"rows": 4, "tokens": 200, "token_budget": 48, "chunk": 30, "cache": kind, **options}
    engine = ServingEngine(decoder(), EngineOptions(**given))
    assert answers(engine, kind)
    assert engine.counters.pages_free == engine.counters.pages
    assert (engine.counters.preemptions > 0) == ("pages" in options)
    if options == {"prefix_cache": True}:
        assert engine.counters.reused_tokens == 0
        assert answers(engine, kind)
        assert engine.counters.reused_tokens > 200
