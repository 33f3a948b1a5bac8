"""Norm, rotary and gate: one kernel each on a GPU, one program on a processor with vectors, else plain torch.

The plain functions define what the kernels compute, in the order of operations that transformers
has (the product with the norm's weight comes after rounding to the type of ``x``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from quantforge_kernels.cpu import layer_launchers, many_rows
from quantforge_kernels.cpu.layer_launchers import side_by_side
from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.problem import has_triton, power_of_two


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)`` over the last dimension.

    The norm multiplies by ``weight + offset`` (gemma stores weights less one).
    """
    if x.is_cuda and has_triton():
        return add_norm_fused(x, residual, weight, epsilon, offset)
    if layer_launchers.accepts(x.shape[-1], x, weight, x if residual is None else residual):
        return layer_launchers.add_norm(x, residual, weight, epsilon, offset)
    total = x if residual is None else x + residual
    return rms_norm(total, weight, epsilon, offset), total


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * (weight + offset)``."""
    value = x.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + epsilon)
    if offset:
        return (value * (weight.float() + offset)).to(x.dtype)
    return weight * value.to(x.dtype)


def add_norm_fused(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Launch `gpu.layer_kernels.norm_kernel`."""
    from quantforge_kernels.gpu.layer_kernels import norm_kernel

    columns = x.shape[-1]
    x = side_by_side(x) if x.dim() == 3 and residual is None else x.contiguous()
    heads, stride = (x.shape[1], x.stride(0)) if x.dim() == 3 else (1, columns)
    out = x.new_empty(x.shape)
    total = x if residual is None else torch.empty_like(out)
    rows = x.numel() // columns
    if rows:
        other = x if residual is None else residual.contiguous()
        launch_kernel(
            norm_kernel, (rows,),
            x, other, weight, out, total, columns, heads, stride, epsilon,
            OFFSET=offset, ADD=residual is not None, BLOCK=power_of_two(columns),
            num_warps=4 if columns < 4096 else 8,
        )  # fmt: skip
    return out, total


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """Return ``y + bias`` of rows ``[rows, width]``, which may be the memory of ``y``."""
    if layer_launchers.accepts(y.shape[-1], y, bias):
        return layer_launchers.add_bias(y, bias)
    return y + bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + bias`` of ``[..., in]``, with a weight ``[out, in]`` that is not quantized."""
    rows = x.reshape(-1, x.shape[-1])
    if layer_launchers.accepts_linear(rows, weight, bias):
        return layer_launchers.linear(rows, weight, bias).view(*x.shape[:-1], len(weight))
    return many_rows.linear(rows, weight, bias).view(*x.shape[:-1], len(weight))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate ``x`` ``[tokens, heads, head]`` by angles ``[tokens, rotary / 2]``.

    Where the angles cover less than a head, the rest of it stays.
    """
    half = cosine.shape[-1]
    if 2 * half < x.shape[-1]:
        return torch.cat((rotate(x[..., : 2 * half], cosine, sine), x[..., 2 * half :]), -1)
    if x.is_cuda and has_triton():
        return rotate_fused(x, cosine, sine)
    if layer_launchers.accepts(half, x, cosine, sine):
        return layer_launchers.rotate(x, cosine, sine)
    first, second = x[..., :half], x[..., half:]
    cosine, sine = cosine[:, None].to(x.dtype), sine[:, None].to(x.dtype)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def rotate_fused(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Launch `gpu.layer_kernels.rotary_kernel`."""
    from quantforge_kernels.gpu.layer_kernels import rotary_kernel

    x = side_by_side(x)
    out = x.new_empty(x.shape)
    tokens, heads, width = x.shape
    if x.numel():
        launch_kernel(
            rotary_kernel, (tokens, heads),
            x, cosine.contiguous(), sine.contiguous(), out, heads, x.stride(0),
            HALF=width // 2, BLOCK=power_of_two(width // 2), num_warps=1,
        )  # fmt: skip
    return out


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, ``[rows, width]``."""
    if gate.is_cuda and has_triton():
        return gate_fused(gate, up, tanh=False)
    if layer_launchers.accepts(gate.shape[-1], gate, up):
        return layer_launchers.gate(gate, up, tanh=False)
    return silu(gate) * up


def gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up``, with the tanh form of gelu; ``[rows, width]``."""
    if gate.is_cuda and has_triton():
        return gate_fused(gate, up, tanh=True)
    if layer_launchers.accepts(gate.shape[-1], gate, up):
        return layer_launchers.gate(gate, up, tanh=True)
    return gelu(gate, approximate="tanh") * up


def gate_fused(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """Launch `gpu.layer_kernels.gate_kernel`: of silu, or of gelu in its tanh form."""
    from quantforge_kernels.gpu.layer_kernels import gate_kernel

    gate, up = (part if part.stride(1) == 1 else part.contiguous() for part in (gate, up))
    rows, width = gate.shape
    out = gate.new_empty(gate.shape)
    if gate.numel():
        launch_kernel(
            gate_kernel, (rows, -(-width // 1024)),
            gate, up, out, width, gate.stride(0), up.stride(0),
            TANH=tanh, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out
