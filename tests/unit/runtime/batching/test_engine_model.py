"""The serving engine gives the tokens of `generate` on the demo model, with any options."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import Finished, GenerationRequest, NewToken
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.load import load
from quantforge.runtime.speculation.decode import SpeculativeDecoder, speculative_decoder
from quantforge.runtime.speculation.draft_options import DraftOptions
from tests.choices import plain_text
from tests.plain_loop import StopLimits, generate
from tests.runs import copy_model, keep_first_blocks
from tests.thorough import mark_others_thorough
from tests.unit.runtime.speculation.test_trees import Planted

DEMO = Path(__file__).parents[4] / "models" / "demo"
# Lengths of prompts, of answers
LENGTHS = [(40, 45), (25, 30), (100, 5), (1, 30), (64, 12), (33, 3), (70, 14)]


@cache
def loaded():
    """Return the first half of the demo, which answers in half of the time."""
    with tempfile.TemporaryDirectory() as directory:
        return load(
            keep_first_blocks(copy_model(DEMO, Path(directory) / "half"), 2), dtype=torch.float32
        )


@cache
def decoder():
    return Decoder(loaded().model)


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
def expected_tokens(kind):
    """Return the tokens of every request alone, up to the first that is nearly a tie."""
    results = [
        plain_text(decoder(), request.ids, StopLimits(request.new_tokens, cache=kind))
        for request in requests()
    ]
    assert sum(map(len, results)) > 0.75 * sum(new for _, new in LENGTHS)
    return results


def answers(engine, kind):
    """Return whether every request is answered as it is alone."""
    for request in requests():
        engine.submit(request)
    finished = {}
    while not engine.idle:
        finished |= {
            event.id: event.tokens for event in engine.step() if isinstance(event, Finished)
        }
    for request, tokens in zip(requests(), expected_tokens(kind), strict=True):
        assert len(finished[request.id]) == request.new_tokens
        assert list(finished[request.id][: len(tokens)]) == tokens
    return len(finished) == len(LENGTHS)


OPTIONS = [{}, {"rows": 1}, {"pages": 4}]
# Kinds of a cache share everything but how a page holds numbers: the two ends with all options, all with two.
CASES = [
    *((kind, options) for kind in ("", "k=int8,v=int4") for options in OPTIONS),
    *((kind, OPTIONS[at]) for kind in ("int8", "fp8", "int4") for at in (0, -1)),
]


@pytest.mark.tokens
@pytest.mark.parametrize(("kind", "options"), mark_others_thorough(CASES, *CASES[::3]), ids=str)
def test_greedy_tokens_equal_those_of_each_request_alone(kind, options):
    arguments = {
        "rows": 4,
        "tokens": 200,
        "token_budget": 48,
        "chunk": 30,
        "cache": kind,
        **options,
    }
    engine = ServingEngine(decoder(), EngineOptions(**arguments))
    assert answers(engine, kind)
    assert engine.counters.pages_free == engine.counters.pages
    assert (engine.counters.preemptions > 0) == ("pages" in options)


@cache
def drafted(draft, tree, tokens=8):
    """Return the model with a drafter, which holds nothing of a text."""
    options = DraftOptions(draft, tokens, tree)
    return replace(speculative_decoder(loaded(), options, lambda _: None), fixed=True)


# Any two values of the three once.
DRAFTED = [
    (kind, *draft, (({}, {"pages": 4})[(at + step) % 2]))
    for at, kind in enumerate(("", "int8", "int4"))
    for step, draft in enumerate([("ngram", ""), ("ngram", "3x1x1"), ("int3", ""), ("int3", "2x2")])
]


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("kind", "draft", "tree", "options"), mark_others_thorough(DRAFTED, *DRAFTED[::4]), ids=str
)
def test_drafts_change_no_completion(kind, draft, tree, options):
    speculative = drafted(draft, tree)
    arguments = {
        "rows": 4,
        "tokens": 200,
        "token_budget": 96,
        "chunk": 30,
        "cache": kind,
        **options,
    }
    engine = ServingEngine(speculative.decoder, EngineOptions(**arguments), speculative)
    assert answers(engine, kind)
    counts = engine.counters.speculation
    assert engine.counters.pages_free == engine.counters.pages
    assert counts.drafted > 20
    assert draft == "ngram" or counts.acceptance > 0.2


@pytest.mark.tokens
@pytest.mark.thorough
def test_sampled_completions_with_drafts_equal_each_request_alone():
    speculative = drafted("int3", "", 3)
    results = []
    for arguments in (None, speculative):
        engine = ServingEngine(speculative.decoder, EngineOptions(rows=4, tokens=200), arguments)
        for number, request in enumerate(requests()):
            sampling = Sampling(temperature=0.9, top_p=0.9, seed=number, logprobs=1)
            engine.submit(replace(request, sampling=sampling))
        streamed = {}
        while not engine.idle:
            for event in engine.step():
                if isinstance(event, NewToken):
                    streamed.setdefault(event.id, []).append(event.token)
        results.append(streamed)
    assert results[0] == results[1]
    assert engine.counters.speculation.accepted > 10


@pytest.mark.tokens
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_accepted_tree_path_is_kept_in_window_rings(tiny, family):
    """Windows go round in a few pages: what is right of a tree lies there like everything else."""
    windowed = Decoder(load(tiny(family)).model)
    ids = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    (plain,) = generate(windowed, [ids], StopLimits(80))

    def planted(_):
        drafter = Planted([*ids, *plain])
        drafter.most = 300  # tokens of its vocabulary
        return drafter

    speculative = SpeculativeDecoder(windowed, planted, 3, fixed=True)
    options = EngineOptions(rows=2, tokens=128, chunk=24, token_budget=64)
    engine = ServingEngine(windowed, options, speculative)
    assert engine.cache.layout.rings
    engine.submit(GenerationRequest("a", tuple(ids), 80))
    finished = []
    while not engine.idle:
        finished += [event for event in engine.step() if isinstance(event, Finished)]
    assert list(finished[0].tokens) == plain
    assert engine.counters.speculation.accepted > 30
