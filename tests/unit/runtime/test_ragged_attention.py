"""Batches of spans with different lengths give transformers' logits."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quantforge.api import quantize
from quantforge.recipe import Recipe
from quantforge.runtime.cache import CacheShape, PagedCache
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import load
from quantforge.runtime.ragged_attention import SHORT_SPAN, RaggedBatch, Span
from quantforge.settings import Settings
from quantforge_kernels.kv import PAGE_SIZE
from quantforge_kernels.score_options import ScoreOptions

FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "cohere", "mixtral")
IDS = torch.randint(3, 300, (3, 70), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models(tiny):
    """Return a function from a family to its model."""
    return cache(lambda family: load(tiny(family)).model)


def advance(decoder, held, steps, given=IDS):
    """Return the logits of every row, computed as ``steps`` of (row, tokens) say."""
    results = [[] for _ in range(held.sequences)]
    for step in steps:
        spans = [Span(row, tokens) for row, tokens in step]
        ids = []
        for row, tokens in step:
            first = held.length(row)
            held.reserve(row, first + tokens)
            ids.append(given[row, first : first + tokens])
        with torch.inference_mode():
            logits = decoder.logits(decoder.hidden_of_spans(torch.cat(ids), spans, held))
        for (row, tokens), part in zip(
            step, logits.split([tokens for _, tokens in step]), strict=True
        ):
            assert len(part) == tokens
            results[row].append(part)
    return [torch.cat(parts) if parts else None for parts in results]


STEPS = [
    [(1, 40)], [(1, 1), (0, 5)], [(0, 33), (1, 3), (2, 20)], [(2, 1), (0, 1), (1, 1)],
    [(1, SHORT_SPAN), (2, SHORT_SPAN + 1)],
    [(0, 31), (1, 17), (2, 40)],
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_have_the_logits_of_transformers(models, family):
    model = models(family)
    with torch.inference_mode():
        expected = model(IDS).logits
    decoder = Decoder(model)
    paged_cache = decoder.cache(3, 80, pages=9)
    result = advance(decoder, paged_cache, STEPS)
    for row in range(3):
        torch.testing.assert_close(result[row], expected[row], rtol=1e-4, atol=1e-4)
    assert (
        [paged_cache.length(row) for row in range(3)]
        == paged_cache.lengths.tolist()
        == [70, 70, 70]
    )


@pytest.mark.parametrize("kind", ["", "int8", "fp8", "int4"])
def test_short_spans_equal_single_tokens_bit_for_bit(tiny, tmp_path, kind):
    """Draft tokens that are verified together; beside others or not."""
    quantize(
        str(tiny("qwen3")),
        Recipe(scheme="int4:g32:sym", scales="absmax"),
        tmp_path / "q",
        Settings(),
    )
    decoder = Decoder(load(tmp_path / "q", dtype=torch.bfloat16).model)
    single = advance(decoder, decoder.cache(3, 80, kind), [[(0, 40)], *[[(0, 1)]] * 10])[0]
    together = [[(0, 40)], [(1, 9)], [(0, 5), (1, 1)], [(0, 3)], [(1, 1), (0, 2)]]
    several = advance(decoder, decoder.cache(2, 80, kind), together)[0]
    assert torch.equal(single, several)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_tree_attention_equals_each_path_alone(models, family):
    """Of 30 tokens, two paths of three tokens that share their first: each as if it were alone."""
    decoder = Decoder(models(family))
    paths = [[0, 1, 3], [0, 2, 4]]
    tree = torch.eye(5, dtype=torch.bool)
    for path in paths:
        for depth, token in enumerate(path):
            tree[token, path[:depth]] = True
    paged_cache = decoder.cache(1, 80)
    advance(decoder, paged_cache, [[(0, 30)]])
    paged_cache.reserve(0, 35)
    new = torch.tensor([7, 8, 9, 10, 11])
    with torch.inference_mode():
        result = decoder.logits(decoder.hidden_of_spans(new, [Span(0, 5, tree)], paged_cache))
        for path in paths:
            expected = models(family)(torch.cat((IDS[0, :30], new[path]))[None]).logits[0, 30:]
            torch.testing.assert_close(result[path], expected, rtol=1e-4, atol=1e-4)


def test_rejected_tokens_are_forgotten(models):
    decoder = Decoder(models("llama"))
    paged_cache = decoder.cache(3, 80)
    expected = advance(decoder, paged_cache, [[(0, 70)]])[0]
    paged_cache.truncate_sequence(0, 20)
    assert paged_cache.length(0) == paged_cache.lengths[0] == 20
    assert len(paged_cache.pages_of(0)) == 1
    result = advance(decoder, paged_cache, [[(0, 50)]])[0]
    torch.testing.assert_close(result, expected[20:], rtol=1e-4, atol=1e-4)


def test_pages_of_other_sequences_are_not_read():
    """Who had a page before may have left what is no number."""
    paged_cache = PagedCache(
        CacheShape(1, 2, 8, "", torch.float32), 2, 4 * PAGE_SIZE, torch.device("cpu")
    )
    for store in paged_cache.layers[0]:
        store.codes.fill_(float("nan"))
    for row, tokens in ((0, 40), (1, 3)):
        paged_cache.reserve(row, tokens)
    batch = RaggedBatch([Span(0, 40), Span(1, 3)], paged_cache)
    new = torch.randn(2, 43, 2, 8, generator=torch.Generator().manual_seed(0))
    paged_cache.write(0, batch.slots[0], *new)
    assert batch.attend(new[0], 0, paged_cache, ScoreOptions(1.0)).isfinite().all()
