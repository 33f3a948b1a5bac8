"""GPU kernel ``triton-w8a8``: 8-bit weights times activations that are quantized on the fly, one scale per row.

Launches `gpu.w8a8_kernel` for W8A8 in int8 (symmetric, one weight scale per row) and in
fp8 (a scale per row or per tile). For weights with zero points, or on GPUs without fp8
arithmetic, the fallback kernel computes the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge_kernels.bit_planes import choose_chunk
from quantforge_kernels.fallback import quantize_rows
from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.matmul_spec import (
    Kernel,
    MatmulSpec,
    PackedWeight,
    QuantParams,
    has_triton,
    supports_float8,
)

_CODE_DTYPES = {"int": torch.int8, "fp8": torch.float8_e4m3fn}
_ACTIVATION_KINDS = {"int": "int8", "fp8": "fp8"}
TILE_COLUMNS = 128
_ALIGN_BYTES = 16


def accepts(spec: MatmulSpec) -> bool:
    """Return whether both factors have the same 8-bit type, symmetric, with tiles of a multiple of 32 columns."""
    if not spec.on_gpu or not has_triton():
        return False
    if spec.activation_kind != _ACTIVATION_KINDS.get(spec.grid, "-") or spec.bits != 8:
        return False
    if spec.grid == "fp8" and not supports_float8(torch.device(spec.device)):
        return False
    return spec.symmetric and (
        spec.groups_per_row == 1 or choose_chunk(8, spec.group_size)[0] >= 32
    )


def prepare(codes: Tensor, parameters: QuantParams, spec: MatmulSpec) -> PackedWeight:
    """Store one code per byte, rows padded with zeros to 16 bytes."""
    signed = (codes ^ 0x80) if spec.grid == "int" else codes
    return {"codes": _pad_columns(signed), "scales": parameters["scales"].contiguous()}


def _pad_columns(codes: Tensor) -> Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % _ALIGN_BYTES)).contiguous()


def matmul(x: Tensor, packed: PackedWeight, spec: MatmulSpec) -> Tensor:
    """Quantize the rows of ``x`` and multiply."""
    from quantforge_kernels.gpu.w8a8_kernel import w8a8_matmul_kernel

    codes, scales, grid, group = packed["codes"], packed["scales"], spec.grid, spec.group_size
    (tokens, columns), rows = x.shape, len(codes)
    out = x.new_empty(tokens, rows)
    if tokens == 0:
        return out
    quantized, x_scales = quantize_rows(x, _ACTIVATION_KINDS[grid])
    quantized = _pad_columns(quantized.view(torch.uint8)).view(_CODE_DTYPES[grid])
    block_k = TILE_COLUMNS if group >= columns else choose_chunk(8, group)[0]
    launch_kernel(
        w8a8_matmul_kernel, (-(-rows // 64), -(-tokens // 16)),
        quantized, x_scales, codes.view(_CODE_DTYPES[grid]), scales, out,
        tokens, rows, columns, codes.shape[1] // _ALIGN_BYTES, scales.shape[1],
        GROUP=group, TILE_ROWS=spec.tile_rows, BLOCK_M=16, BLOCK_N=64, BLOCK_K=block_k,
        num_warps=4,
    )  # fmt: skip
    return out


KERNEL = Kernel("triton-w8a8", accepts, prepare, matmul)
