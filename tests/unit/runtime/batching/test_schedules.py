"""Random schedules of requests give the plain results and leak no page."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
)
from quantforge_kernels.kv import PAGE_SIZE
from tests.fake_decoder import FakeDecoder, greedy_tokens, oracle_speculation

LONGEST = 150
BEGINNINGS = [tuple((n * (n + seed)) % 59 for n in range(100)) for seed in range(3)]


@st.composite
def request_parts(draw):
    """Draw a prompt, mostly one that begins as others do, and how many tokens are to follow."""
    begin = draw(st.sampled_from(BEGINNINGS))[: draw(st.integers(0, 100))]
    own = draw(st.lists(st.integers(0, 60), min_size=0 if begin else 1, max_size=20))
    stop = frozenset(draw(st.lists(st.integers(0, 60), max_size=1)))
    return (*begin, *own), draw(st.integers(1, 29)), stop


options_of = st.fixed_dictionaries({
    "rows": st.integers(1, 5), "pages": st.integers(-(-LONGEST // PAGE_SIZE), 14), "chunk": st.integers(1, 60),
    "token_budget": st.integers(5, 80),
})  # fmt: skip
# Of trees of drafted tokens
shapes_of = st.none() | st.lists(st.integers(1, 3), min_size=1, max_size=4)
# Steps in which a request comes, and in which one is cancelled.
arrivals_of = st.lists(st.tuples(st.integers(0, 30), request_parts()), min_size=1, max_size=9)
cancelled_of = st.dictionaries(st.integers(0, 8), st.integers(0, 60), max_size=3)


def check_pages(engine):
    """Check that every page is free or one row's, and holds what the row has written."""
    cache = engine.cache
    rows = {entry.row: entry for entry in engine._scheduler.running}
    held_pages = [page for row in range(cache.sequences) for page in cache.pages_of(row)]
    assert len(set(held_pages)) == len(held_pages)
    assert cache.free_pages == cache.pages - len(held_pages)
    for row in range(cache.sequences):
        pages, length = cache.pages_of(row), cache.length(row)
        assert row in rows or not pages
        assert len(set(pages)) == len(pages)
        assert cache.table[row, : len(pages)].tolist() == list(pages)
        assert cache.lengths[row] == length <= len(pages) * PAGE_SIZE
        if row in rows:
            keys, _ = cache.read(0, cache.table[row : row + 1])
            assert keys[0, :length, 0, 0].tolist() == rows[row].tokens[:length]


@settings(max_examples=35, deadline=None)
@given(options_of, arrivals_of, cancelled_of, shapes_of)
def test_any_schedule_gives_plain_results_and_leaks_no_page(options, arrivals, cancelled, shape):
    speculative = oracle_speculation(shape) if shape else None
    engine = ServingEngine(FakeDecoder(), EngineOptions(tokens=LONGEST, **options), speculative)
    requests = [
        (when, GenerationRequest(str(n), ids, new, stop))
        for n, (when, (ids, new, stop)) in enumerate(arrivals)
    ]
    finished, away = {}, set()
    # A step computes at least one new token of the oldest request, and each is at most this many steps the oldest.
    most = 31 + sum(len(request.ids) + request.new_tokens for _, request in requests)
    for step in range(most + 1):
        for when, request in requests:
            if when == step:
                engine.submit(request)
        for number, when in cancelled.items():
            if when == step and engine.cancel(str(number)):
                away.add(str(number))
        for happened in engine.step():
            if isinstance(happened, Finished):
                assert happened.id not in finished
                finished[happened.id] = happened
        check_pages(engine)
        if engine.idle and step >= 30:
            break
    assert engine.idle, "a request starves"
    assert set(finished) == {request.id for _, request in requests}
    for _, request in requests:
        completion, expected = finished[request.id], tuple(greedy_tokens(request))
        if request.id in away:
            assert completion.reason == FinishReason.CANCELLED
            assert completion.tokens == expected[: len(completion.tokens)]
        else:
            assert completion.tokens == expected
    counters = engine.counters
    assert counters.pages_free == counters.pages
