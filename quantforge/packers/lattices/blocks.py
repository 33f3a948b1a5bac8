"""Codes and parameters of the lattice types as the bytes of their blocks of 256, and back.

A code is an int32: the places of its points in the table, lowest bits first, then the signs, one bit for each weight
(1 is negative), also where the file leaves the last one out, since their number is even; of iq1_m in their place the
bit that chooses the shift. ``scales`` are uint8 integers, ``d`` is the float16 of a block, ``shifts`` of iq1_s 1 where
a group is lowered.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.grids import SUPERBLOCKS
from quantforge.packers.ggml.block_fields import (
    BlockLayout,
    Fields,
    Parameters,
    as_bytes,
    as_halves,
    joined_planes,
    planes,
)
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

_SEVENS = (0, 7, 14, 21)  # places of four runs of 7 signs in a word


def pack_blocks(grid: str, codes: Tensor, parameters: Parameters) -> Tensor:
    """Return blocks, uint8 ``[blocks, bytes]``, of ``codes`` ``[blocks, n]`` and parameters ``[blocks, groups]``."""
    return torch.cat(_LAYOUTS[grid][0](codes, parameters), 1)


def unpack_blocks(grid: str, raw: Tensor) -> Fields:
    """Undo `pack_blocks`."""
    assert raw.shape[1] == SUPERBLOCKS[grid].block_bytes
    return _LAYOUTS[grid][1](raw)


def pack_rows(tensor: QuantizedTensor) -> Tensor:
    """Return the rows of ``tensor`` as uint8 ``[rows, row_bytes]``."""
    blocks = tensor.parameters["d"].numel()
    parts = {key: value.reshape(blocks, -1) for key, value in tensor.parameters.items()}
    raw = pack_blocks(tensor.scheme.grid, tensor.codes.reshape(blocks, -1), parts)
    return raw.view(len(tensor.codes), -1)


def unpack_rows(raw: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Return the rows ``raw`` uint8 ``[rows, row_bytes]`` as codes and parameters."""
    rows = len(raw)
    blocks = raw.reshape(-1, SUPERBLOCKS[scheme.grid].block_bytes)
    codes, parameters = unpack_blocks(scheme.grid, blocks)
    shaped = {key: value.reshape(rows, -1) for key, value in parameters.items()}
    return QuantizedTensor(codes.reshape(rows, -1), shaped, scheme)


def _low(codes: Tensor) -> Tensor:
    return (codes & 255).to(torch.uint8)


def _halfwords(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int16).int() & 0xFFFF


def _as_halfwords(values: Tensor) -> Tensor:
    return as_bytes(values.to(torch.int16))


def _words(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int32)


def _shifted(values: Tensor, places: tuple[int, ...]) -> Tensor:
    """Return ``values`` ``[..., n]`` moved down by each of ``places``, ``[..., n, places]``."""
    return values.unsqueeze(-1) >> torch.tensor(places, dtype=values.dtype, device=values.device)


def _summed(values: Tensor, places: tuple[int, ...]) -> Tensor:
    """Undo `_shifted` of fields that do not overlap."""
    moved = values.int() << torch.tensor(places, dtype=torch.int32, device=values.device)
    return moved.sum(-1, dtype=torch.int32)


def _nibbles(scales: Tensor) -> Tensor:
    return joined_planes(scales.view(len(scales), -1, 2, 1), 4).flatten(1)


def _from_nibbles(raw: Tensor) -> Tensor:
    return planes(raw.unsqueeze(-1), 4).flatten(1)


def _signed(index: Tensor, seven: Tensor, place: int) -> Tensor:
    """Join indices with signs of which the eighth makes the number of negative ones even."""
    odd = seven ^ (seven >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    return index | ((seven | (odd << 7)) << place)


def _sign_words(codes: Tensor, scales: Tensor, place: int) -> Tensor:
    """Return for each 32 weights the bytes of a word: four times 7 signs, and the scale above."""
    signs = _summed(((codes >> place) & 127).view(len(codes), -1, 4), _SEVENS)
    return as_bytes(signs | (scales.int() << 28))


def _from_sign_words(raw: Tensor) -> tuple[Tensor, Tensor]:
    words = _words(raw)
    signs = (_shifted(words, _SEVENS) & 127).flatten(1)
    return signs, ((words >> 28) & 15).to(torch.uint8)


def _pack_iq2_xxs(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    words = _sign_words(codes, parameters["scales"], 8).view(len(codes), -1, 4)
    index = _low(codes).view(len(codes), -1, 4)
    return [as_bytes(parameters["d"]), torch.cat([index, words], 2).flatten(1)]


def _unpack_iq2_xxs(raw: Tensor) -> Fields:
    parts = raw[:, 2:].reshape(len(raw), 8, 2, 4)
    signs, scales = _from_sign_words(parts[:, :, 1].flatten(1))
    codes = _signed(parts[:, :, 0].flatten(1).int(), signs, 8)
    return codes, {"d": as_halves(raw[:, :2]), "scales": scales}


def _pack_iq2_xs(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    return [
        as_bytes(parameters["d"]),
        _as_halfwords(codes & 0xFFFF),
        _nibbles(parameters["scales"]),
    ]


def _unpack_iq2_xs(raw: Tensor) -> Fields:
    half, stored, scales = torch.split(raw, [2, 64, 8], 1)
    words = _halfwords(stored)
    codes = _signed(words & 511, words >> 9, 9)
    return codes, {"d": as_halves(half), "scales": _from_nibbles(scales)}


def _pack_iq2_s(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    high = _low(_summed(((codes >> 8) & 3).view(len(codes), -1, 4), (0, 2, 4, 6)))
    signs = _low(codes >> 10)
    return [as_bytes(parameters["d"]), _low(codes), signs, high, _nibbles(parameters["scales"])]


def _unpack_iq2_s(raw: Tensor) -> Fields:
    half, low, signs, high, scales = torch.split(raw, [2, 32, 32, 8, 8], 1)
    top = (_shifted(high.int(), (0, 2, 4, 6)) & 3).flatten(1)
    codes = low.int() | (top << 8) | (signs.int() << 10)
    return codes, {"d": as_halves(half), "scales": _from_nibbles(scales)}


def _pack_iq3_xxs(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    index = _low(_shifted(codes, (0, 8)).flatten(1))
    return [as_bytes(parameters["d"]), index, _sign_words(codes, parameters["scales"], 16)]


def _unpack_iq3_xxs(raw: Tensor) -> Fields:
    signs, scales = _from_sign_words(raw[:, 66:])
    codes = _signed(_halfwords(raw[:, 2:66]), signs, 16)
    return codes, {"d": as_halves(raw[:, :2]), "scales": scales}


def _pack_iq3_s(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    high = _low(_summed(((codes >> 8) & 1).view(len(codes), -1, 8), tuple(range(8))))
    signs = _low(_summed(((codes >> 9) & 15).view(len(codes), -1, 2), (0, 4)))
    return [as_bytes(parameters["d"]), _low(codes), high, signs, _nibbles(parameters["scales"])]


def _unpack_iq3_s(raw: Tensor) -> Fields:
    half, low, high, signs, scales = torch.split(raw, [2, 64, 8, 32, 4], 1)
    top = (_shifted(high.int(), tuple(range(8))) & 1).flatten(1)
    negative = (_shifted(signs.int(), (0, 4)) & 15).flatten(1)
    codes = low.int() | (top << 8) | (negative << 9)
    return codes, {"d": as_halves(half), "scales": _from_nibbles(scales)}


def _pack_iq1_s(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    high = _summed((codes >> 8).view(len(codes), -1, 4), (0, 3, 6, 9))
    high |= (parameters["scales"].int() << 12) | (parameters["shifts"].int() << 15)
    return [as_bytes(parameters["d"]), _low(codes), _as_halfwords(high)]


def _unpack_iq1_s(raw: Tensor) -> Fields:
    high = _halfwords(raw[:, 34:])
    top = (_shifted(high, (0, 3, 6, 9)) & 7).flatten(1)
    parameters = {
        "d": as_halves(raw[:, :2]),
        "scales": ((high >> 12) & 7).to(torch.uint8),
        "shifts": (high >> 15).to(torch.uint8),
    }
    return raw[:, 2:34].int() | (top << 8), parameters


_QUARTERS, _THREES = (0, 4, 8, 12), (0, 3, 6, 9)


def _pack_iq1_m(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    high = _low(_summed((codes >> 8).view(len(codes), -1, 2), (0, 4)))
    scales = _summed(parameters["scales"].view(len(codes), 4, 4), _THREES)
    unit = _halfwords(as_bytes(parameters["d"]))
    scales |= (_shifted(unit, _QUARTERS) & 15).flatten(1) << 12
    return [_low(codes), high, _as_halfwords(scales)]


def _unpack_iq1_m(raw: Tensor) -> Fields:
    low, high, stored = torch.split(raw, [32, 16, 8], 1)
    top = (_shifted(high.int(), (0, 4)) & 15).flatten(1)
    words = _halfwords(stored)
    unit = _summed(words >> 12, _QUARTERS).unsqueeze(1)
    scales = (_shifted(words, _THREES) & 7).flatten(1).to(torch.uint8)
    return low.int() | (top << 8), {"d": as_halves(_as_halfwords(unit)), "scales": scales}


_LAYOUTS: Mapping[str, BlockLayout] = {
    "iq1_s": (_pack_iq1_s, _unpack_iq1_s),
    "iq1_m": (_pack_iq1_m, _unpack_iq1_m),
    "iq2_xxs": (_pack_iq2_xxs, _unpack_iq2_xxs),
    "iq2_xs": (_pack_iq2_xs, _unpack_iq2_xs),
    "iq2_s": (_pack_iq2_s, _unpack_iq2_s),
    "iq3_xxs": (_pack_iq3_xxs, _unpack_iq3_xxs),
    "iq3_s": (_pack_iq3_s, _unpack_iq3_s),
}
