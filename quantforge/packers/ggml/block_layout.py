"""Codes and parameters as the bytes of ggml's blocks, and back.

Every block starts on a byte and has its fields in the order of the functions below (ggml-common.h; restated from the
format, not from code). Codes are laid out so that one vector instruction unpacks many: a byte never holds neighbours,
but weights half a block, or 32, apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantforge.grids import SUPERBLOCKS
from quantforge.packers.ggml import lanes
from quantforge.packers.ggml.block_fields import (
    BlockLayout,
    Fields,
    Parameters,
    as_bytes,
    as_halves,
    centred,
    from_nibbles,
    from_pairs,
    joined_bits,
    joined_planes,
    nibbles,
    offset,
    pairs,
    planes,
)
from quantforge.packers.ggml.k_quant_layout import K_QUANTS
from quantforge.packers.lattices import blocks as lattice_blocks
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme


def pack(tensor: QuantizedTensor) -> Tensor:
    """Return the rows of ``tensor`` as uint8 ``[rows, row_bytes]``."""
    grid = tensor.scheme.grid
    if SUPERBLOCKS[grid].vector > 1:
        return lattice_blocks.pack_rows(tensor)
    rows, columns = tensor.shape
    blocks = columns // SUPERBLOCKS[grid].columns
    codes = tensor.codes.view(rows * blocks, -1)
    parameters = {key: value.reshape(rows * blocks, -1) for key, value in tensor.parameters.items()}
    fields = _LAYOUTS[grid][0](codes, parameters)
    return (fields[0] if len(fields) == 1 else torch.cat(fields, -1)).view(rows, -1)


def unpack(raw: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Return the rows ``raw`` uint8 ``[rows, row_bytes]`` as codes and parameters."""
    if SUPERBLOCKS[scheme.grid].vector > 1:
        return lattice_blocks.unpack_rows(raw, scheme)
    rows = len(raw)
    blocks = raw.reshape(-1, SUPERBLOCKS[scheme.grid].block_bytes)
    codes, parameters = _LAYOUTS[scheme.grid][1](blocks)
    shaped = {key: value.reshape(rows, -1) for key, value in parameters.items()}
    return QuantizedTensor(codes.reshape(rows, -1), shaped, scheme)


# Legacy: [scale] [minimum] [fifth bits] [nibbles]


def _with_nibbles(heads: Sequence[Tensor], codes: Tensor) -> list[Tensor]:
    # In one pass where fields are of 16 bits: joining those of a few bytes takes longer than packing.
    if codes.device.type == "cpu" and heads[0].dtype == torch.float16:
        return [lanes.with_nibbles(torch.cat([*heads], -1), codes)]
    return [*map(as_bytes, heads), nibbles(codes)]


def _pack_legacy(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return _with_nibbles([*parameters.values()], codes)


def _pack_fifth(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    words = codes.view(torch.int64)  # eight bytes at once: what is shifted stays inside of its byte
    high = joined_bits((words >> 4).bitwise_and_(0x0101010101010101))
    low = (words & 0x0F0F0F0F0F0F0F0F).view(torch.uint8)
    return _with_nibbles([*parameters.values(), high.view(torch.float16)], low)


def _pack_q4_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return _pack_legacy(offset(codes, 8), parameters)


def _unpack_q4_0(raw: Tensor) -> Fields:
    return centred(from_nibbles(raw[:, 2:]), 8), {"scales": as_halves(raw[:, :2])}


def _unpack_q4_1(raw: Tensor) -> Fields:
    parameters = {"scales": as_halves(raw[:, :2]), "mins": as_halves(raw[:, 2:4])}
    return from_nibbles(raw[:, 4:]), parameters


def _pack_q5_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return _pack_fifth(offset(codes, 16), parameters)


def _fifth(raw: Tensor) -> Tensor:
    high = planes(raw[:, :4].reshape(-1, 4, 1), 1).flatten(1)
    return from_nibbles(raw[:, 4:]) | (high << 4)


def _unpack_q5_0(raw: Tensor) -> Fields:
    return centred(_fifth(raw[:, 2:]), 16), {"scales": as_halves(raw[:, :2])}


def _unpack_q5_1(raw: Tensor) -> Fields:
    return _fifth(raw[:, 4:]), {"scales": as_halves(raw[:, :2]), "mins": as_halves(raw[:, 2:4])}


def _pack_q8_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return [as_bytes(parameters["scales"]), as_bytes(codes)]


def _unpack_q8_0(raw: Tensor) -> Fields:
    return raw[:, 2:].view(torch.int8), {"scales": as_halves(raw[:, :2])}


def _unpack_iq4_nl(raw: Tensor) -> Fields:
    return from_nibbles(raw[:, 2:]), {"scales": as_halves(raw[:, :2])}


def _unpack_mxfp4(raw: Tensor) -> Fields:
    return from_nibbles(raw[:, 1:]), {"exponents": raw[:, :1]}


# IQ4_XS and the ternary types


def _pack_iq4_xs(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    scales = offset(parameters["scales"], 32)
    high = joined_planes((scales >> 4).view(-1, 2, 4, 1), 2).flatten(1)
    low = joined_planes(scales.view(-1, 4, 2, 1), 4).flatten(1)
    return [as_bytes(parameters["d"]), high, low, nibbles(codes)]


def _unpack_iq4_xs(raw: Tensor) -> Fields:
    half, high, low, codes = torch.split(raw, [2, 2, 4, 128], 1)
    scales = planes(low.reshape(-1, 4, 1), 4).flatten(1)
    scales = scales | (planes(high.reshape(-1, 2, 1), 2).flatten(1) << 4)
    return from_nibbles(codes), {"d": as_halves(half), "scales": centred(scales, 32)}


def _pack_tq2_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return [pairs(offset(codes, 1)), as_bytes(parameters["scales"])]


def _unpack_tq2_0(raw: Tensor) -> Fields:
    return centred(from_pairs(raw[:, :64]), 1), {"scales": as_halves(raw[:, 64:])}


TERNARY_RUNS = ((32, 5), (16, 5), (4, 4))  # bytes, and digits in each; the digits are as far apart


def _pack_tq1_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    """Pack five digits of base 3 (at the end four) in a byte, as a binary fraction.

    Digit ``i`` is the integer part of ``3^(i+1) byte / 256``.
    """
    digits, numbers, start = offset(codes, 1), [], 0
    for size, count in TERNARY_RUNS:
        run = digits[:, start : start + size * count].view(torch.int32)  # four bytes at once
        run = run.view(-1, count, size // 4)
        number = run[:, 0] * 81
        for index in range(1, count):
            number += run[:, index] * 3 ** (4 - index)
        numbers.append(number)
        start += size * count
    fractions = torch.cat(numbers, 1).view(torch.uint8).int().mul_(256).add_(242)
    fractions = fractions.mul_(8631) >> 21  # divided by 243, for all that occur
    return [fractions.to(torch.uint8), as_bytes(parameters["scales"])]


def _unpack_tq1_0(raw: Tensor) -> Fields:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=raw.device)
    digits = []
    for part, (_, count) in zip(
        torch.split(raw[:, :52], [32, 16, 4], 1), TERNARY_RUNS, strict=True
    ):
        moved = part.unsqueeze(1) * powers[:count].unsqueeze(
            1
        )  # the integer part drops out modulo 256
        digits.append(((moved.int() * 3) >> 8).to(torch.int8).flatten(1) - 1)
    return torch.cat(digits, 1), {"scales": as_halves(raw[:, 52:])}


_LAYOUTS: Mapping[str, BlockLayout] = {
    **K_QUANTS,
    "q4_0": (_pack_q4_0, _unpack_q4_0),
    "q4_1": (_pack_legacy, _unpack_q4_1),
    "q5_0": (_pack_q5_0, _unpack_q5_0),
    "q5_1": (_pack_fifth, _unpack_q5_1),
    "q8_0": (_pack_q8_0, _unpack_q8_0),
    "iq4_nl": (_pack_legacy, _unpack_iq4_nl),
    "iq4_xs": (_pack_iq4_xs, _unpack_iq4_xs),
    "tq1_0": (_pack_tq1_0, _unpack_tq1_0),
    "tq2_0": (_pack_tq2_0, _unpack_tq2_0),
    "mxfp4": (_pack_legacy, _unpack_mxfp4),
}
