"""Triton kernels for what stands between the products of a decoder: norm, rotary, gate.

Each is one launch where plain torch needs three to eight; when one token is decoded a launch costs
as much as a small matrix. Statistics are float32. Every function has its plain counterpart in
`layers`, which also serves where there is no GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, columns, epsilon,
    OFFSET: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program normalises a row: ``sum = x + residual; out = sum / rms(sum) * (weight + OFFSET)``."""
    k = tl.arange(0, BLOCK)
    mask = k < columns
    place = tl.program_id(0).to(tl.int64) * columns + k
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    if ADD:
        x += tl.load(residual_ptr + place, mask=mask, other=0.0)
        tl.store(sum_ptr + place, x, mask=mask)
    value = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / columns + epsilon)
    weight = tl.load(weight_ptr + k, mask=mask, other=0.0).to(tl.float32) + OFFSET
    tl.store(out_ptr + place, (value * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    x_ptr, cosine_ptr, sine_ptr, out_ptr, heads, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate the halves of one head of one token; ``cosine`` and ``sine`` are ``[tokens, HALF]``."""
    k = tl.arange(0, BLOCK)
    mask = k < HALF
    token = tl.program_id(0).to(tl.int64)
    place = (token * heads + tl.program_id(1)) * (2 * HALF) + k
    cosine = tl.load(cosine_ptr + token * HALF + k, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sine_ptr + token * HALF + k, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + place + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + place, (first * cosine - second * sine).to(kind), mask=mask)
    tl.store(out_ptr + place + HALF, (second * cosine + first * sine).to(kind), mask=mask)


@triton.jit
def gate_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """``silu(gate) * up``."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    gate = tl.load(gate_ptr + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=mask)
