"""Fields of ggml's blocks: codes of a few bits joined to bytes and taken apart again.

Codes are laid out so that one vector instruction unpacks many: a byte never holds neighbours, but weights half a block,
or 32, apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]
Fields = tuple[Tensor, dict[str, Tensor]]  # codes [..., columns] and parameters [..., groups]
BlockLayout = tuple[Callable[[Tensor, Parameters], list[Tensor]], Callable[[Tensor], Fields]]


def as_bytes(values: Tensor) -> Tensor:
    """Return the bytes of ``values``."""
    return values.contiguous().view(torch.uint8)


def as_halves(raw: Tensor) -> Tensor:
    """Return the float16 numbers that bytes hold."""
    return raw.contiguous().view(torch.float16)


def planes(raw: Tensor, bits: int) -> Tensor:
    """Split each byte ``[..., n]`` into ``8 / bits`` codes ``[..., 8 / bits, n]``, lowest bits first."""
    shifts = torch.arange(0, 8, bits, device=raw.device, dtype=torch.uint8)
    return (raw.unsqueeze(-2) >> shifts.unsqueeze(1)) & ((1 << bits) - 1)


def joined_planes(planes: Tensor, bits: int) -> Tensor:
    """Undo `planes`: ``[..., 8 / bits, n]`` to bytes ``[..., n]``; higher bits of the codes are cut off."""
    codes = (planes & ((1 << bits) - 1)).contiguous()
    if codes.shape[-1] % 8 == 0:  # eight bytes at once: what is shifted stays inside of its byte
        codes = codes.view(torch.int64)
    joined = codes[..., 0, :].clone()
    for index in range(1, planes.shape[-2]):
        joined |= codes[..., index, :] << (bits * index)
    return joined.view(torch.uint8)


def joined_bits(ones: Tensor) -> Tensor:
    """Join ``[blocks, 8 n]`` of 0 and 1 to bytes ``[blocks, n]``, the first in the lowest bit."""
    # Byte ``i`` of a word, times ``2^(56 - 7 i)``, is bit ``i`` of its highest byte.
    return ((ones.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)


def nibbles(codes: Tensor) -> Tensor:
    """Join codes ``[blocks, 32 n]`` to bytes ``[blocks, 16 n]``: codes ``j`` and ``j + 16`` of each 32 share a byte."""
    pairs = codes.view(torch.int64).view(len(codes), -1, 2, 2)  # eight bytes at once
    return (pairs[:, :, 1] << 4).bitwise_or_(pairs[:, :, 0]).flatten(1).view(torch.uint8)


def from_nibbles(raw: Tensor) -> Tensor:
    """Undo `nibbles`."""
    return planes(raw.reshape(len(raw), -1, 16), 4).flatten(1)


def offset(codes: Tensor, middle: int) -> Tensor:
    """Shift signed codes to the unsigned ones that are stored."""
    return (codes + middle).view(torch.uint8)


def centred(codes: Tensor, middle: int) -> Tensor:
    """Undo `offset`."""
    return codes.view(torch.int8) - middle


def pairs(codes: Tensor) -> Tensor:
    """Join the low two bits of codes: in each half of a block, four codes that are 32 apart share a byte."""
    return joined_planes(codes.view(-1, 2, 4, 32), 2).flatten(1)


def from_pairs(raw: Tensor) -> Tensor:
    """Undo `pairs`."""
    return planes(raw.reshape(-1, 2, 32), 2).flatten(1)
