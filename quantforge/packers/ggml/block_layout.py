"""Codes and parameters as the bytes of ggml's blocks, and back.

Every block starts on a byte and has its fields in the order of the functions below (ggml-common.h; restated from the
format, not from code). Codes are laid out so that one vector instruction unpacks many: a byte never holds neighbours,
but weights half a block, or 32, apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quantforge.grids import SUPERBLOCKS
from quantforge.packers.ggml import lanes
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

Parameters = Mapping[str, Tensor]
Fields = tuple[Tensor, dict[str, Tensor]]  # codes [..., columns] and parameters [..., groups]


def pack(tensor: QuantizedTensor) -> Tensor:
    """Return the rows of ``tensor`` as uint8 ``[rows, row_bytes]``."""
    grid = tensor.scheme.grid
    rows, columns = tensor.shape
    blocks = columns // SUPERBLOCKS[grid].columns
    codes = tensor.codes.view(rows * blocks, -1)
    parameters = {key: value.reshape(rows * blocks, -1) for key, value in tensor.parameters.items()}
    fields = _LAYOUTS[grid][0](codes, parameters)
    return (fields[0] if len(fields) == 1 else torch.cat(fields, -1)).view(rows, -1)


def unpack(raw: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Return the rows ``raw`` uint8 ``[rows, row_bytes]`` as codes and parameters."""
    rows = len(raw)
    blocks = raw.reshape(-1, SUPERBLOCKS[scheme.grid].block_bytes)
    codes, parameters = _LAYOUTS[scheme.grid][1](blocks)
    shaped = {key: value.reshape(rows, -1) for key, value in parameters.items()}
    return QuantizedTensor(codes.reshape(rows, -1), shaped, scheme)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _planes(raw: Tensor, bits: int) -> Tensor:
    """Split each byte ``[..., n]`` into ``8 / bits`` codes ``[..., 8 / bits, n]``, lowest bits first."""
    shifts = torch.arange(0, 8, bits, device=raw.device, dtype=torch.uint8)
    return (raw.unsqueeze(-2) >> shifts.unsqueeze(1)) & ((1 << bits) - 1)


def _joined(planes: Tensor, bits: int) -> Tensor:
    """Undo `_planes`: ``[..., 8 / bits, n]`` to bytes ``[..., n]``; higher bits of the codes are cut off."""
    codes = (planes & ((1 << bits) - 1)).contiguous()
    if codes.shape[-1] % 8 == 0:  # eight bytes at once: what is shifted stays inside of its byte
        codes = codes.view(torch.int64)
    joined = codes[..., 0, :].clone()
    for index in range(1, planes.shape[-2]):
        joined |= codes[..., index, :] << (bits * index)
    return joined.view(torch.uint8)


def _bits(ones: Tensor) -> Tensor:
    """Join ``[blocks, 8 n]`` of 0 and 1 to bytes ``[blocks, n]``, the first in the lowest bit."""
    # Byte ``i`` of a word, times ``2^(56 - 7 i)``, is bit ``i`` of its highest byte.
    return ((ones.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Join codes ``[blocks, 32 n]`` to bytes ``[blocks, 16 n]``: codes ``j`` and ``j + 16`` of each 32 share a byte."""
    pairs = codes.view(torch.int64).view(len(codes), -1, 2, 2)  # eight bytes at once
    return (pairs[:, :, 1] << 4).bitwise_or_(pairs[:, :, 0]).flatten(1).view(torch.uint8)


def _from_nibbles(raw: Tensor) -> Tensor:
    return _planes(raw.reshape(len(raw), -1, 16), 4).flatten(1)


def _offset(codes: Tensor, middle: int) -> Tensor:
    """Shift signed codes to the unsigned ones that are stored."""
    return (codes + middle).view(torch.uint8)


def _centred(codes: Tensor, middle: int) -> Tensor:
    return codes.view(torch.int8) - middle


# Legacy: [scale] [minimum] [fifth bits] [nibbles]


def _with_nibbles(heads: Sequence[Tensor], codes: Tensor) -> list[Tensor]:
    # In one pass where fields are of 16 bits: joining those of a few bytes takes longer than packing.
    if codes.device.type == "cpu" and heads[0].dtype == torch.float16:
        return [lanes.with_nibbles(torch.cat([*heads], -1), codes)]
    return [*map(_bytes, heads), _nibbles(codes)]


def _pack_legacy(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return _with_nibbles([*parameters.values()], codes)


def _pack_fifth(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    words = codes.view(torch.int64)  # eight bytes at once: what is shifted stays inside of its byte
    high = _bits((words >> 4).bitwise_and_(0x0101010101010101))
    low = (words & 0x0F0F0F0F0F0F0F0F).view(torch.uint8)
    return _with_nibbles([*parameters.values(), high.view(torch.float16)], low)


def _pack_q4_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return _pack_legacy(_offset(codes, 8), parameters)


def _unpack_q4_0(raw: Tensor) -> Fields:
    return _centred(_from_nibbles(raw[:, 2:]), 8), {"scales": _halves(raw[:, :2])}


def _unpack_q4_1(raw: Tensor) -> Fields:
    parameters = {"scales": _halves(raw[:, :2]), "mins": _halves(raw[:, 2:4])}
    return _from_nibbles(raw[:, 4:]), parameters


def _pack_q5_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return _pack_fifth(_offset(codes, 16), parameters)


def _fifth(raw: Tensor) -> Tensor:
    high = _planes(raw[:, :4].reshape(-1, 4, 1), 1).flatten(1)
    return _from_nibbles(raw[:, 4:]) | (high << 4)


def _unpack_q5_0(raw: Tensor) -> Fields:
    return _centred(_fifth(raw[:, 2:]), 16), {"scales": _halves(raw[:, :2])}


def _unpack_q5_1(raw: Tensor) -> Fields:
    return _fifth(raw[:, 4:]), {"scales": _halves(raw[:, :2]), "mins": _halves(raw[:, 2:4])}


def _pack_q8_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return [_bytes(parameters["scales"]), _bytes(codes)]


def _unpack_q8_0(raw: Tensor) -> Fields:
    return raw[:, 2:].view(torch.int8), {"scales": _halves(raw[:, :2])}


def _unpack_iq4_nl(raw: Tensor) -> Fields:
    return _from_nibbles(raw[:, 2:]), {"scales": _halves(raw[:, :2])}


def _unpack_mxfp4(raw: Tensor) -> Fields:
    return _from_nibbles(raw[:, 1:]), {"exponents": raw[:, :1]}


# K-quants


def _pack_q2_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    scales = parameters["scales"] | (parameters["mins"] << 4)
    return [scales, _pairs(codes), _bytes(parameters["d"]), _bytes(parameters["dmin"])]


def _pairs(codes: Tensor) -> Tensor:
    """Join the low two bits of codes: in each half of a block, four codes that are 32 apart share a byte."""
    return _joined(codes.view(-1, 2, 4, 32), 2).flatten(1)


def _from_pairs(raw: Tensor) -> Tensor:
    return _planes(raw.reshape(-1, 2, 32), 2).flatten(1)


def _unpack_q2_k(raw: Tensor) -> Fields:
    scales, codes, halves = torch.split(raw, [16, 64, 4], 1)
    halves = _halves(halves)
    parameters = {"d": halves[:, :1], "dmin": halves[:, 1:]}
    return _from_pairs(codes), parameters | {"scales": scales & 15, "mins": scales >> 4}


def _pack_q3_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    codes = _offset(codes, 4)
    scales = _offset(parameters["scales"], 32)
    low = _joined(scales.view(-1, 2, 8), 4)
    high = _joined((scales >> 4).view(-1, 4, 4), 2)
    mask = _joined((codes >> 2).view(-1, 8, 32), 1)
    return [mask, _pairs(codes), low, high, _bytes(parameters["d"])]


def _unpack_q3_k(raw: Tensor) -> Fields:
    mask, codes, low, high, half = torch.split(raw, [32, 64, 8, 4, 2], 1)
    codes = _from_pairs(codes) | (_planes(mask, 1).flatten(1) << 2)
    scales = _planes(low, 4).flatten(1) | (_planes(high, 2).flatten(1) << 4)
    return _centred(codes, 4), {"d": _halves(half), "scales": _centred(scales, 32)}


def _pack_six_bits(parameters: Parameters) -> Tensor:
    """Pack eight scales and eight minima of 6 bits in 12 bytes.

    The two top bits of the last four of each lie in the bytes of the first four.
    """
    scales, mins = parameters["scales"], parameters["mins"]
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = mins[:, :4] | ((mins[:, 4:] >> 4) << 6)
    return torch.cat([first, second, (scales[:, 4:] & 15) | (mins[:, 4:] << 4)], 1)


def _unpack_six_bits(raw: Tensor) -> dict[str, Tensor]:
    first, second, low = torch.split(raw, 4, 1)
    scales = torch.cat([first & 63, (low & 15) | ((first >> 6) << 4)], 1)
    return {
        "scales": scales,
        "mins": torch.cat([second & 63, (low >> 4) | ((second >> 6) << 4)], 1),
    }


def _low_nibbles(codes: Tensor) -> Tensor:
    """Join the low 4 bits of codes: of each 64, two that are 32 apart share a byte."""
    return _joined(codes.view(-1, 4, 2, 32), 4).flatten(1)


def _pack_q4_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    halves = [_bytes(parameters["d"]), _bytes(parameters["dmin"])]
    return [*halves, _pack_six_bits(parameters), _low_nibbles(codes)]


def _unpack_q4_k(raw: Tensor) -> Fields:
    halves = _halves(raw[:, :4])
    parameters = {"d": halves[:, :1], "dmin": halves[:, 1:]} | _unpack_six_bits(raw[:, 4:16])
    return _planes(raw[:, 16:].reshape(-1, 4, 32), 4).flatten(1), parameters


def _pack_q5_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    *head, low = _pack_q4_k(codes, parameters)
    return [*head, _joined((codes >> 4).view(-1, 8, 32), 1), low]


def _unpack_q5_k(raw: Tensor) -> Fields:
    low, parameters = _unpack_q4_k(torch.cat([raw[:, :16], raw[:, 48:]], 1))
    return low | (_planes(raw[:, 16:48], 1).flatten(1) << 4), parameters


def _pack_q6_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    codes = _offset(codes, 32)
    low = _joined(codes.view(-1, 2, 2, 64), 4).flatten(1)
    high = _joined((codes >> 4).view(-1, 2, 4, 32), 2).flatten(1)
    return [low, high, _bytes(parameters["scales"]), _bytes(parameters["d"])]


def _unpack_q6_k(raw: Tensor) -> Fields:
    low, high, scales, half = torch.split(raw, [128, 64, 16, 2], 1)
    codes = _planes(low.reshape(-1, 2, 64), 4).flatten(1)
    codes = codes | (_planes(high.reshape(-1, 2, 32), 2).flatten(1) << 4)
    return _centred(codes, 32), {"d": _halves(half), "scales": scales.contiguous().view(torch.int8)}


# IQ4_XS and the ternary types


def _pack_iq4_xs(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    scales = _offset(parameters["scales"], 32)
    high = _joined((scales >> 4).view(-1, 2, 4, 1), 2).flatten(1)
    low = _joined(scales.view(-1, 4, 2, 1), 4).flatten(1)
    return [_bytes(parameters["d"]), high, low, _nibbles(codes)]


def _unpack_iq4_xs(raw: Tensor) -> Fields:
    half, high, low, codes = torch.split(raw, [2, 2, 4, 128], 1)
    scales = _planes(low.reshape(-1, 4, 1), 4).flatten(1)
    scales = scales | (_planes(high.reshape(-1, 2, 1), 2).flatten(1) << 4)
    return _from_nibbles(codes), {"d": _halves(half), "scales": _centred(scales, 32)}


def _pack_tq2_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return [_pairs(_offset(codes, 1)), _bytes(parameters["scales"])]


def _unpack_tq2_0(raw: Tensor) -> Fields:
    return _centred(_from_pairs(raw[:, :64]), 1), {"scales": _halves(raw[:, 64:])}


TERNARY_RUNS = ((32, 5), (16, 5), (4, 4))  # bytes, and digits in each; the digits are as far apart


def _pack_tq1_0(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    """Pack five digits of base 3 (at the end four) in a byte, as a binary fraction.

    Digit ``i`` is the integer part of ``3^(i+1) byte / 256``.
    """
    digits, numbers, start = _offset(codes, 1), [], 0
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
    return [fractions.to(torch.uint8), _bytes(parameters["scales"])]


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
    return torch.cat(digits, 1), {"scales": _halves(raw[:, 52:])}


_LAYOUTS: Mapping[
    str, tuple[Callable[[Tensor, Parameters], list[Tensor]], Callable[[Tensor], Fields]]
] = {
    "q4_0": (_pack_q4_0, _unpack_q4_0),
    "q4_1": (_pack_legacy, _unpack_q4_1),
    "q5_0": (_pack_q5_0, _unpack_q5_0),
    "q5_1": (_pack_fifth, _unpack_q5_1),
    "q8_0": (_pack_q8_0, _unpack_q8_0),
    "q2_k": (_pack_q2_k, _unpack_q2_k),
    "q3_k": (_pack_q3_k, _unpack_q3_k),
    "q4_k": (_pack_q4_k, _unpack_q4_k),
    "q5_k": (_pack_q5_k, _unpack_q5_k),
    "q6_k": (_pack_q6_k, _unpack_q6_k),
    "iq4_nl": (_pack_legacy, _unpack_iq4_nl),
    "iq4_xs": (_pack_iq4_xs, _unpack_iq4_xs),
    "tq1_0": (_pack_tq1_0, _unpack_tq1_0),
    "tq2_0": (_pack_tq2_0, _unpack_tq2_0),
    "mxfp4": (_pack_legacy, _unpack_mxfp4),
}
