"""Triton kernel for attention of one new token per sequence over a paged, possibly quantized cache.

A program serves the query heads that share a key/value head, over one split of the pages of one
sequence, with the online softmax of FlashAttention (arXiv 2205.14135): a running maximum, a
running denominator, and a sum of values that is rescaled whenever the maximum grows. Splits are then combined
(flash decoding), because one sequence alone has too few heads to occupy a GPU. The channels of a head
are processed in two halves, as int4 stores them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantforge_kernels.gpu.packed_fields import float8_e4m3_value


@triton.jit
def _load_half_heads(
    codes_ptr, scales_ptr, minima_ptr, rows, k, mask,
    HALF_INDEX: tl.constexpr, HEAD_DIM: tl.constexpr, SCALE_WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load half ``HALF_INDEX`` of the channels as float32 ``[tokens, channels]``; ``rows`` are indices of token heads.

    ``KIND`` is an index into `kv_row_layout.CACHE_KINDS`; 4 is fp8 read as bytes, for GPUs without float8.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    SCALES_PER_HEAD: tl.constexpr = HEAD_DIM // SCALE_WIDTH
    channel = k + HALF_INDEX * HALF
    if KIND == 3:
        byte = tl.load(codes_ptr + rows[:, None] * HALF + k[None, :], mask=mask, other=0)
        value = ((byte >> (4 * HALF_INDEX)) & 15).to(tl.float32)
    else:
        value = tl.load(
            codes_ptr + rows[:, None] * HEAD_DIM + channel[None, :], mask=mask, other=0.0
        )
        if KIND == 4:
            value = float8_e4m3_value(value.to(tl.int32), 0)
        else:
            value = value.to(tl.float32)
    if KIND > 0:
        offsets = rows[:, None] * SCALES_PER_HEAD + (channel // SCALE_WIDTH)[None, :]
        value *= tl.load(scales_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if KIND == 3:
            value += tl.load(minima_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def paged_attention_kernel(
    q_ptr, keys, key_scales, key_minima, values, value_scales, value_minima, page_table_ptr, lengths_ptr,
    sums_ptr, maxima_ptr, denominators_ptr, kv_heads, table_stride, scale, softcap, window,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_SCALE_WIDTH: tl.constexpr, KEY_KIND: tl.constexpr,
    VALUE_SCALE_WIDTH: tl.constexpr, VALUE_KIND: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, DOT_IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Compute the partial sum, maximum and denominator of one (sequence, key/value head, split)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lengths_ptr + sequence)
    pages = tl.cdiv(length, PAGE_SIZE)
    pages_per_split = tl.cdiv(pages, splits)
    g, k, t = tl.arange(0, GROUP_BLOCK), tl.arange(0, HALF_BLOCK), tl.arange(0, PAGE_SIZE)
    in_head = (k < HALF)[None, :]
    q_row = (sequence * kv_heads + kv_head) * GROUP_SIZE + g
    q_mask = (g < GROUP_SIZE)[:, None] & in_head
    q0 = tl.load(q_ptr + q_row[:, None] * HEAD_DIM + k[None, :], mask=q_mask, other=0.0)
    q1 = tl.load(q_ptr + q_row[:, None] * HEAD_DIM + HALF + k[None, :], mask=q_mask, other=0.0)
    dot_dtype = tl.float32 if DOT_IN_FLOAT32 else q0.dtype
    q0, q1 = q0.to(dot_dtype), q1.to(dot_dtype)
    maximum = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    denominator = tl.zeros((GROUP_BLOCK,), tl.float32)
    sum0 = tl.zeros((GROUP_BLOCK, HALF_BLOCK), tl.float32)
    sum1 = tl.zeros((GROUP_BLOCK, HALF_BLOCK), tl.float32)
    for page in range(split * pages_per_split, tl.minimum((split + 1) * pages_per_split, pages)):
        page_index = tl.load(page_table_ptr + sequence * table_stride + page).to(tl.int64)
        rows = (page_index * PAGE_SIZE + t) * kv_heads + kv_head
        position = page * PAGE_SIZE + t
        visible = position < length
        if HAS_WINDOW:
            visible = visible & (position >= length - window)
        mask = visible[:, None] & in_head
        k0 = _load_half_heads(
            keys, key_scales, key_minima, rows, k, mask, 0, HEAD_DIM, KEY_SCALE_WIDTH, KEY_KIND
        )
        k1 = _load_half_heads(
            keys, key_scales, key_minima, rows, k, mask, 1, HEAD_DIM, KEY_SCALE_WIDTH, KEY_KIND
        )
        score = tl.dot(q0, tl.trans(k0.to(dot_dtype)), input_precision="ieee")
        score = tl.dot(q1, tl.trans(k1.to(dot_dtype)), score, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            score = softcap * (1 - 2 / (tl.exp(2 * score / softcap) + 1))  # cap * tanh(score / cap)
        score = tl.where(visible[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, axis=1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp(score - shift[:, None])
        rescale = tl.exp(maximum - shift)
        denominator = denominator * rescale + tl.sum(weight, axis=1)
        v0 = _load_half_heads(
            values,
            value_scales,
            value_minima,
            rows,
            k,
            mask,
            0,
            HEAD_DIM,
            VALUE_SCALE_WIDTH,
            VALUE_KIND,
        )
        v1 = _load_half_heads(
            values,
            value_scales,
            value_minima,
            rows,
            k,
            mask,
            1,
            HEAD_DIM,
            VALUE_SCALE_WIDTH,
            VALUE_KIND,
        )
        sum0 = tl.dot(
            weight.to(dot_dtype), v0.to(dot_dtype), sum0 * rescale[:, None], input_precision="ieee"
        )
        sum1 = tl.dot(
            weight.to(dot_dtype), v1.to(dot_dtype), sum1 * rescale[:, None], input_precision="ieee"
        )
        maximum = new_maximum
    row = q_row * splits + split
    tl.store(sums_ptr + row[:, None] * HEAD_DIM + k[None, :], sum0, mask=q_mask)
    tl.store(sums_ptr + row[:, None] * HEAD_DIM + HALF + k[None, :], sum1, mask=q_mask)
    tl.store(maxima_ptr + row, maximum, mask=g < GROUP_SIZE)
    tl.store(denominators_ptr + row, denominator, mask=g < GROUP_SIZE)


@triton.jit
def combine_splits_kernel(
    sums_ptr, maxima_ptr, denominators_ptr, out_ptr, splits,
    HEAD_DIM: tl.constexpr, SPLIT_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head of one sequence: rescale to the highest maximum and divide."""
    s, k = tl.arange(0, SPLIT_BLOCK), tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    valid = s < splits
    maxima = tl.load(maxima_ptr + row * splits + s, mask=valid, other=float("-inf"))
    weights = tl.exp(maxima - tl.max(maxima, axis=0))
    denominator = tl.sum(
        weights * tl.load(denominators_ptr + row * splits + s, mask=valid, other=0.0), axis=0
    )
    mask = valid[:, None] & (k < HEAD_DIM)[None, :]
    offsets = (row * splits + s)[:, None] * HEAD_DIM + k[None, :]
    sums = tl.load(sums_ptr + offsets, mask=mask, other=0.0)
    out = tl.sum(sums * weights[:, None], axis=0) / denominator
    tl.store(out_ptr + row * HEAD_DIM + k, out.to(out_ptr.dtype.element_ty), mask=k < HEAD_DIM)
