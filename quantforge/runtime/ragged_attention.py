"""Attention of several new tokens per sequence over the paged KV cache, and ragged batches, in plain PyTorch.

A ragged batch concatenates spans of new tokens of several sequences, of different lengths. Operations on single tokens
(products, norms, rotary) work on the concatenation. Attention handles two groups. Each token of a short span uses the
decoding kernel, as if it were the newest token of its sequence: the length passed to the kernel hides later tokens. So
the tokens of a verified draft get exactly the same results as in one-by-one decoding. A long span, or one whose tokens
form a tree, is computed at once over the pages of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantforge.runtime.cache import CacheRows, PagedCache
from quantforge_kernels.attention import attend
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.kv import PAGE_SIZE
from quantforge_kernels.score_options import ScoreOptions

Taps = dict[int, Tensor | None] | None  # inputs of some decoder blocks, by block number
SHORT_SPAN = 8  # most tokens of a span that is computed token by token


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence in a ragged batch.

    Attributes:
        row: row of the sequence in the page table.
        tokens: number of new tokens, at least 1.
        tree: attention mask ``[n, n]`` (bool) between the n tokens of a tree, diagonal included; None for a causal
            mask. The new tokens are the last of the n; the others are in the cache already. Cache slots follow the
            order of the tokens, rotary positions follow their depth in the tree.
    """

    row: int
    tokens: int
    tree: Tensor | None = None


class RaggedBatch:
    """Spans of new tokens with their cache slots and positions; computes their attention.

    Args:
        spans: spans of different cache rows; at least one.
        cache: KV cache with the earlier tokens; pages for the new tokens must be reserved.
        taps: block inputs to fill, see `Decoder.hidden_of_spans`.

    Attributes:
        slots: cache slots ``[tokens]``, by page table of a layer (`CacheLayout.table_keys`).
        positions: positions of the tokens in their sequences, ``[tokens]``.
        taps: block inputs to fill.
    """

    def __init__(self, spans: Sequence[Span], cache: PagedCache, taps: Taps = None) -> None:
        self.taps = taps
        device = cache.table.device
        cache.layout.check_step_size(max(span.tokens for span in spans))
        starts = [cache.length(span.row) for span in spans]
        span_table = torch.tensor(
            [(span.row, start, span.tokens) for span, start in zip(spans, starts, strict=True)]
        )
        rows, begin_positions, _ = span_table.repeat_interleave(span_table[:, 2], 0).unbind(1)
        ends = span_table[:, 2].cumsum(0)
        first = (ends - span_table[:, 2]).repeat_interleave(span_table[:, 2])
        offset = torch.arange(len(rows)) - first
        rows, token_positions = rows.to(device), (begin_positions + offset).to(device)
        self.slots = {
            key: table[rows, token_positions // PAGE_SIZE].long() * PAGE_SIZE
            + token_positions % PAGE_SIZE
            for key, table in cache.tables.items()
        }
        self.positions = token_positions
        self._long_spans: list[tuple[slice, Span, int]] = []
        is_short = torch.ones(len(rows), dtype=torch.bool)
        for span, start, end in zip(spans, starts, ends.tolist(), strict=True):
            if span.tokens > SHORT_SPAN or span.tree is not None:
                token_range = slice(end - span.tokens, end)
                is_short[token_range] = False
                self._long_spans.append((token_range, span, start + span.tokens))
                if span.tree is not None:
                    self.positions = self.positions.clone()
                    tree_start = start + span.tokens - len(span.tree)
                    self.positions[token_range] = (
                        tree_start + tree_depths(span.tree.to(device))[-span.tokens :]
                    )
        self._short_tokens = is_short.nonzero()[:, 0].to(device)
        if self._long_spans:
            rows, token_positions = rows[self._short_tokens], token_positions[self._short_tokens]
        pages = (
            int(((begin_positions + offset)[is_short]).max()) // PAGE_SIZE + 1
            if len(token_positions)
            else 0
        )
        self._tables = {key: table[rows, :pages] for key, table in cache.tables.items()}
        self._lengths = (token_positions + 1).int()

    def attend(self, q: Tensor, layer: int, cache: CacheRows, scores: ScoreOptions) -> Tensor:
        """Compute attention ``[tokens, heads, head]`` of queries of the same shape over the cached keys and values."""
        if not self._long_spans:
            return self._attend_short_spans(q, layer, cache, scores)
        out = torch.empty_like(q)
        if len(self._short_tokens):
            out[self._short_tokens] = self._attend_short_spans(
                q[self._short_tokens], layer, cache, scores
            )
        for token_range, span, tokens in self._long_spans:
            first = pages_before(tokens - span.tokens, scores)
            pages = cache.table_of(layer)[span.row : span.row + 1, first : -(-tokens // PAGE_SIZE)]
            keys, values = cache.read(layer, pages)
            # Read nothing after the last token: an earlier owner of the page may have left NaN there.
            visible = tokens - first * PAGE_SIZE
            entries = keys[0, :visible], values[0, :visible]
            out[token_range] = attend_span(q[token_range], entries, scores, span.tree)
        return out

    def _attend_short_spans(
        self, q: Tensor, layer: int, cache: CacheRows, scores: ScoreOptions
    ) -> Tensor:
        table = self._tables[cache.table_keys[layer]]
        return attend(q, *cache.layers[layer], table, self._lengths, scores)


def attend_batch(q: Tensor, layer: int, cache: CacheRows, scores: ScoreOptions) -> Tensor:
    """Compute attention ``[sequences, tokens, heads, head]`` of queries of the last tokens of every cached sequence."""
    tokens = q.shape[1]
    longest = int(cache.lengths.max())
    first = pages_before(int(cache.lengths.min()) - tokens, scores)
    keys, values = cache.read(layer, cache.table_of(layer)[:, first : -(-longest // PAGE_SIZE)])
    query_positions = (
        cache.lengths[:, None] - first * PAGE_SIZE - tokens + torch.arange(tokens, device=q.device)
    )
    cached_positions = torch.arange(keys.shape[1], device=q.device)
    mask = cached_positions <= query_positions[..., None]  # [sequences, tokens, cached]
    if scores.window:
        mask &= cached_positions > query_positions[..., None] - scores.window
    return _masked_attention(q, keys, values, mask, scores)


def pages_before(start: int, scores: ScoreOptions) -> int:
    """Return how many leading pages are outside the attention window of all tokens from position ``start`` on."""
    return max(0, start - scores.window + 1) // PAGE_SIZE if scores.window else 0


def attend_span(
    q: Tensor,
    entries: tuple[Tensor, Tensor],
    scores: ScoreOptions,
    tree: Tensor | None = None,
) -> Tensor:
    """Compute attention ``[tokens, heads, head]`` of the last tokens of one sequence.

    Args:
        q: queries ``[tokens, heads, head]``.
        entries: keys and values ``[cached, kv_heads, head]`` of the sequence, ending with these tokens; entries before
            their attention windows may be left out.
        scores: scale, soft cap and window of the attention scores.
        tree: attention mask ``[n, n]`` (bool) between the last n tokens, as `Span.tree`; causal by default.
    """
    keys, values = entries
    tokens, cached = len(q), len(keys)
    positions = torch.arange(cached, device=q.device)
    if tree is None:
        mask = positions <= positions[cached - tokens :, None]
    else:
        start = cached - len(tree)
        positions = torch.cat((positions[:start], tree_depths(tree) + start))
        mask = torch.cat((tree.new_ones(tokens, start), tree[-tokens:]), 1)
    if scores.window:
        mask &= positions > positions[cached - tokens :, None] - scores.window
    return _masked_attention(q[None], keys[None], values[None], mask[None], scores)[0]


def tree_depths(tree: Tensor) -> Tensor:
    """Return the depth of each token of a tree with attention mask ``[n, n]``; the root has depth 0."""
    return tree.sum(-1) - 1


def _masked_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: ScoreOptions
) -> Tensor:
    q, keys, values = (tensor.transpose(1, 2) for tensor in (q, keys, values))
    if scores.softcap:
        out = _softcapped_attention(q, keys, values, mask[:, None], scores)
    else:
        compute_dtype = many_rows.compute_dtype(q)
        out = scaled_dot_product_attention(
            q.to(compute_dtype),
            keys.to(compute_dtype),
            values.to(compute_dtype),
            mask[:, None],
            scale=scores.scale,
            enable_gqa=True,
        ).to(q.dtype)
    return out.transpose(1, 2)


def _softcapped_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: ScoreOptions
) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = many_rows.matmul(q, keys.transpose(2, 3)) * scores.scale
    logits = torch.tanh(logits / scores.softcap) * scores.softcap
    probabilities = logits.float().masked_fill(~mask, float("-inf")).softmax(-1)
    return many_rows.matmul(probabilities.to(q.dtype), values)
