"""Triton kernels over the digits of `base3`: one row, a few rows on tensor cores, and decoding.

A group of ``GROUP`` columns is ``STEP`` words, and digit ``d`` of word ``j`` is column ``d STEP + j`` of
the group: neighbouring words need neighbouring activations, and a word never leaves its group.

For one row a digit is never taken out. With ``u_f = q 3^f mod 2^16``, in units of 2^16, digit ``f`` of
half a word is ``3 u_f - u_(f+1)``, so that

    sum over f of  digit_f x_f   =   sum over f = 0 ... 10 of  u_f (3 x_f - x_(f-1))

where all rows share the brackets. A product, one ``lop3`` that leaves 16 bits under the exponent of 128
(see `plane_kernels`), and a multiply-add are all that a weight costs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantforge_kernels.gpu.fields import mask_or


@triton.jit
def _fraction(half, FIELD: tl.constexpr, MODE: tl.constexpr):
    """Return ``u_FIELD`` of half a word, plus 128 unless ``MODE`` is 0 (see `fields`)."""
    moved = half * 3**FIELD
    if MODE == 0:
        return (moved & 0xFFFF).to(tl.float32) * 1.52587890625e-05  # 2^-16
    return mask_or(moved, 0xFFFF, 134 << 23, MODE).to(tl.float32, bitcast=True)


@triton.jit
def _tile(
    words_ptr, scales_ptr, row, place, groups, quads, GROUP: tl.constexpr, STEP: tl.constexpr
):
    """Load words and scales ``[rows, words]`` at ``place``; return them, first columns, and places in their groups.

    A row is ``quads`` times four words, the last ones perhaps empty: they have no columns.
    """
    word = tl.load(
        words_ptr + row[:, None] * (quads * 4) + place[None, :],
        mask=(place < quads * 4)[None, :], other=0, eviction_policy="evict_first",
    )  # fmt: skip
    group, there = place // STEP, place < groups * STEP
    inside = tl.where(there, place % STEP, GROUP)
    scale = tl.load(
        scales_ptr + row[:, None] * groups + group[None, :], mask=there[None, :], other=0.0
    )
    return word, scale.to(tl.float32), group * GROUP + inside, inside


@triton.jit
def row_kernel(
    x_ptr, words_ptr, scales_ptr, out_ptr, rows, groups, quads, tiles,
    GROUP: tl.constexpr, STEP: tl.constexpr, MODE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute ``out[split, n]``: sums over ``tiles`` tiles of ``BLOCK_W`` words; a program does ``BLOCK_N`` rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    words = groups * STEP
    total = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(words, BLOCK_W))):
        place = tile * BLOCK_W + tl.arange(0, BLOCK_W)
        word, scale, column, inside = _tile(
            words_ptr, scales_ptr, row, place, groups, quads, GROUP, STEP
        )
        lower, upper = word & 0xFFFF, (word >> 16) & 0xFFFF
        x_of = x_ptr + column
        part = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
        plain = tl.zeros((BLOCK_W,), tl.float32)
        before0, before1 = plain, plain
        for field in tl.static_range(11):
            factor0, factor1 = -before0, -before1
            if field < 10:
                even = 2 * field * STEP
                x0 = tl.load(x_of + even, mask=inside < GROUP - even, other=0.0)
                even += STEP
                x1 = tl.load(x_of + even, mask=inside < GROUP - even, other=0.0)
                before0, before1 = x0.to(tl.float32), x1.to(tl.float32)
                factor0, factor1 = factor0 + 3 * before0, factor1 + 3 * before1
                plain += before0 + before1
            part += _fraction(lower, field, MODE) * factor0[None, :]
            part += _fraction(upper, field, MODE) * factor1[None, :]
            if MODE > 0:
                plain += 128.0 * (factor0 + factor1)
        total += (part - plain[None, :]) * scale
    total = tl.sum(total, axis=1).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + split * rows + n, total, mask=n < rows)


@triton.jit
def rows_kernel(
    x_ptr, words_ptr, scales_ptr, out_ptr, tokens, rows, columns, groups, quads, tiles,
    GROUP: tl.constexpr, STEP: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute ``out[split, m, n]`` for ``BLOCK_M`` tokens at a time.

    Weights are rounded to the type of ``x``, as decoded ones are.

    ``WIDEN``: the interpreter computes nothing in bfloat16.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    words = groups * STEP
    kind: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(words, BLOCK_W))):
        place = tile * BLOCK_W + tl.arange(0, BLOCK_W)
        word, scale, column, inside = _tile(
            words_ptr, scales_ptr, row, place, groups, quads, GROUP, STEP
        )
        x_of = x_ptr + m[None, :] * columns + column[:, None]
        for half in tl.static_range(2):
            rest = (word >> (16 * half)) & 0xFFFF
            for field in tl.static_range(10):
                first = (2 * field + half) * STEP
                live = (inside < GROUP - first)[:, None] & (m < tokens)[None, :]
                x = tl.load(x_of + first, mask=live, other=0.0)
                rest = 3 * rest
                weight = (((rest >> 16) - 1).to(tl.float32) * scale).to(kind)
                rest = rest & 0xFFFF
                if WIDEN:
                    weight, x = weight.to(tl.float32), x.to(tl.float32)
                total = tl.dot(weight, x, total, input_precision="ieee")
    place = split * tokens * rows + m[None, :] * rows + n[:, None]
    mask = (m < tokens)[None, :] & (n < rows)[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def decode_kernel(
    words_ptr, scales_ptr, out_ptr, rows, columns, groups, quads,
    GROUP: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the weight ``[rows, columns]`` in the type of ``out``."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.minimum(n, rows - 1).to(tl.int64)[:, None]
    column = tl.minimum(k, columns - 1)[None, :]
    group, inside = column // GROUP, column % GROUP
    digit = inside // STEP
    word = tl.load(words_ptr + row * (quads * 4) + group * STEP + inside % STEP)
    rest = (word >> (16 * (digit % 2))) & 0xFFFF
    for field in tl.static_range(9):
        rest = tl.where(digit // 2 > field, (3 * rest) & 0xFFFF, rest)
    scale = tl.load(scales_ptr + row * groups + group).to(tl.float32)
    value = (((3 * rest) >> 16) - 1).to(tl.float32) * scale
    place = n.to(tl.int64)[:, None] * columns + k[None, :]
    mask = (n < rows)[:, None] & (k < columns)[None, :]
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=mask)
