"""Triton kernels for the layers between products: RMS norm, rotary embedding, gate.

Each is one launch where plain torch needs three to eight; when one token is decoded, a launch costs
as much as a small matrix. Statistics are float32. The plain torch counterparts in
`layers` define what the kernels compute.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, columns, heads, stride, epsilon,
    OFFSET: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize one row per program: ``sum = x + residual; out = sum / rms(sum) * (weight + OFFSET)``.

    A token of ``x`` has ``heads`` contiguous rows, and tokens are ``stride`` apart; the other tensors are contiguous.
    """
    k = tl.arange(0, BLOCK)
    mask = k < columns
    row = tl.program_id(0).to(tl.int64)
    offsets = row * columns + k
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row // heads * stride + row % heads * columns + k, mask=mask, other=0.0)
    value = x.to(tl.float32)
    if ADD:
        value += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(sum_ptr + offsets, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / columns + epsilon)
    weight = tl.load(weight_ptr + k, mask=mask, other=0.0).to(tl.float32) + OFFSET
    tl.store(out_ptr + offsets, (value * scale * weight).to(kind), mask=mask)


@triton.jit
def rotary_kernel(
    x_ptr, cosine_ptr, sine_ptr, out_ptr, heads, stride, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate one head of one token; tokens are ``stride`` apart, and angles are ``[tokens, HALF]``."""
    k = tl.arange(0, BLOCK)
    mask = k < HALF
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = (token * heads + head) * (2 * HALF) + k
    x_ptr += token * stride + head * (2 * HALF) + k
    cosine = tl.load(cosine_ptr + token * HALF + k, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sine_ptr + token * HALF + k, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, (first * cosine - second * sine).to(kind), mask=mask)
    tl.store(out_ptr + offsets + HALF, (second * cosine + first * sine).to(kind), mask=mask)


@triton.jit
def gate_kernel(
    gate_ptr, up_ptr, out_ptr, width, gate_stride, up_stride,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``silu(gate) * up``, or gelu in its tanh form, for rows with these strides; ``out`` is contiguous.

    ``(1 + tanh z) / 2`` is the sigmoid of ``2 z``.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    gate = tl.load(gate_ptr + row * gate_stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + i, mask=mask, other=0.0).to(tl.float32)
    power = 1.5957691216 * (gate + 0.044715 * gate * gate * gate) if TANH else gate
    value = gate / (1.0 + tl.exp(-power)) * up
    tl.store(out_ptr + row * width + i, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_splits_kernel(parts_ptr, out_ptr, count, splits, BLOCK: tl.constexpr):
    """Add the partial sums ``[splits, count]`` of programs that shared the columns of a product, in order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(parts_ptr + split * count + i, mask=mask, other=0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=mask)
