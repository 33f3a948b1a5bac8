"""The reference: any bits, group size, type and device, in plain torch.

Codes stay packed at exactly ``bits`` bits each (rows padded to a multiple of 8 columns). Widths
that do not divide a byte are split into planes that do: a 3-bit code is its low 2 bits in one
plane and its high bit in another, so all unpacking is masks and shifts of whole bytes. Inside a
row of a plane the codes are strided: byte ``j`` holds the codes ``j, j + n, j + 2n ...`` (``n``
bytes per row), which makes unpacking a concatenation instead of an interleave.

A product decodes a tile of output rows, multiplies, and forgets it; the whole matrix never exists.
The cost is that of a decoded copy per call, which vanishes over the many rows of an evaluation and
dominates when decoding one token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge_kernels.problem import Kernel, Packed, Problem

TILE_WEIGHTS = 1 << 18  # 1 MiB decoded: stays in the second-level cache, as measured the fastest
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def pack_rows(codes: Tensor, bits: int) -> list[Tensor]:
    """Pack uint8 codes ``[out, in]`` into planes of bytes, ``bits`` bits per code in all."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    planes, shift = [], 0
    for width in _PLANES[bits]:
        fields = ((padded >> shift) & (2**width - 1)).chunk(8 // width, dim=1)
        plane = fields[0].clone()
        for place, field in enumerate(fields[1:], start=1):
            plane |= field << (place * width)
        planes.append(plane)
        shift += width
    return planes


def unpack_rows(planes: list[Tensor], bits: int, columns: int) -> Tensor:
    """Return the uint8 codes ``[out, columns]`` of `pack_rows`."""
    codes, shift = None, 0
    for plane, width in zip(planes, _PLANES[bits], strict=True):
        fields = [(plane >> place) & (2**width - 1) for place in range(0, 8, width)]
        values = torch.cat(fields, dim=1)
        codes = values if codes is None else codes | (values << shift)
        shift += width
    assert codes is not None
    return codes[:, :columns]


def prepare(codes: Tensor, scales: Tensor, zeros: Tensor | None, problem: Problem) -> Packed:
    """Pack the codes; scales and zeros stay as they are stored."""
    packed = {f"codes{i}": plane for i, plane in enumerate(pack_rows(codes, problem.bits))}
    packed["scales"] = scales.contiguous()
    if zeros is not None:
        packed["zeros"] = zeros.contiguous()
    return packed


def decode_rows(packed: Packed, problem: Problem, rows: slice) -> Tensor:
    """Return some rows of the weight, ``(codes - zeros) * scales`` in float32 ``[rows, in]``."""
    planes = [packed[f"codes{i}"][rows] for i in range(len(_PLANES[problem.bits]))]
    codes = unpack_rows(planes, problem.bits, problem.in_features)
    values = codes.float().view(-1, problem.groups, problem.group_size)
    zeros = packed.get("zeros")
    values -= 2.0 ** (problem.bits - 1) if zeros is None else zeros[rows, :, None]
    return values.mul_(packed["scales"][rows, :, None].float()).flatten(1)


def matmul(x: Tensor, packed: Packed, problem: Problem) -> Tensor:
    """Multiply tile by tile; the weight is rounded to the type of ``x``."""
    result = x.new_empty(x.shape[0], problem.out_features)
    step = max(1, TILE_WEIGHTS // problem.in_features)
    for first in range(0, problem.out_features, step):
        rows = slice(first, first + step)
        result[:, rows] = x @ decode_rows(packed, problem, rows).to(x.dtype).T
    return result


KERNEL = Kernel("reference", lambda _problem: True, prepare, matmul)
