"""Attention of several new tokens per sequence, as of a prompt, over the paged cache, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantforge.runtime.cache import PagedCache
from quantforge_kernels.attention import Scores
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.kv import PAGE


def attend_many(q: Tensor, layer: int, cache: PagedCache, scores: Scores) -> Tensor:
    """Return attention ``[sequences, tokens, heads, head]`` of queries of that shape, the cache's last tokens."""
    tokens = q.shape[1]
    held = int(cache.lengths.max())
    first = pages_before(int(cache.lengths.min()) - tokens, scores)
    keys, values = cache.read(layer, cache.table_of(layer)[:, first : -(-held // PAGE)])
    new = cache.lengths[:, None] - first * PAGE - tokens + torch.arange(tokens, device=q.device)
    at = torch.arange(keys.shape[1], device=q.device)
    live = at <= new[..., None]  # [sequences, tokens, cached]
    if scores.window:
        live &= at > new[..., None] - scores.window
    return _attend(q, keys, values, live, scores)


def pages_before(start: int, scores: Scores) -> int:
    """Return how many pages lie before all that tokens from place ``start`` on look at."""
    return max(0, start - scores.window + 1) // PAGE if scores.window else 0


def attend_span(
    q: Tensor,
    entries: tuple[Tensor, Tensor],
    scores: Scores,
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


def _attend(q: Tensor, keys: Tensor, values: Tensor, live: Tensor, scores: Scores) -> Tensor:
    q, keys, values = (part.transpose(1, 2) for part in (q, keys, values))
    if scores.cap:
        out = _capped(q, keys, values, live[:, None], scores)
    else:
        kind = many_rows.kind(q)
        out = scaled_dot_product_attention(
            q.to(kind), keys.to(kind), values.to(kind), live[:, None], scale=scores.scale,
            enable_gqa=True,
        ).to(q.dtype)  # fmt: skip
    return out.transpose(1, 2)


def _capped(q: Tensor, keys: Tensor, values: Tensor, live: Tensor, scores: Scores) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    score = many_rows.matmul(q, keys.transpose(2, 3)) * scores.scale
    score = torch.tanh(score / scores.cap) * scores.cap
    weight = score.float().masked_fill(~live, float("-inf")).softmax(-1)
    return many_rows.matmul(weight.to(q.dtype), values)
