"""Attention of several new tokens per sequence over the paged cache, and ragged batches of them, in plain torch.

A ragged batch is spans of new tokens of some sequences, of different lengths, side by side as one list of tokens. What
works on single tokens (products, norms, rotary) sees the list. Attention sees two groups. Every token of a short span
is attended from as if it were the newest of its sequence, by the program that decodes: what comes after it is beyond
the length it is given. So a verified draft has the very numbers that it would have had one by one. A long span, or one
whose tokens are a tree, is computed at once over the pages of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantforge.runtime.cache import CacheRows, PagedCache
from quantforge_kernels.attention import ScoreOptions, attend
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.kv import PAGE_SIZE

Taps = dict[int, Tensor | None] | None  # what goes into some blocks, by their numbers
SHORT = 8  # most tokens of a span that are attended from one by one


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence.

    Attributes:
        row: of the cache's table.
        tokens: their number, at least 1.
        tree: ``[n, n]`` bool, which tokens of a tree each one sees, itself among them; None: all before it. These are
            the last of its n tokens, those before them are in the cache. Places there follow the order of the tokens,
            positions follow their depth.
    """

    row: int
    tokens: int
    tree: Tensor | None = None


class RaggedBatch:
    """Places of the tokens of spans, and their attention.

    Args:
        spans: of different rows of the cache; at least one.
        cache: holds what came before; pages for the new tokens are reserved.
        taps: to be filled, see `Decoder.hidden_of`.

    Attributes:
        slots: places ``[tokens]`` in the pages, by key of a layer (`CacheLayout.keys`).
        positions: of the tokens in their sequences, ``[tokens]``.
        taps: as given.
    """

    def __init__(self, spans: Sequence[Span], cache: PagedCache, taps: Taps = None) -> None:
        self.taps = taps
        device = cache.table.device
        cache.layout.expect(max(span.tokens for span in spans))
        starts = [cache.length(span.row) for span in spans]
        given = torch.tensor(
            [(span.row, start, span.tokens) for span, start in zip(spans, starts, strict=True)]
        )
        rows, begin, _ = given.repeat_interleave(given[:, 2], 0).unbind(1)
        ends = given[:, 2].cumsum(0)
        first = (ends - given[:, 2]).repeat_interleave(given[:, 2])
        within = torch.arange(len(rows)) - first
        rows, places = rows.to(device), (begin + within).to(device)
        self.slots = {
            key: table[rows, places // PAGE_SIZE].long() * PAGE_SIZE + places % PAGE_SIZE
            for key, table in cache.tables.items()
        }
        self.positions = places
        self._long: list[tuple[slice, Span, int]] = []
        short = torch.ones(len(rows), dtype=torch.bool)
        for span, start, end in zip(spans, starts, ends.tolist(), strict=True):
            if span.tokens > SHORT or span.tree is not None:
                part = slice(end - span.tokens, end)
                short[part] = False
                self._long.append((part, span, start + span.tokens))
                if span.tree is not None:
                    self.positions = self.positions.clone()
                    begun = start + span.tokens - len(span.tree)
                    self.positions[part] = begun + depths(span.tree.to(device))[-span.tokens :]
        self._short = short.nonzero()[:, 0].to(device)
        if self._long:
            rows, places = rows[self._short], places[self._short]
        pages = int(((begin + within)[short]).max()) // PAGE_SIZE + 1 if len(places) else 0
        self._tables = {key: table[rows, :pages] for key, table in cache.tables.items()}
        self._lengths = (places + 1).int()

    def attend(self, q: Tensor, layer: int, cache: CacheRows, scores: ScoreOptions) -> Tensor:
        """Return attention ``[tokens, heads, head]`` of queries of that shape, whose keys and values are stored."""
        if not self._long:
            return self._attend_short(q, layer, cache, scores)
        out = torch.empty_like(q)
        if len(self._short):
            out[self._short] = self._attend_short(q[self._short], layer, cache, scores)
        for part, span, tokens in self._long:
            first = pages_before(tokens - span.tokens, scores)
            pages = cache.table_of(layer)[span.row : span.row + 1, first : -(-tokens // PAGE_SIZE)]
            keys, values = cache.read(layer, pages)
            # Nothing beyond the last token is read: who had the page before may have left there what is no number.
            seen = tokens - first * PAGE_SIZE
            entries = keys[0, :seen], values[0, :seen]
            out[part] = attend_span(q[part], entries, scores, span.tree)
        return out

    def _attend_short(
        self, q: Tensor, layer: int, cache: CacheRows, scores: ScoreOptions
    ) -> Tensor:
        table = self._tables[cache.keys[layer]]
        return attend(q, *cache.layers[layer], table, self._lengths, scores)


def attend_many(q: Tensor, layer: int, cache: CacheRows, scores: ScoreOptions) -> Tensor:
    """Return attention ``[sequences, tokens, heads, head]`` of queries of that shape, the cache's last tokens."""
    tokens = q.shape[1]
    held = int(cache.lengths.max())
    first = pages_before(int(cache.lengths.min()) - tokens, scores)
    keys, values = cache.read(layer, cache.table_of(layer)[:, first : -(-held // PAGE_SIZE)])
    new = (
        cache.lengths[:, None] - first * PAGE_SIZE - tokens + torch.arange(tokens, device=q.device)
    )
    at = torch.arange(keys.shape[1], device=q.device)
    live = at <= new[..., None]  # [sequences, tokens, cached]
    if scores.window:
        live &= at > new[..., None] - scores.window
    return _attend(q, keys, values, live, scores)


def pages_before(start: int, scores: ScoreOptions) -> int:
    """Return how many pages lie before all that tokens from place ``start`` on look at."""
    return max(0, start - scores.window + 1) // PAGE_SIZE if scores.window else 0


def attend_span(
    q: Tensor,
    entries: tuple[Tensor, Tensor],
    scores: ScoreOptions,
    tree: Tensor | None = None,
) -> Tensor:
    """Return attention ``[tokens, heads, head]`` of queries of that shape: the last tokens of one sequence.

    Args:
        q: queries.
        entries: keys and values ``[cached, kv_heads, head]`` of the sequence, these tokens last; those that are before
            their windows may be left out.
        scores: how scores are made.
        tree: ``[n, n]`` bool, which of the last n tokens each one sees, itself among them, as `Span.tree`; all before
            it when left out.
    """
    keys, values = entries
    tokens, cached = len(q), len(keys)
    at = torch.arange(cached, device=q.device)
    if tree is None:
        live = at <= at[cached - tokens :, None]
    else:
        start = cached - len(tree)
        at = torch.cat((at[:start], depths(tree) + start))
        live = torch.cat((tree.new_ones(tokens, start), tree[-tokens:]), 1)
    if scores.window:
        live &= at > at[cached - tokens :, None] - scores.window
    return _attend(q[None], keys[None], values[None], live[None], scores)[0]


def depths(tree: Tensor) -> Tensor:
    """Return how many tokens of a tree ``[n, n]`` lie before each one on its path."""
    return tree.sum(-1) - 1


def _attend(q: Tensor, keys: Tensor, values: Tensor, live: Tensor, scores: ScoreOptions) -> Tensor:
    q, keys, values = (part.transpose(1, 2) for part in (q, keys, values))
    if scores.softcap:
        out = _capped(q, keys, values, live[:, None], scores)
    else:
        kind = many_rows.compute_dtype(q)
        out = scaled_dot_product_attention(
            q.to(kind),
            keys.to(kind),
            values.to(kind),
            live[:, None],
            scale=scores.scale,
            enable_gqa=True,
        ).to(q.dtype)
    return out.transpose(1, 2)


def _capped(q: Tensor, keys: Tensor, values: Tensor, live: Tensor, scores: ScoreOptions) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    score = many_rows.matmul(q, keys.transpose(2, 3)) * scores.scale
    score = torch.tanh(score / scores.softcap) * scores.softcap
    weight = score.float().masked_fill(~live, float("-inf")).softmax(-1)
    return many_rows.matmul(weight.to(q.dtype), values)
