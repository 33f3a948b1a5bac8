"""Attention of one new token per sequence over a paged cache.

By `gpu.attention_kernel` on a GPU, by `cpu.cache_programs` on a processor with vectors, else in torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge_kernels.cpu import layer_launchers
from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.kv import PAGE, Store, decode
from quantforge_kernels.kv_runs import KINDS, run_of
from quantforge_kernels.problem import has_triton, knows_float8, power_of_two

PROGRAMS = 4 * 132
LEAST_PAGES = 4  # of a share, where there is a choice


@dataclass(frozen=True, slots=True)
class Scores:
    """Rule for scores: scaled, softly capped (0: not), over the last ``window`` tokens (0: all)."""

    scale: float
    cap: float = 0.0
    window: int = 0


def attend(
    q: Tensor, keys: Store, values: Store, table: Tensor, lengths: Tensor, scores: Scores
) -> Tensor:
    """Compute attention of the newest token of each sequence over its cache.

    Args:
        q: ``[sequences, heads, head]``, of the newest token of each sequence.
        keys: pages ``[pages, PAGE, kv_heads, ...]``.
        values: likewise; they may be stored in another way.
        table: ``[sequences, most pages]`` int32: the pages of each sequence, in order.
        lengths: ``[sequences]`` int32: tokens in the cache, the newest included; at least 1.
        scores: how scores are made.

    Returns:
        ``[sequences, heads, head]``.
    """
    if q.is_cuda and has_triton():
        return attend_fused(q, keys, values, table, lengths, scores)
    plain = [store.codes for store in (keys, values) if not store.kind]
    if layer_launchers.accepts_cache(q.shape[2], (keys.kind, values.kind), q, *plain):
        return layer_launchers.attend(q, keys, values, table, lengths, scores)
    return attend_plain(q, keys, values, table, lengths, scores)


def attend_plain(
    q: Tensor, keys: Store, values: Store, table: Tensor, lengths: Tensor, scores: Scores
) -> Tensor:
    """Compute `attend` by its definition: gather the pages, decode them, softmax in float32."""
    pages = -(-int(lengths.max()) // PAGE)
    k, v = (_gather(store, table[:, :pages], q.dtype) for store in (keys, values))
    sequences, heads, head = q.shape
    grouped = q.view(sequences, k.shape[2], -1, head)
    score = torch.einsum("shgd,sthd->shgt", grouped.float(), k.float()) * scores.scale
    if scores.cap:
        score = scores.cap * torch.tanh(score / scores.cap)
    at = torch.arange(k.shape[1], device=q.device)[None]
    live = at < lengths[:, None]
    if scores.window:
        live &= at >= lengths[:, None] - scores.window
    weight = score.masked_fill(~live[:, None, None], float("-inf")).softmax(-1)
    v = v.masked_fill(~live[:, :, None, None], 0)  # a page beyond the end may hold anything
    out = torch.einsum("shgt,sthd->shgd", weight, v.float())
    return out.reshape(sequences, heads, head).to(q.dtype)


def _gather(store: Store, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather the tokens of each sequence, ``[sequences, tokens, kv_heads, head]``."""
    parts = [part[table.long()].flatten(1, 2) for part in store.each()]
    return decode(Store(*parts), dtype)


def attend_fused(
    q: Tensor, keys: Store, values: Store, table: Tensor, lengths: Tensor, scores: Scores
) -> Tensor:
    """Launch `gpu.attention_kernel.paged_kernel` and `gpu.attention_kernel.combine_kernel`."""
    from quantforge_kernels.gpu.attention_kernel import combine_kernel, paged_kernel

    q = q.contiguous()
    sequences, heads, head = q.shape
    kv_heads = keys.codes.shape[2]
    group = heads // kv_heads
    key_run, value_run = (run_of(head, store.kind) for store in (keys, values))
    (keys, key_kind), (values, value_kind) = (_numbered(store) for store in (keys, values))
    shares = max(1, min(PROGRAMS // (sequences * kv_heads), table.shape[1] // LEAST_PAGES))
    sums = q.new_empty((sequences, heads, shares, head), dtype=torch.float32)
    peaks, totals = sums.new_empty(2, sequences, heads, shares)
    launch_kernel(
        paged_kernel, (sequences, kv_heads, shares),
        q, *_three(keys), *_three(values), table, lengths, sums, peaks, totals,
        kv_heads, table.stride(0), scores.scale, scores.cap, scores.window,
        GROUP=group, HEAD=head, KEY_RUN=key_run, KEY_KIND=key_kind, VALUE_RUN=value_run,
        VALUE_KIND=value_kind, PAGE=PAGE,
        BLOCK_G=max(16, power_of_two(group)), BLOCK_H=max(16, power_of_two(head // 2)),
        CAPPED=scores.cap > 0, WINDOWED=scores.window > 0,
        WIDEN=q.dtype == torch.float32 or not q.is_cuda, num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(q)
    launch_kernel(
        combine_kernel, (sequences * heads,),
        sums, peaks, totals, out, shares,
        HEAD=head, BLOCK_S=power_of_two(shares), BLOCK=power_of_two(head), num_warps=4,
    )  # fmt: skip
    return out


def _numbered(store: Store) -> tuple[Store, int]:
    """Return what a kernel reads, and its number of the kind: fp8 as bytes where the device knows no such type."""
    if store.kind == "fp8" and not knows_float8(store.codes.device):
        return replace(store, codes=store.codes.view(torch.uint8)), len(KINDS)
    return store, KINDS.index(store.kind)


def _three(store: Store) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and minima; what is not there is replaced by the codes, and not read."""
    first = store.codes
    return (
        first,
        first if store.scales is None else store.scales,
        (first if store.lows is None else store.lows),
    )
