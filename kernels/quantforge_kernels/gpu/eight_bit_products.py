"""Products of 8-bit weights with activations that are quantized on the way, a scale per row.

Declarations and launcher of `gpu.eight_bits`: W8A8 in int8 (symmetric, one weight scale per row) and in
fp8 (a scale per row or per tile). Where the weights have zero points, or a device has no fp8
arithmetic, the fallback kernel computes the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge_kernels.fallback import quantize_rows
from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.layout import chunk_of
from quantforge_kernels.problem import (
    Kernel,
    Packed,
    Parameters,
    Problem,
    has_triton,
    knows_float8,
)

_DTYPES = {"int": torch.int8, "fp8": torch.float8_e4m3fn}
_ACTIVATIONS = {"int": "int8", "fp8": "fp8"}
TILE_COLUMNS = 128
_ALIGNED = 16


def accepts(problem: Problem) -> bool:
    """Return whether a problem is solved: both factors of one kind; symmetric; columns of a tile a multiple of 32."""
    if not problem.on_gpu or not has_triton():
        return False
    if problem.activation != _ACTIVATIONS.get(problem.grid, "-") or problem.bits != 8:
        return False
    if problem.grid == "fp8" and not knows_float8(torch.device(problem.device)):
        return False
    return problem.symmetric and (problem.groups == 1 or chunk_of(8, problem.group_size)[0] >= 32)


def prepare(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Keep the codes a byte each, rows padded to 16 bytes with zeros."""
    signed = (codes ^ 0x80) if problem.grid == "int" else codes
    return {"codes": _padded(signed), "scales": parameters["scales"].contiguous()}


def _padded(codes: Tensor) -> Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % _ALIGNED)).contiguous()


def matmul(x: Tensor, packed: Packed, problem: Problem) -> Tensor:
    """Quantize the rows of ``x`` and multiply."""
    from quantforge_kernels.gpu.eight_bits import eight_bit_kernel

    codes, scales, grid, group = packed["codes"], packed["scales"], problem.grid, problem.group_size
    (tokens, columns), rows = x.shape, len(codes)
    out = x.new_empty(tokens, rows)
    if tokens == 0:
        return out
    quantized, x_scales = quantize_rows(x, _ACTIVATIONS[grid])
    quantized = _padded(quantized.view(torch.uint8)).view(_DTYPES[grid])
    block_k = TILE_COLUMNS if group >= columns else chunk_of(8, group)[0]
    launch_kernel(
        eight_bit_kernel, (-(-rows // 64), -(-tokens // 16)),
        quantized, x_scales, codes.view(_DTYPES[grid]), scales, out,
        tokens, rows, columns, codes.shape[1] // _ALIGNED, scales.shape[1],
        GROUP=group, TILE_ROWS=problem.tile_rows, BLOCK_M=16, BLOCK_N=64, BLOCK_K=block_k,
        num_warps=4,
    )  # fmt: skip
    return out


KERNEL = Kernel("triton-w8a8", accepts, prepare, matmul)
