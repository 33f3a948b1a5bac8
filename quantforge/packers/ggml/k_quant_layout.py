"""Codes and parameters of K-quants as the bytes of their blocks of 256, and back; see `block_layout`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.packers.ggml.block_fields import (
    BlockLayout,
    Fields,
    Parameters,
    as_bytes,
    as_halves,
    centred,
    from_pairs,
    joined_planes,
    offset,
    pairs,
    planes,
)


def _pack_q2_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    scales = parameters["scales"] | (parameters["mins"] << 4)
    return [scales, pairs(codes), as_bytes(parameters["d"]), as_bytes(parameters["dmin"])]


def _unpack_q2_k(raw: Tensor) -> Fields:
    scales, codes, halves = torch.split(raw, [16, 64, 4], 1)
    halves = as_halves(halves)
    parameters = {"d": halves[:, :1], "dmin": halves[:, 1:]}
    return from_pairs(codes), parameters | {"scales": scales & 15, "mins": scales >> 4}


def _pack_q3_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    codes = offset(codes, 4)
    scales = offset(parameters["scales"], 32)
    low = joined_planes(scales.view(-1, 2, 8), 4)
    high = joined_planes((scales >> 4).view(-1, 4, 4), 2)
    mask = joined_planes((codes >> 2).view(-1, 8, 32), 1)
    return [mask, pairs(codes), low, high, as_bytes(parameters["d"])]


def _unpack_q3_k(raw: Tensor) -> Fields:
    mask, codes, low, high, half = torch.split(raw, [32, 64, 8, 4, 2], 1)
    codes = from_pairs(codes) | (planes(mask, 1).flatten(1) << 2)
    scales = planes(low, 4).flatten(1) | (planes(high, 2).flatten(1) << 4)
    return centred(codes, 4), {"d": as_halves(half), "scales": centred(scales, 32)}


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
    return joined_planes(codes.view(-1, 4, 2, 32), 4).flatten(1)


def _pack_q4_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    halves = [as_bytes(parameters["d"]), as_bytes(parameters["dmin"])]
    return [*halves, _pack_six_bits(parameters), _low_nibbles(codes)]


def _unpack_q4_k(raw: Tensor) -> Fields:
    halves = as_halves(raw[:, :4])
    parameters = {"d": halves[:, :1], "dmin": halves[:, 1:]} | _unpack_six_bits(raw[:, 4:16])
    return planes(raw[:, 16:].reshape(-1, 4, 32), 4).flatten(1), parameters


def _pack_q5_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    *head, low = _pack_q4_k(codes, parameters)
    return [*head, joined_planes((codes >> 4).view(-1, 8, 32), 1), low]


def _unpack_q5_k(raw: Tensor) -> Fields:
    low, parameters = _unpack_q4_k(torch.cat([raw[:, :16], raw[:, 48:]], 1))
    return low | (planes(raw[:, 16:48], 1).flatten(1) << 4), parameters


def _pack_q6_k(codes: Tensor, parameters: Parameters) -> list[Tensor]:
    codes = offset(codes, 32)
    low = joined_planes(codes.view(-1, 2, 2, 64), 4).flatten(1)
    high = joined_planes((codes >> 4).view(-1, 2, 4, 32), 2).flatten(1)
    return [low, high, as_bytes(parameters["scales"]), as_bytes(parameters["d"])]


def _unpack_q6_k(raw: Tensor) -> Fields:
    low, high, scales, half = torch.split(raw, [128, 64, 16, 2], 1)
    codes = planes(low.reshape(-1, 2, 64), 4).flatten(1)
    codes = codes | (planes(high.reshape(-1, 2, 32), 2).flatten(1) << 4)
    return centred(codes, 32), {
        "d": as_halves(half),
        "scales": scales.contiguous().view(torch.int8),
    }


K_QUANTS: Mapping[str, BlockLayout] = {
    "q2_k": (_pack_q2_k, _unpack_q2_k),
    "q3_k": (_pack_q3_k, _unpack_q3_k),
    "q4_k": (_pack_q4_k, _unpack_q4_k),
    "q5_k": (_pack_q5_k, _unpack_q5_k),
    "q6_k": (_pack_q6_k, _unpack_q6_k),
}
