"""The fallback kernel: every grid, any bits, group size, type and device, in plain torch.

Codes stay packed at exactly ``bits`` bits each (rows padded to a multiple of 8 columns). Widths
that do not divide a byte are split into planes that do: a 3-bit code is its low 2 bits in one
plane and its high bit in another, so all unpacking is masks and shifts of whole bytes. Inside a
row of a plane the codes are strided: byte ``j`` holds the codes ``j, j + n, j + 2n ...`` (``n``
bytes per row), which makes unpacking a concatenation instead of an interleave.

A product decodes a tile of output rows, multiplies, and forgets it; the whole matrix never exists.
The cost is that of a decoded copy per call, which vanishes over very many rows and dominates when
decoding one token; who multiplies by the same weight again and again may keep the tiles.

`product` defines what every kernel has to compute: the same in float64, from decoded weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge_kernels.cpu import many_rows
from quantforge_kernels.layout import WIDTHS
from quantforge_kernels.problem import (
    Kernel,
    Packed,
    Parameters,
    Problem,
    narrowed,
    wide,
    widened,
)

TILE_WEIGHTS = 1 << 18  # 1 MiB decoded: stays in the second-level cache, as measured the fastest
STRIP = 256  # rows that are quantized at a time: tensors above 32 MiB get new memory from the system each time
FLOAT8 = {"fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def pack_planes(codes: Tensor, bits: int) -> list[Tensor]:
    """Pack uint8 codes ``[out, in]`` into planes of bytes, ``bits`` bits per code in all."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    planes, shift = [], 0
    for width in WIDTHS[bits]:
        fields = ((padded >> shift) & (2**width - 1)).chunk(8 // width, dim=1)
        plane = fields[0].clone()
        for place, field in enumerate(fields[1:], start=1):
            plane |= field << (place * width)
        planes.append(plane)
        shift += width
    return planes


def unpack_planes(planes: list[Tensor], bits: int, columns: int) -> Tensor:
    """Return the uint8 codes ``[out, columns]`` of `pack_planes`."""
    codes, shift = None, 0
    for plane, width in zip(planes, WIDTHS[bits], strict=True):
        fields = [(plane >> place) & (2**width - 1) for place in range(0, 8, width)]
        values = torch.cat(fields, dim=1)
        codes = values if codes is None else codes | (values << shift)
        shift += width
    assert codes is not None
    return codes[:, :columns]


def prepare(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Pack the codes; parameters stay as they are, but for the lower of two levels (`narrowed`)."""
    packed = {f"codes{i}": plane for i, plane in enumerate(pack_planes(codes, problem.bits))}
    held = narrowed(parameters, problem)
    return packed | {name: value.contiguous() for name, value in held.items()}


def restore(packed: Packed, problem: Problem) -> tuple[Tensor, Parameters]:
    """Undo `prepare`, for a kernel that is to multiply in the place of this one."""
    codes = _codes(packed, problem, slice(None)).contiguous()
    held = {name: value for name, value in packed.items() if not name.startswith("codes")}
    return codes, widened(held, problem)


def decode_rows(packed: Packed, problem: Problem, rows: slice) -> Tensor:
    """Return some rows of the weight, in float32 ``[rows, in]``."""
    values = _values(_codes(packed, problem, rows), packed, problem, rows)
    values *= _by_column(packed["scales"], packed.get("d"), problem, rows)
    if problem.minima:
        values -= _by_column(packed["mins"], packed.get("dmin"), problem, rows)
    return values


def _codes(packed: Packed, problem: Problem, rows: slice) -> Tensor:
    planes = [packed[f"codes{i}"][rows] for i in range(len(WIDTHS[problem.bits]))]
    return unpack_planes(planes, problem.bits, problem.in_features)


def _values(codes: Tensor, packed: Packed, problem: Problem, rows: slice) -> Tensor:
    """Return the values of the codes, before scales."""
    if problem.grid in FLOAT8:
        return codes.contiguous().view(FLOAT8[problem.grid]).float()
    if problem.grid == "table":
        return packed["table"][codes.int()]
    values = codes.float()
    if problem.symmetric:
        return values.sub_(2.0 ** (problem.bits - 1))
    return (
        values if problem.minima else values.sub_(_by_column(packed["zeros"], None, problem, rows))
    )


def _by_column(parameter: Tensor, above: Tensor | None, problem: Problem, rows: slice) -> Tensor:
    """Return a parameter (times that of its superblock) for some rows and every column, in float32."""
    if problem.tile_rows > 1:
        row = torch.arange(problem.out_features, device=parameter.device)[rows]
        parameter = parameter[row // problem.tile_rows]
    else:
        parameter = parameter[rows]
    if above is None:
        value = parameter.float()
    else:
        value = wide(parameter, problem.lower).float()
        value = value * above[rows].float().repeat_interleave(
            problem.superblock // problem.group_size, dim=1
        )
    spread = value[:, :, None].expand(-1, -1, problem.group_size).flatten(1)
    return spread[:, : problem.in_features]


def quantize_rows(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantize each row of ``x`` to a scale of its own: the absolute maximum is the largest code.

    Returns:
        Codes (int8, or float8_e4m3fn) ``[rows, in]`` and float32 scales ``[rows, 1]``.
    """
    most = 127.0 if kind == "int8" else 448.0
    values = x.float()
    scales = (values.abs().amax(1, keepdim=True) / most).clamp(min=1e-12)
    values = (values / scales).clamp(-most, most)
    return (values.round().to(torch.int8) if kind == "int8" else values.to(torch.float8_e4m3fn)), (
        scales
    )


def _rounded(x: Tensor, kind: str) -> Tensor:
    """Quantize rows and decode them again, in the type of ``x``."""
    codes, scale = quantize_rows(x, kind)
    return (codes.float() * scale).to(x.dtype)


def product(x: Tensor, weight: Tensor, activation: str = "") -> Tensor:
    """Return ``x weight^T`` in float64, ``x`` quantized first where the problem says so."""
    if activation:
        codes, scales = quantize_rows(x, activation)
        return (codes.double() @ weight.double().T) * scales.double()
    return x.double() @ weight.double().T


def matmul(
    x: Tensor, packed: Packed, problem: Problem, kept: dict[int, Tensor] | None = None
) -> Tensor:
    """Multiply tile by tile; the weight is rounded to the type that is computed in, see `many_rows`.

    ``kept`` holds the decoded tiles, by their first row, from one product to the next.
    """
    result = x.new_empty(x.shape[0], problem.out_features)
    if problem.activation:
        x = torch.cat([_rounded(part, problem.activation) for part in torch.split(x, STRIP)])
    x = x.to(many_rows.kind(x))
    step = max(1, TILE_WEIGHTS // problem.in_features)
    for first in range(0, problem.out_features, step):
        rows = slice(first, first + step)
        tile = None if kept is None else kept.get(first)
        if tile is None:
            tile = decode_rows(packed, problem, rows).to(x.dtype)
            if kept is not None:
                kept[first] = tile
        result[:, rows] = x @ tile.T
    return result


# Reports name it "reference": `product` and `matmul` are what the other kernels are compared with.
KERNEL = Kernel("reference", lambda _problem: True, prepare, matmul)
