"""The prefix cache: what was computed is found by its tokens, kept as long as there is room, and never written to."""

from __future__ import annotations

import pytest

from quantforge.runtime.page_pool import PagePool
from quantforge.runtime.serving.engine import ServingEngine
from quantforge.runtime.serving.engine_options import EngineOptions
from quantforge.runtime.serving.generation_requests import Finished, GenerationRequest
from quantforge_kernels.kv import PAGE
from tests.fake_decoder import FakeDecoder, alone

SYSTEM = tuple(number * number % 53 for number in range(4 * PAGE))


def engine_of(**options):
    return ServingEngine(
        FakeDecoder(),
        EngineOptions(**{"rows": 4, "tokens": 300, "prefix_cache": True, "chunk": 256, **options}),
    )


def answered(engine, ids, new=3, name="a"):
    """Return how many tokens of a request were found, and check its answer."""
    before = engine.counters.reused_tokens
    request = GenerationRequest(name, tuple(ids), new)
    engine.submit(request)
    while not engine.idle:
        for happened in engine.step():
            if isinstance(happened, Finished):
                assert list(happened.tokens) == alone(request)
    assert engine.counters.pages_free == engine.counters.pages
    return engine.counters.reused_tokens - before


@pytest.mark.parametrize(("ids", "found"), [
    ((*SYSTEM, 1, 2), 4 * PAGE), (SYSTEM, 4 * PAGE - 1), (SYSTEM[: 2 * PAGE + 5], 2 * PAGE + 4),
    ((*SYSTEM[: PAGE + 7], 60, 60), PAGE + 7), ((60, *SYSTEM), 0), (SYSTEM[:1], 0),
    ((*SYSTEM[:PAGE], 60, *SYSTEM[PAGE + 1 :]), PAGE), (SYSTEM[PAGE:], 0),
], ids=lambda value: str(value) if isinstance(value, int) else "")  # fmt: skip
def test_what_is_common_is_found_and_one_token_computed(ids, found):
    engine = engine_of()
    assert answered(engine, SYSTEM) == 0
    assert answered(engine, ids) == found
    assert sum(tokens for *_, tokens in engine._decoder.passes[-3]) == len(ids) - found
    assert engine.counters.prefix_hits == (found > 0)
    assert answered(engine, (*SYSTEM, 1)) == 4 * PAGE  # nothing was written into what is shared


def test_answers_are_found_too():
    engine = engine_of()
    answer = alone(GenerationRequest("a", SYSTEM, 2 * PAGE))
    answered(engine, SYSTEM, 2 * PAGE)
    assert (
        answered(engine, (*SYSTEM, *answer, 3)) == 6 * PAGE - PAGE
    )  # the last one was not computed


def test_kinds_of_caches_have_other_hashes():
    roots = {engine_of(cache=kind)._scheduler._prefixes._root for kind in ("", "int8")}
    assert len(roots) == 2


def test_running_requests_share_their_pages():
    engine = engine_of()
    for name in "abcd":
        engine.submit(GenerationRequest(name, (*SYSTEM, ord(name) % 50), 40))
        engine.step()
    cache = engine.cache
    assert {cache.held(row)[:4] for row in range(4)} == {cache.held(0)[:4]}
    assert [cache.pool.holders(page) for page in cache.held(0)] == [4, 4, 4, 4, 1]
    engine.cancel("b")
    finished = {}
    while not engine.idle:
        finished |= {one.id: one for one in engine.step() if isinstance(one, Finished)}
    for name in "acd":
        request = GenerationRequest(name, (*SYSTEM, ord(name) % 50), 40)
        assert list(finished[name].tokens) == alone(request)
    assert engine.counters.pages_free == engine.counters.pages


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning():
    engine = engine_of(pages=8)
    first, second = SYSTEM, tuple(reversed(SYSTEM))
    answered(engine, first)
    assert engine.counters.pages_kept == 4
    answered(engine, second[: 3 * PAGE])  # 4 pages, of which 3 are full
    answered(engine, (*first, 1))  # used again
    answered(engine, (59,) * PAGE * 2)  # 3 pages
    assert engine.counters.pages_kept == 7
    assert answered(engine, (*first, 1)) == 4 * PAGE
    assert answered(engine, second[: 3 * PAGE]) == PAGE
    answered(engine, (58,) * (7 * PAGE))  # everything is needed
    assert answered(engine, (*first, 1)) == 0


def test_preempted_requests_find_their_pages():
    engine = engine_of(rows=3, pages=9)
    requests = [GenerationRequest(name, SYSTEM[n : n + 30], 200) for n, name in enumerate("abc")]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        for one in engine.step():
            if isinstance(one, Finished):
                assert list(one.tokens) == alone(requests["abc".index(one.id)])
    counters = engine.counters
    assert counters.preemptions > 0 < counters.reused_tokens
    assert counters.pages_free == counters.pages


def test_kept_pages_are_free_and_the_pool_tells_when_it_takes_them():
    told = []
    pool = PagePool(3)
    pool.forgotten = told.append
    pages = [pool.take() for _ in range(3)]
    for page in pages[:2]:
        pool.keep(page)
    for page in pages[::-1]:
        pool.drop(page)
    assert (pool.free, pool.idle) == (3, 2)
    assert pool.take() == pages[2]
    assert pool.hold(pages[1]) == pages[1]
    assert (pool.free, pool.idle, told) == (1, 1, [])
    assert pool.take() == pages[0]
    assert told == [pages[0]]
    pool.change(pages[1])  # its holder writes to it
    assert told == [pages[0], pages[1]]
    pool.drop(pages[1])
    assert (pool.free, pool.idle) == (1, 0)
