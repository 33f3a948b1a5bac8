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
    keys, values = cache.read(layer, -(-held // PAGE))
    at = torch.arange(keys.shape[1], device=q.device)
    new = cache.lengths[:, None] - tokens + torch.arange(tokens, device=q.device)
    live = at <= new[..., None]  # [sequences, tokens, cached]
    if scores.window:
        live &= at > new[..., None] - scores.window
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
