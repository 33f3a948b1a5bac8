"""In the serving engine every request gets the tokens it would get alone."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from quantforge.errors import InputError, UsageError
from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
    PromptScored,
)
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.speculation.decode import SpeculativeDecoder
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.lookahead import LookaheadDrafter
from tests.fake_decoder import (
    VOCABULARY,
    FakeDecoder,
    chain_tree,
    greedy_tokens,
    next_token,
    oracle_speculation,
)
from tests.thorough import parametrize_each_value


def prompt(length, seed=0):
    return tuple(
        torch.randint(
            0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
    )


def until_idle(engine, most=3000):
    """Yield what happens until there is nothing left to do."""
    for _ in range(most):
        if engine.idle:
            return
        yield from engine.step()
    raise AssertionError("the engine does not come to an end")


def run(engine):
    """Return how each request finished, and the new tokens as they were told."""
    finished, streamed = {}, {}
    for happened in until_idle(engine):
        assert happened.id not in finished
        if isinstance(happened, NewToken):
            assert happened.place == len(streamed.setdefault(happened.id, []))
            streamed[happened.id].append(happened.token)
        else:
            finished[happened.id] = happened
    return finished, streamed


REQUESTS = [GenerationRequest(str(n), prompt(length, n), new) for n, (length, new) in enumerate(
    [(5, 40), (100, 3), (1, 70), (33, 33), (64, 1), (32, 64), (200, 20), (3, 5), (7, 90), (31, 2)]
)]  # fmt: skip
ROOM = {"rows": 4, "tokens": 300, "token_budget": 50, "chunk": 20}


@pytest.mark.parametrize("options", [
    {}, {"pages": 10}, {"rows": 1},
], ids=str)  # fmt: skip
def test_every_request_gets_the_tokens_it_gets_alone(options):
    decoder = FakeDecoder()
    engine = ServingEngine(decoder, EngineOptions(**{**ROOM, **options}))
    for request in REQUESTS:
        engine.submit(request)
    finished, streamed = run(engine)
    for request in REQUESTS:
        assert streamed[request.id] == greedy_tokens(request)
        assert finished[request.id] == Finished(
            request.id, FinishReason.LENGTH, tuple(greedy_tokens(request))
        )
    counters = engine.counters
    assert counters.pages_free == counters.pages
    assert counters.new_tokens == sum(request.new_tokens for request in REQUESTS)
    assert all(sum(tokens for *_, tokens in spans) <= 50 for spans in decoder.passes)
    assert all(tokens <= 20 for spans in decoder.passes for *_, tokens in spans)


def test_youngest_request_is_preempted_when_pages_run_out():
    engine = ServingEngine(FakeDecoder(), EngineOptions(rows=3, tokens=300, pages=9))
    requests = [GenerationRequest(name, prompt(30, n), 200) for n, name in enumerate("abc")]
    for request in requests:
        engine.submit(request)
    finished, streamed = run(engine)
    assert engine.counters.preemptions > 0
    assert list(finished) == ["a", "b", "c"]
    assert streamed == {request.id: greedy_tokens(request) for request in requests}


def test_long_prompts_are_chunked_so_that_others_continue():
    engine = ServingEngine(FakeDecoder(), EngineOptions(rows=4, token_budget=20, chunk=16))
    engine.submit(GenerationRequest("short", prompt(4), 60))
    engine.step()
    engine.submit(GenerationRequest("long", prompt(200, 1), 2))
    for _ in range(12):
        assert [happened.id for happened in engine.step()] == ["short"]
    assert "long" in {happened.id for happened in engine.step()}


def test_request_ends_at_its_stop_token():
    request = GenerationRequest("a", prompt(9), 50)
    stop = greedy_tokens(request)[10]
    engine = ServingEngine(FakeDecoder())
    engine.submit(GenerationRequest("a", prompt(9), 50, frozenset({stop})))
    expected = tuple(greedy_tokens(request)[: greedy_tokens(request).index(stop) + 1])
    assert run(engine)[0]["a"] == Finished("a", FinishReason.STOP, expected)


@pytest.mark.parametrize("steps", [0, 1, 8])
def test_cancelled_requests_release_their_pages(steps):
    """While it waits, in the middle of its prompt, and behind it."""
    engine = ServingEngine(FakeDecoder(), EngineOptions(rows=2, token_budget=32, chunk=32))
    requests = [GenerationRequest(name, prompt(100, n), 30) for n, name in enumerate("abc")]
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        engine.step()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    finished = {
        happened.id: happened for happened in until_idle(engine) if isinstance(happened, Finished)
    }
    assert finished["a"].reason == FinishReason.CANCELLED
    for request in requests[1:]:
        assert list(finished[request.id].tokens) == greedy_tokens(request)
    assert engine.counters.pages_free == engine.counters.pages
    engine.submit(requests[0])  # its id is free again
    assert list(run(engine)[0]["a"].tokens) == greedy_tokens(requests[0])


def test_request_larger_than_the_cache_is_refused():
    engine = ServingEngine(FakeDecoder(), EngineOptions(rows=2, tokens=300, pages=4))
    engine.submit(GenerationRequest("there", prompt(3), 2))
    with pytest.raises(InputError, match="room for 129"):
        engine.submit(GenerationRequest("a", prompt(100), 30))
    engine.submit(GenerationRequest("a", prompt(100), 29))
    finished, _ = run(engine)
    assert set(finished) == {"there", "a"}
    with pytest.raises(InputError, match="400 positions"):
        ServingEngine(FakeDecoder(), EngineOptions(tokens=401))


@pytest.mark.parametrize("options", [{}, {"pages": 7}], ids=str)
def test_prompt_tokens_are_scored_once(options):
    """Log-probabilities of all tokens but the first, in order, also where they are computed again."""
    engine = ServingEngine(FakeDecoder(), EngineOptions(**{**ROOM, **options}))
    requests = [GenerationRequest(str(n), prompt(100, 0)[:length], 90, prompt_logprobs=n)
             for n, length in enumerate((30, 1, 40, 100))]  # fmt: skip
    for request in requests:
        engine.submit(request)
    scores_of = {request.id: [] for request in requests}
    for happened in until_idle(engine):
        if isinstance(happened, PromptScored):
            assert happened.first == len(scores_of[happened.id]) + 1
            scores_of[happened.id] += happened.tokens
    assert (engine.counters.preemptions > 0) == ("pages" in options)
    for number, request in enumerate(requests):
        scores = scores_of[request.id]
        assert [score.token for score in scores] == list(request.ids[1:])
        for index, score in enumerate(scores, 1):
            logits = torch.zeros(VOCABULARY)
            logits[next_token(request.ids[:index])] = 1
            assert score.logprob == pytest.approx(float(logits.log_softmax(-1)[score.token]))
            assert len(score.top) == number


def test_sampling_does_not_depend_on_neighbours():
    class Flat(FakeDecoder):
        def logits(self, hidden):
            return torch.stack(
                [torch.cos(torch.arange(VOCABULARY) * (1 + value[0])) for value in hidden]
            )

    rules = [Sampling(temperature=0.9, seed=5), Sampling(temperature=1.5, top_k=9, seed=1), Sampling(),
             Sampling(temperature=1.0, repetition_penalty=1.3, seed=9), Sampling(repetition_penalty=2.0)]  # fmt: skip
    requests = [
        GenerationRequest(str(n), prompt(20 + n, n), 60, sampling=rule)
        for n, rule in enumerate(rules)
    ]
    results = []
    for options in ({"rows": 1}, {"rows": 5}, {"rows": 5, "pages": 7}):
        engine = ServingEngine(Flat(), EngineOptions(**options))
        for request in requests:
            engine.submit(request)
        results.append(run(engine)[1])
    assert engine.counters.preemptions > 0
    assert results[0] == results[1] == results[2]
    assert len({tuple(tokens) for tokens in results[0].values()}) == len(rules)


def test_nan_logits_end_only_their_request():
    class Damaged(FakeDecoder):
        def logits(self, hidden):
            return super().logits(hidden).masked_fill(hidden == following_bad, float("nan"))

    good = GenerationRequest("good", prompt(9, 1), 20)
    bad = GenerationRequest("bad", prompt(9, 2), 20)
    following_bad = next(token for token in greedy_tokens(bad) if token not in greedy_tokens(good))
    engine = ServingEngine(Damaged())
    for request in (good, bad):
        engine.submit(request)
    finished, _ = run(engine)
    assert finished["bad"].reason == FinishReason.ERROR
    assert "is nan" in finished["bad"].error
    assert list(finished["good"].tokens) == greedy_tokens(good)
    assert engine.counters.pages_free == engine.counters.pages


@parametrize_each_value(
    ("shape", [(1,), (1, 1, 1, 1, 1), (3, 2), (2, 1, 1)]),
    (
        "options",
        [
            {},
            {"pages": 10},
            {"rows": 1},
            {"token_budget": 4},
        ],
    ),
    ids=str,
)
def test_drafts_change_no_completion(options, shape):
    """Stops in the middle of a pass, last tokens, pages that run out: each request has the tokens that it has alone."""
    requests = [
        *REQUESTS,
        GenerationRequest("stops", prompt(9, 77), 60, stop=frozenset(range(0, 61, 7))),
    ]
    engine = ServingEngine(
        FakeDecoder(), EngineOptions(**{**ROOM, **options}), oracle_speculation(shape)
    )
    for request in requests:
        engine.submit(request)
    finished, streamed = run(engine)
    for request in requests:
        assert streamed[request.id] == greedy_tokens(request) == list(finished[request.id].tokens)
    counters, counts = engine.counters, engine.counters.speculation
    assert counters.pages_free == counters.pages
    if options.get("token_budget") == 4:  # one for each row: none is left for drafts
        assert counts.drafted <= 3 * 300
    else:
        assert counts.accepted > 20
        assert counts.rejected_passes > 0
        assert counters.steps < sum(request.new_tokens for request in requests)
    assert not engine._drafter._drafters  # let go of with their requests


def test_single_text_drafters_are_refused():
    with pytest.raises(UsageError, match="single text"):
        ServingEngine(
            FakeDecoder(),
            EngineOptions(**ROOM),
            replace(oracle_speculation((1,)), drafter=lambda room: LookaheadDrafter()),
        )


def test_useless_drafts_are_turned_off():
    """An oracle that is always wrong is not asked for long."""
    wrong = SpeculativeDecoder(None, lambda room: Wrong(), 3)
    engine = ServingEngine(FakeDecoder(), EngineOptions(rows=2, tokens=300), wrong)
    for number in range(2):
        engine.submit(GenerationRequest(str(number), prompt(5, number), 250))
    run(engine)
    assert 0 < engine.counters.speculation.draft_passes < 150
    assert engine.counters.speculation.accepted == 0


class Wrong(Drafter):
    """Drafts a token that never follows, and takes its time."""

    def draft(self, history, most, sampler):
        time.sleep(0.01)
        return chain_tree([(next_token(history) + 1) % VOCABULARY] * most)
