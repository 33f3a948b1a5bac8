"""RMS norm, rotary embedding, gates and dense products: fused kernels where possible, else plain torch.

Each is one Triton kernel on a GPU and one compiled program on a CPU with AVX2 or AVX-512. The plain torch code here
defines what these compute, in the order of operations of transformers (the product with the norm's weight comes after
rounding to the type of ``x``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from quantforge_kernels.cpu import layer_launchers, many_rows
from quantforge_kernels.cpu.layer_launchers import make_heads_contiguous
from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.matmul_spec import has_triton, next_power_of_two


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)`` over the last dimension.

    The norm multiplies by ``weight + weight_offset`` (gemma stores its norm weights minus one).
    """
    if x.is_cuda and has_triton():
        return add_rms_norm_triton(x, residual, weight, epsilon, weight_offset)
    if layer_launchers.accepts(x.shape[-1], x, weight, x if residual is None else residual):
        return layer_launchers.add_rms_norm(x, residual, weight, epsilon, weight_offset)
    hidden = x if residual is None else x + residual
    return rms_norm(hidden, weight, epsilon, weight_offset), hidden


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)``."""
    value = x.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight_offset:
        return (value * (weight.float() + weight_offset)).to(x.dtype)
    return weight * value.to(x.dtype)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm` with the Triton kernel ``add_rms_norm_kernel``."""
    from quantforge_kernels.gpu.layer_kernels import add_rms_norm_kernel

    columns = x.shape[-1]
    x = make_heads_contiguous(x) if x.dim() == 3 and residual is None else x.contiguous()
    heads_per_token, stride = (x.shape[1], x.stride(0)) if x.dim() == 3 else (1, columns)
    out = x.new_empty(x.shape)
    hidden = x if residual is None else torch.empty_like(out)
    rows = x.numel() // columns
    if rows:
        other = x if residual is None else residual.contiguous()
        launch_kernel(
            add_rms_norm_kernel, (rows,),
            x, other, weight, out, hidden, columns, heads_per_token, stride, epsilon,
            OFFSET=weight_offset, ADD=residual is not None, BLOCK=next_power_of_two(columns),
            num_warps=4 if columns < 4096 else 8,
        )  # fmt: skip
    return out, hidden


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """Return ``y + bias`` for rows ``[rows, width]``; the result may overwrite ``y``."""
    if layer_launchers.accepts(y.shape[-1], y, bias):
        return layer_launchers.add_bias(y, bias)
    return y + bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + bias`` for ``x`` ``[..., in]`` and an unquantized weight ``[out, in]``."""
    rows = x.reshape(-1, x.shape[-1])
    if layer_launchers.accepts_linear(rows, weight, bias):
        return layer_launchers.linear(rows, weight, bias).view(*x.shape[:-1], len(weight))
    return many_rows.linear(rows, weight, bias).view(*x.shape[:-1], len(weight))


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate ``x`` ``[tokens, heads, head_dim]`` by angles ``[tokens, rotary_dim / 2]``.

    If ``rotary_dim`` is smaller than the head dimension, the remaining channels are unchanged.
    """
    half = cosine.shape[-1]
    if 2 * half < x.shape[-1]:
        return torch.cat((apply_rotary(x[..., : 2 * half], cosine, sine), x[..., 2 * half :]), -1)
    if x.is_cuda and has_triton():
        return apply_rotary_triton(x, cosine, sine)
    if layer_launchers.accepts(half, x, cosine, sine):
        return layer_launchers.apply_rotary(x, cosine, sine)
    first, second = x[..., :half], x[..., half:]
    cosine, sine = cosine[:, None].to(x.dtype), sine[:, None].to(x.dtype)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def apply_rotary_triton(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Compute `apply_rotary` with the Triton kernel ``rotary_kernel``."""
    from quantforge_kernels.gpu.layer_kernels import rotary_kernel

    x = make_heads_contiguous(x)
    out = x.new_empty(x.shape)
    tokens, heads_per_token, width = x.shape
    if x.numel():
        launch_kernel(
            rotary_kernel, (tokens, heads_per_token),
            x, cosine.contiguous(), sine.contiguous(), out, heads_per_token, x.stride(0),
            HALF=width // 2, BLOCK=next_power_of_two(width // 2), num_warps=1,
        )  # fmt: skip
    return out


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, ``[rows, width]``."""
    if gate.is_cuda and has_triton():
        return gate_triton(gate, up, tanh=False)
    if layer_launchers.accepts(gate.shape[-1], gate, up):
        return layer_launchers.gate(gate, up, tanh=False)
    return silu(gate) * up


def gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up``, with the tanh form of gelu; ``[rows, width]``."""
    if gate.is_cuda and has_triton():
        return gate_triton(gate, up, tanh=True)
    if layer_launchers.accepts(gate.shape[-1], gate, up):
        return layer_launchers.gate(gate, up, tanh=True)
    return gelu(gate, approximate="tanh") * up


def gate_triton(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """Compute ``silu(gate) * up`` (or gelu in its tanh form) with the Triton kernel ``gate_kernel``."""
    from quantforge_kernels.gpu.layer_kernels import gate_kernel

    gate, up = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (gate, up))
    rows, width = gate.shape
    out = gate.new_empty(gate.shape)
    if gate.numel():
        launch_kernel(
            gate_kernel, (rows, -(-width // 1024)),
            gate, up, out, width, gate.stride(0), up.stride(0),
            TANH=tanh, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out
