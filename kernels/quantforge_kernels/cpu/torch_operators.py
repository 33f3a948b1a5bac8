"""torch's own CPU operators for packed weights, in bfloat16.

``_weight_int4pack_mm_for_cpu`` computes ``x @ W`` with ``W = (codes - 8) * scale + zero``, groups
of 32, 64, 128 or 256 columns, and one table ``[groups, out, 2]`` of scales and zeros in the type
of ``x``. Our ``(codes - z) * scale`` is the same with ``zero = (8 - z) * scale``.
``_weight_int8pack_mm`` computes ``(x @ codes.T) * scale`` with one scale per row.

Both are fast in bfloat16 only: in float32 and float16 they run a scalar loop, many times slower
than decoding the weight (one 4096x4096 row with AVX-512: 0.9 ms, 29 ms in float32, 64 ms in
float16), so those types are left to the reference. In bfloat16 the scales of the 4-bit table are
rounded to 8 significant bits, and so are its zeros; the operators are therefore what speed is
measured with, and float32 what quality is measured with.

Memory: a symmetric layer keeps its scales only, and the table, half of it zeros, is spread out for
each call (some percent of its time); an asymmetric one keeps the table. Either is within 1.1 times
the bits of the file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge_kernels.problem import Kernel, Packed, Parameters, Problem

_GROUPS = (256, 128, 64, 32)  # of the operator, largest first
_ROWS = 16  # of which its layout wants a multiple
_COLUMNS = 16  # the 8-bit operator reads so many at a time and checks no remainder


def _operator_group(problem: Problem) -> int | None:
    """Return the operator's group size: the scheme's own, or 256 where that divides it (scales repeat)."""
    size = problem.group_size
    return size if size in _GROUPS else 256 if size % 256 == 0 else None


def _plain(problem: Problem) -> bool:
    special = problem.activation or problem.minima or problem.superblock
    return problem.device == "cpu" and problem.grid == "int" and not special


def accepts_int4(problem: Problem) -> bool:
    """Return whether the operator solves a problem: 4 bits, bfloat16, a group size of the operator."""
    return (
        _plain(problem)
        and problem.bits == 4
        and problem.dtype == torch.bfloat16
        and problem.out_features % _ROWS == 0
        and _operator_group(problem) is not None
    )


def prepare_int4(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Lay the codes out for this machine, the scales (and zeros) by groups."""
    group = _operator_group(problem)
    assert group is not None
    scales, zeros = parameters["scales"], parameters.get("zeros")
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    repeats = problem.group_size // group
    table = scales.T.repeat_interleave(repeats, dim=0).float()
    packed = {"codes": pack(codes.int(), 1)}
    if zeros is None:
        return packed | {"scales": table.to(problem.dtype)}
    shifts = table * (8 - zeros.T.repeat_interleave(repeats, dim=0).float())
    return packed | {"table": torch.stack((table, shifts), dim=-1).to(problem.dtype)}


def matmul_int4(x: Tensor, packed: Packed, problem: Problem) -> Tensor:
    """Multiply with 4-bit weights."""
    group = _operator_group(problem)
    table = packed["table"] if "table" in packed else _with_zeros(packed["scales"])
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.contiguous(), packed["codes"], group, table
    )
    return y


def _with_zeros(scales: Tensor) -> Tensor:
    """Return ``[..., 2]``: each bfloat16 scale and a zero: the halves of a 32-bit word.

    Widening integers is ten times faster than writing to every second place.
    """
    words = scales.view(torch.uint16).int()  # little-endian: the scale comes first
    return words.view(torch.bfloat16).view(*scales.shape, 2)


def accepts_int8(problem: Problem) -> bool:
    """Return whether the operator solves a problem.

    That is: 8 bits, bfloat16, symmetric, one scale per row, whole vectors of columns.
    """
    return (
        _plain(problem)
        and problem.bits == 8
        and problem.dtype == torch.bfloat16
        and problem.symmetric
        and problem.group_size == problem.in_features
        and problem.in_features % _COLUMNS == 0
    )


def prepare_int8(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Shift the codes to int8; scales stay exact in float32 and are applied to the result."""
    return {
        "codes": (codes ^ 0x80).view(torch.int8),
        "ones": torch.ones(problem.out_features, dtype=problem.dtype),
        "scales": parameters["scales"].flatten().float(),
    }


def matmul_int8(x: Tensor, packed: Packed, _problem: Problem) -> Tensor:
    """Multiply with 8-bit weights."""
    y: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), packed["codes"], packed["ones"])
    return (y.float() * packed["scales"]).to(x.dtype)


INT4 = Kernel("torch-int4", accepts_int4, prepare_int4, matmul_int4)
INT8 = Kernel("torch-int8", accepts_int8, prepare_int8, matmul_int8)
