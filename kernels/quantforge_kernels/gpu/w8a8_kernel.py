"""Triton kernel for products of two 8-bit operands on tensor cores (int8 x int8, fp8 x fp8).

    y[m, n] = x_scale[m] * sum_tile scale[n / tile_rows, tile] * sum_{k in tile} w[n, k] x[m, k]

Products and sums of a tile are exact in int8 (32-bit sums). Hopper accumulates fp8 products with about 14
bits, so that the sum over a tile of columns is added to a float32 sum before the next one begins.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def w8a8_matmul_kernel(
    x_ptr, x_scales, codes_ptr, scales_ptr, out_ptr,
    tokens, rows, columns, stride_16_bytes, groups,
    GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``out[m, n]``; rows of ``codes`` and ``x`` are ``16 * stride_16_bytes`` bytes apart.

    ``BLOCK_K`` divides ``GROUP`` unless there is one group. Padding columns are zeros.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    token = tl.minimum(m, tokens - 1).to(tl.int64)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, columns, BLOCK_K):
        columns_at = first + k
        valid = columns_at < stride_16_bytes * 16
        code = tl.load(
            codes_ptr + row[:, None] * (stride_16_bytes * 16) + columns_at[None, :],
            mask=valid[None, :],
            other=0.0,
        )
        x = tl.load(
            x_ptr + token[None, :] * (stride_16_bytes * 16) + columns_at[:, None],
            mask=valid[:, None],
            other=0.0,
        )
        scale = tl.load(scales_ptr + (row // TILE_ROWS) * groups + first // GROUP).to(tl.float32)
        total += tl.dot(code, x).to(tl.float32) * scale[:, None]
    total *= tl.load(x_scales + token)[None, :]
    offsets = m.to(tl.int64)[None, :] * rows + n[:, None]
    mask = (m < tokens)[None, :] & (n < rows)[:, None]
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
