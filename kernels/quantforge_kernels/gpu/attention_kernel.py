"""Triton kernel: attention of one new token per sequence over a paged, possibly quantized cache.

A program serves the query heads that share a key/value head, over a share of the pages of one
sequence, with the online softmax of FlashAttention (arXiv 2205.14135): a running maximum ``m``, a
running sum ``l``, and a sum of values rescaled whenever the maximum grows. Shares are then combined
(flash decoding), because one sequence alone has too few heads to occupy a GPU. A head's channels
are worked off in two halves, which is how int4 stores them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantforge_kernels.gpu.fields import float8_value


@triton.jit
def _half_of_page(
    codes_ptr, scales_ptr, lows_ptr, rows, k, mask,
    H: tl.constexpr, HEAD: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load half ``H`` of the channels ``[tokens, channels]`` in float32; ``rows`` counts heads of tokens.

    ``KIND``: a place in `kv_runs.KINDS`; 4 is fp8 as bytes, where a device knows no such type.
    """
    HALF: tl.constexpr = HEAD // 2
    RUNS: tl.constexpr = HEAD // RUN
    channel = k + H * HALF
    if KIND == 3:
        byte = tl.load(codes_ptr + rows[:, None] * HALF + k[None, :], mask=mask, other=0)
        value = ((byte >> (4 * H)) & 15).to(tl.float32)
    else:
        value = tl.load(codes_ptr + rows[:, None] * HEAD + channel[None, :], mask=mask, other=0.0)
        if KIND == 4:
            value = float8_value(value.to(tl.int32), 0)
        else:
            value = value.to(tl.float32)
    if KIND > 0:
        place = rows[:, None] * RUNS + (channel // RUN)[None, :]
        value *= tl.load(scales_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if KIND == 3:
            value += tl.load(lows_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def paged_kernel(
    q_ptr, keys, key_scales, key_lows, values, value_scales, value_lows, table_ptr, lengths_ptr,
    sums_ptr, peaks_ptr, totals_ptr, kv_heads, table_stride, scale, cap, window,
    GROUP: tl.constexpr, HEAD: tl.constexpr, KEY_RUN: tl.constexpr, KEY_KIND: tl.constexpr,
    VALUE_RUN: tl.constexpr, VALUE_KIND: tl.constexpr, PAGE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute partial results of (sequence, key/value head, share): ``sums [.., G, HEAD]``, ``m`` and ``l``."""
    HALF: tl.constexpr = HEAD // 2
    sequence, kv_head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shares = tl.num_programs(2)
    length = tl.load(lengths_ptr + sequence)
    pages = tl.cdiv(length, PAGE)
    each = tl.cdiv(pages, shares)
    g, k, t = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H), tl.arange(0, PAGE)
    inside = (k < HALF)[None, :]
    q_row = (sequence * kv_heads + kv_head) * GROUP + g
    q_mask = (g < GROUP)[:, None] & inside
    q0 = tl.load(q_ptr + q_row[:, None] * HEAD + k[None, :], mask=q_mask, other=0.0)
    q1 = tl.load(q_ptr + q_row[:, None] * HEAD + HALF + k[None, :], mask=q_mask, other=0.0)
    kind = tl.float32 if WIDEN else q0.dtype
    q0, q1 = q0.to(kind), q1.to(kind)
    peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    sum0 = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    sum1 = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    for page in range(share * each, tl.minimum((share + 1) * each, pages)):
        block = tl.load(table_ptr + sequence * table_stride + page).to(tl.int64)
        rows = (block * PAGE + t) * kv_heads + kv_head
        at = page * PAGE + t
        live = at < length
        if WINDOWED:
            live = live & (at >= length - window)
        mask = live[:, None] & inside
        k0 = _half_of_page(keys, key_scales, key_lows, rows, k, mask, 0, HEAD, KEY_RUN, KEY_KIND)
        k1 = _half_of_page(keys, key_scales, key_lows, rows, k, mask, 1, HEAD, KEY_RUN, KEY_KIND)
        score = tl.dot(q0, tl.trans(k0.to(kind)), input_precision="ieee")
        score = tl.dot(q1, tl.trans(k1.to(kind)), score, input_precision="ieee") * scale
        if CAPPED:
            score = cap * (1 - 2 / (tl.exp(2 * score / cap) + 1))  # cap * tanh(score / cap)
        score = tl.where(live[None, :], score, float("-inf"))
        highest = tl.maximum(peak, tl.max(score, axis=1))
        steady = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(score - steady[:, None])
        shrink = tl.exp(peak - steady)
        total = total * shrink + tl.sum(weight, axis=1)
        v0 = _half_of_page(
            values, value_scales, value_lows, rows, k, mask, 0, HEAD, VALUE_RUN, VALUE_KIND
        )
        v1 = _half_of_page(
            values, value_scales, value_lows, rows, k, mask, 1, HEAD, VALUE_RUN, VALUE_KIND
        )
        sum0 = tl.dot(weight.to(kind), v0.to(kind), sum0 * shrink[:, None], input_precision="ieee")
        sum1 = tl.dot(weight.to(kind), v1.to(kind), sum1 * shrink[:, None], input_precision="ieee")
        peak = highest
    row = q_row * shares + share
    tl.store(sums_ptr + row[:, None] * HEAD + k[None, :], sum0, mask=q_mask)
    tl.store(sums_ptr + row[:, None] * HEAD + HALF + k[None, :], sum1, mask=q_mask)
    tl.store(peaks_ptr + row, peak, mask=g < GROUP)
    tl.store(totals_ptr + row, total, mask=g < GROUP)


@triton.jit
def combine_kernel(
    sums_ptr, peaks_ptr, totals_ptr, out_ptr, shares,
    HEAD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the shares of one head of one sequence: rescale to the highest maximum, and divide."""
    s, k = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    there = s < shares
    peaks = tl.load(peaks_ptr + row * shares + s, mask=there, other=float("-inf"))
    weights = tl.exp(peaks - tl.max(peaks, axis=0))
    total = tl.sum(weights * tl.load(totals_ptr + row * shares + s, mask=there, other=0.0), axis=0)
    mask = there[:, None] & (k < HEAD)[None, :]
    place = (row * shares + s)[:, None] * HEAD + k[None, :]
    sums = tl.load(sums_ptr + place, mask=mask, other=0.0)
    out = tl.sum(sums * weights[:, None], axis=0) / total
    tl.store(out_ptr + row * HEAD + k, out.to(out_ptr.dtype.element_ty), mask=k < HEAD)
