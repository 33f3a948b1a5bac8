"""Sliding-window layers keep only the pages of the window and give the same results."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quantforge.api.serve import _num_cache_pages
from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import Finished, GenerationRequest
from quantforge.runtime.cache import PAGED, CacheLayout, CacheShape, PagedCache
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import load
from quantforge_kernels.kv import PAGE_SIZE
from tests.choices import plain_text
from tests.plain_loop import StopLimits
from tests.thorough import thorough_case

CPU = torch.device("cpu")
CHUNK = 24
# Layers with a window of 16
FAMILIES = {"mistral": 3, "gemma3": 2, "phi3": 3, "cohere2": 2, "qwen2": 2}


@pytest.fixture(scope="module")
def decoder(tiny):
    return cache(lambda family: Decoder(load(tiny(family), dtype=torch.float32).model))


def pages_of(held: PagedCache) -> list[int]:
    """The pages that a layer really has."""
    return [len(keys.codes) for keys, _ in held.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_window_layers_use_fewer_pages(decoder, family):
    paged_cache = decoder(family).cache(2, 128, max_step_tokens=CHUNK)
    assert paged_cache.layout.rings == {16: 3}  # 16 + 24 - 1 tokens begin anywhere in a page
    assert sorted(pages_of(paged_cache)) == [2 * 3] * FAMILIES[family] + [2 * 4] * (
        3 - FAMILIES[family]
    )
    assert set(pages_of(decoder(family).cache(2, 128))) == {2 * 4}  # who shares pages has them all
    parts = [part for pair in paged_cache.layers for store in pair for part in store.tensors()]
    assert sum(part.nbytes for part in parts) == 2 * paged_cache.layout.sequence_bytes(128)


def test_no_ring_where_it_would_not_be_smaller(decoder):
    assert decoder("mistral").cache(1, 96, max_step_tokens=CHUNK).layout.rings == {}
    assert decoder("mistral").cache(1, 97, max_step_tokens=CHUNK).layout.rings == {16: 3}
    assert decoder("mistral").cache(1, 97, max_step_tokens=1).layout.rings == {16: 2}


def test_ring_has_the_smallest_sufficient_size():
    """Every place that a step looks at, or writes, has a page of its own; with a page less two of them share one."""
    for window in (1, 2, 16, 31, 32, 33, 64, 65):
        for max_step_tokens in (1, 2, 24, 32, 33, 96):
            shape = CacheShape(1, 1, 8, "", torch.float32, (window,))
            pages = CacheLayout(shape, 4096, max_step_tokens).rings[window]
            spans = [
                {
                    index // PAGE_SIZE
                    for index in range(max(0, start - window + 1), start + max_step_tokens)
                }
                for start in range(200)
            ]
            assert max(map(len, spans)) == max(pages, 1) or window + max_step_tokens == 2
            assert all(len({page % pages for page in span}) == len(span) for span in spans)


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("gemma3", "16bit"), ("phi3", "16bit")),
        *(thorough_case(family, "16bit") for family in ("mistral", "cohere2", "qwen2")),
        ("gemma3", "k=int8,v=int4"),
    ],
)
def test_generated_tokens_equal_those_of_a_full_cache(decoder, family, kind):
    model = decoder(family)
    generator = torch.Generator().manual_seed(5)
    lengths = [(70, 50), (3, 100), (5, 110), (60, 60), (20, 60)]
    prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n, _ in lengths]
    expected = [
        plain_text(model, prompt, StopLimits(new, cache=kind))
        for prompt, (_, new) in zip(prompts, lengths, strict=True)
    ]
    options = EngineOptions(rows=3, tokens=128, pages=6, chunk=CHUNK, cache=kind)
    engine = ServingEngine(model, options)
    assert engine.cache.layout.rings
    for number, (prompt, (_, new)) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(GenerationRequest(str(number), tuple(prompt), new))
    results = {}
    while not engine.idle:
        results |= {
            event.id: list(event.tokens) for event in engine.step() if isinstance(event, Finished)
        }
    assert sum(map(len, expected)) > 0.1 * sum(new for _, new in lengths)
    for number, tokens in enumerate(expected):
        assert results[str(number)][: len(tokens)] == tokens
    # Where no layer takes pages, none are short.
    assert (engine.counters.preemptions > 0) == (PAGED in engine.cache.table_keys)


def test_logits_equal_those_of_a_full_cache(decoder):
    model = decoder("gemma3")
    ids = torch.randint(3, 300, (2, 120), generator=torch.Generator().manual_seed(6))

    def logits(max_step_tokens, steps):
        paged_cache = model.cache(2, 128, max_step_tokens=max_step_tokens)
        for row in range(2):
            paged_cache.reserve(row, 120)
        results = []
        with torch.inference_mode():
            for part in ids.split(steps, dim=1):
                results.append(model.logits(model.hidden(part, paged_cache)))
                paged_cache.advance_all(part.shape[1])
        return torch.cat(results, 1)

    expected = logits(0, 120)
    for steps in (1, 7, CHUNK):
        torch.testing.assert_close(logits(CHUNK, steps), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        logits(CHUNK, CHUNK + 1)


def test_window_rings_give_a_server_more_tokens(decoder):
    shape = decoder("gemma3").cache_shape()
    layout = CacheLayout(shape, 128, CHUNK)
    memory = 4 * layout.sequence_bytes(128)
    assert _num_cache_pages(layout, 4, memory / (1 << 30)) == 4 * 4
    without = CacheLayout(shape, 128)
    assert _num_cache_pages(without, 4, memory / (1 << 30)) < 4 * 4
