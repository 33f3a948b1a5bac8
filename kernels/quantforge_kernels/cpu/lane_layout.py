"""Packed integers as the programs of `cpu` read them: their layout, its forms, and the words of a call.

Tiles of rows lie side by side, one row per lane of a vector. A tile is as many rows as a vector has 32-bit lanes (8 or
16). Codes are split into planes as in `layout` (6 bits are 4 + 2), and a plane of width ``w`` is a matrix ``[tiles,
words, lanes]`` of 32-bit words, read from the first to the last; word ``j`` of a row holds ``32 / w`` columns, the next
ones:

    bits [w f, w f + w) of its byte b   hold   column  j 32 / w + 4 f + b

so that field ``f`` of all four bytes is four neighbours. Seen as two halves, the same word gives the columns 0 and 2
of such four, and then 1 and 3: `IN_PAIRS`. Parameters are ``[tiles, groups, lanes]``.
Missing rows, and columns up to a whole `Blocks.unit`, are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

LONGEST_BLOCK = 64  # 128 would fit a 32-bit sum of products of 8 and 16 bits, but LLVM does worse by the longer loop
LONGEST_UNIT = 512
IN_PAIRS = (0, 2, 1, 3)  # of four columns: the order in which fields of 16 bits give them


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of the pieces into which the columns of a row are cut.

    Attributes:
        lanes: rows of a tile.
        block: columns of a sum of integers; divides the group.
        unit: columns that are worked off at a time: whole blocks, and whole words of every plane.
        in_group: blocks of a group; 0 where a row has one group.
        in_super: blocks of a superblock; 0 where there is none.
    """

    lanes: int
    block: int
    unit: int
    in_group: int
    in_super: int


# Words of a call, by place, after FIRST, LAST, THREADS and ROWS: `packed_integers` fills them in, `integer_programs`
# reads them.
X, X_CODES, X_SCALES, X_SUMS, OUT = range(4, 9)  # addresses
COLUMNS, UNITS, GROUPS, TILES = range(9, 13)  # counts; tiles of a row of OUT
STRIP = 13  # rows that stay in a cache while all tiles pass
CODES = 14  # addresses of up to three planes
SCALES = 17  # addresses of the parameters, in the order of PARAMETERS
OWNERS, EACH = (
    22,
    23,
)  # of grouped products: address of the pairs' owners; how many owners a row has
# Rows of a program that reads weights from memory once; one of more takes them out of a cache, and all its registers.
FEW = 4
PARAMETERS = ("scales", "zeros", "mins", "d", "dmin")


@dataclass(frozen=True, slots=True)
class Form:
    """Form of packed integers that a program is made for.

    Attributes:
        blocks: how columns are cut.
        widths: of the planes of a code, see `lane_layout`.
        zero: ``centre``, ``zeros`` or ``mins``.
        centre: the code that stands for 0 where ``zero`` says so.
        stored: types of `PARAMETERS`, as far as they are there.
        dtype: of activations and results.
        rows: of activations that are multiplied at a time.
        feature: one of `features.FEATURES`.
        pairs: the lower level is two integers of 4 bits to a byte.
        input_bits: of the integers to which activations are rounded, 16 or 8.
    """

    blocks: Blocks
    widths: tuple[int, ...]
    zero: str
    centre: int
    stored: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    rows: int
    feature: str
    pairs: bool = False
    input_bits: int = 16


def words_of(width: int, columns: int) -> int:
    """Return the words of a plane that so many columns of a row fill."""
    return -(-columns // (32 // width))


def in_pairs(lanes: int) -> list[int]:
    """Return the columns of so many neighbours in the order in which fields of 16 bits give them."""
    return [first + one for first in range(0, lanes, 4) for one in IN_PAIRS]


def pair_of(column: int) -> tuple[int, int]:
    """Return the pair of a column, by the order in which words give pairs, and whether it is in the upper half."""
    place = IN_PAIRS.index(column % 4)
    return column // 4 * 2 + place // 2, place % 2


def cut(
    widths: tuple[int, ...],
    columns: int,
    group: int,
    superblock: int,
    lanes: int,
    *,
    pairs: bool = False,
) -> Blocks | None:
    """Return how columns are cut, or None where no block of whole vectors divides the group.

    ``pairs``: two groups share a byte of parameters, so that a unit has to hold both.
    """
    sizes = range(LONGEST_BLOCK, 0, -lanes)
    block = next((size for size in sizes if group % size == 0), 0)
    unit = lcm(block, 32 // min(widths))
    if pairs:
        unit = lcm(unit, 2 * block)
    if not block or unit > LONGEST_UNIT or (pairs and block < group):
        return None
    return Blocks(
        lanes, block, unit, 0 if group >= columns else group // block, superblock // block
    )


def to_lanes(codes: Tensor, widths: tuple[int, ...], blocks: Blocks) -> list[Tensor]:
    """Lay uint8 codes ``[out, in]`` out as one int32 tensor ``[tiles, words, lanes]`` per plane."""
    rows, columns = codes.shape
    padding = (0, -columns % blocks.unit, 0, -rows % blocks.lanes)
    padded = torch.nn.functional.pad(codes, padding)
    planes, low = [], 0
    for width in widths:
        fields = 8 // width
        part = (padded >> low) & (2**width - 1)
        part = part.view(-1, blocks.lanes, padded.shape[1] // (4 * fields), fields, 4)
        words = torch.zeros(part.shape[:3], dtype=torch.int32, device=codes.device)
        for field in range(fields):
            for octet in range(4):
                words |= part[..., field, octet].int() << (width * field + 8 * octet)
        planes.append(words.transpose(1, 2).contiguous())
        low += width
    return planes


def tiled(parameter: Tensor, lanes: int, groups: int) -> Tensor:
    """Lay ``[out, groups]`` out as ``[tiles, groups, lanes]``, padded with zeros."""
    rows, given = parameter.shape
    padded = torch.nn.functional.pad(parameter, (0, groups - given, 0, -rows % lanes))
    return padded.view(-1, lanes, groups).transpose(1, 2).contiguous()
