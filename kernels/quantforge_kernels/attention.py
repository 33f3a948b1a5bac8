"""Attention of one new token per sequence over a paged key/value cache.

It is computed by `gpu.attention_kernel` on a GPU, by `cpu.cache_programs` on a CPU with AVX2 or AVX-512, and by torch
elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantforge_kernels.cpu import layer_launchers
from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.kv import PAGE_SIZE, EncodedKV, decode
from quantforge_kernels.kv_row_layout import CACHE_KINDS, channels_per_scale
from quantforge_kernels.matmul_spec import has_triton, next_power_of_two, supports_float8
from quantforge_kernels.score_options import ScoreOptions

TARGET_PROGRAMS = 4 * 132
MIN_PAGES_PER_SPLIT = 4  # of a share, where there is a choice


def attend(
    q: Tensor,
    keys: EncodedKV,
    values: EncodedKV,
    page_table: Tensor,
    lengths: Tensor,
    options: ScoreOptions,
) -> Tensor:
    """Compute attention of the newest token of each sequence over its cache.

    Args:
        q: queries ``[sequences, heads, head_dim]`` of the newest token of each sequence.
        keys: pages ``[pages, PAGE_SIZE, kv_heads, ...]``.
        values: pages of the same shape; they may be stored in another format than the keys.
        page_table: ``[sequences, max pages]`` int32, the page numbers of each sequence in order.
        lengths: ``[sequences]`` int32, the number of tokens in the cache, including the newest; at least 1.
        options: scale, cap and window of the logits.

    Returns:
        ``[sequences, heads, head_dim]``.
    """
    if q.is_cuda and has_triton():
        return attend_triton(q, keys, values, page_table, lengths, options)
    unquantized = [store.codes for store in (keys, values) if not store.kind]
    if layer_launchers.accepts_cache(q.shape[2], (keys.kind, values.kind), q, *unquantized):
        return layer_launchers.attend(q, keys, values, page_table, lengths, options)
    return attend_reference(q, keys, values, page_table, lengths, options)


def attend_reference(
    q: Tensor,
    keys: EncodedKV,
    values: EncodedKV,
    page_table: Tensor,
    lengths: Tensor,
    options: ScoreOptions,
) -> Tensor:
    """Compute `attend` in plain torch: gather the pages, decode them, and take the softmax in float32."""
    pages = -(-int(lengths.max()) // PAGE_SIZE)
    k, v = (_gather_tokens(store, page_table[:, :pages], q.dtype) for store in (keys, values))
    sequences, heads, head_dim = q.shape
    grouped = q.view(sequences, k.shape[2], -1, head_dim)
    logits = torch.einsum("shgd,sthd->shgt", grouped.float(), k.float()) * options.scale
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    positions = torch.arange(k.shape[1], device=q.device)[None]
    visible = positions < lengths[:, None]
    if options.window:
        visible &= positions >= lengths[:, None] - options.window
    weight = logits.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
    v = v.masked_fill(~visible[:, :, None, None], 0)  # a page beyond the end may hold anything
    out = torch.einsum("shgt,sthd->shgd", weight, v.float())
    return out.reshape(sequences, heads, head_dim).to(q.dtype)


def _gather_tokens(store: EncodedKV, page_table: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather and decode the tokens of each sequence: ``[sequences, tokens, kv_heads, head_dim]``."""
    gathered = [tensor[page_table.long()].flatten(1, 2) for tensor in store.tensors()]
    return decode(EncodedKV(*gathered), dtype)


def attend_triton(
    q: Tensor,
    keys: EncodedKV,
    values: EncodedKV,
    page_table: Tensor,
    lengths: Tensor,
    options: ScoreOptions,
) -> Tensor:
    """Compute `attend` with the Triton kernels ``paged_attention_kernel`` and ``combine_splits_kernel``."""
    from quantforge_kernels.gpu.attention_kernel import (
        combine_splits_kernel,
        paged_attention_kernel,
    )

    q = q.contiguous()
    sequences, heads, head_dim = q.shape
    kv_heads = keys.codes.shape[2]
    group_size = heads // kv_heads
    key_scale_width, value_scale_width = (
        channels_per_scale(head_dim, store.kind) for store in (keys, values)
    )
    (keys, key_kind), (values, value_kind) = (
        _kernel_store_and_kind(store) for store in (keys, values)
    )
    splits = max(
        1,
        min(TARGET_PROGRAMS // (sequences * kv_heads), page_table.shape[1] // MIN_PAGES_PER_SPLIT),
    )
    sums = q.new_empty((sequences, heads, splits, head_dim), dtype=torch.float32)
    maxima, denominators = sums.new_empty(2, sequences, heads, splits)
    launch_kernel(
        paged_attention_kernel, (sequences, kv_heads, splits),
        q, *_store_tensors(keys), *_store_tensors(values), page_table, lengths, sums, maxima, denominators,
        kv_heads, page_table.stride(0), options.scale, options.softcap, options.window,
        GROUP_SIZE=group_size, HEAD_DIM=head_dim, KEY_SCALE_WIDTH=key_scale_width, KEY_KIND=key_kind,
        VALUE_SCALE_WIDTH=value_scale_width, VALUE_KIND=value_kind, PAGE_SIZE=PAGE_SIZE,
        GROUP_BLOCK=max(16, next_power_of_two(group_size)), HALF_BLOCK=max(16, next_power_of_two(head_dim // 2)),
        HAS_SOFTCAP=options.softcap > 0, HAS_WINDOW=options.window > 0,
        DOT_IN_FLOAT32=q.dtype == torch.float32 or not q.is_cuda, num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(q)
    launch_kernel(
        combine_splits_kernel, (sequences * heads,),
        sums, maxima, denominators, out, splits,
        HEAD_DIM=head_dim, SPLIT_BLOCK=next_power_of_two(splits), BLOCK=next_power_of_two(head_dim), num_warps=4,
    )  # fmt: skip
    return out


def _kernel_store_and_kind(store: EncodedKV) -> tuple[EncodedKV, int]:
    """Return the tensors for the kernel and the number of their kind; fp8 as bytes where the GPU has no float8 type."""
    if store.kind == "fp8" and not supports_float8(store.codes.device):
        return replace(store, codes=store.codes.view(torch.uint8)), len(CACHE_KINDS)
    return store, CACHE_KINDS.index(store.kind)


def _store_tensors(store: EncodedKV) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and minima; the codes stand in for a missing tensor, which the kernel does not read."""
    codes = store.codes
    return (
        codes,
        codes if store.scales is None else store.scales,
        (codes if store.minima is None else store.minima),
    )
