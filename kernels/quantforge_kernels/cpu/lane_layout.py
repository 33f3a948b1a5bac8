"""Layout of packed integers for the CPU programs: one weight row per vector lane.

A tile is as many rows as a vector has 32-bit lanes (8 or
16). Codes are split into planes as in `bit_planes` (6 bits are 4 + 2), and a plane of width ``w`` is a matrix ``[tiles,
words, lanes]`` of 32-bit words, read from the first to the last. Word ``j`` of a row holds the next ``32 / w`` columns:

    bits [w f, w f + w) of its byte b   hold   column  j 32 / w + 4 f + b

so that field ``f`` of all four bytes is four neighboring columns. Read as two 16-bit halves, the same word gives
columns 0 and 2 of these four, and then 1 and 3: `PAIR_ORDER`. Parameters are ``[tiles, groups, lanes]``. Padding rows,
and columns up to a multiple of `ColumnBlocks.unit_columns`, are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

# A 32-bit sum has room for 128, but LLVM generates slower code for the longer loop
MAX_BLOCK_COLUMNS = 64
MAX_UNIT_COLUMNS = 512
PAIR_ORDER = (0, 2, 1, 3)  # of four columns: the order in which fields of 16 bits give them


@dataclass(frozen=True, slots=True)
class ColumnBlocks:
    """How the columns of a row are divided into blocks and units.

    Attributes:
        lanes: rows of a tile.
        block_columns: columns of a block, whose products are summed as integers; divides the group.
        unit_columns: columns of a unit, which is processed at once: whole blocks, and whole words of every plane.
        blocks_per_group: blocks of a group; 0 if a row has one group.
        blocks_per_superblock: blocks of a superblock; 0 if there are none.
    """

    lanes: int
    block_columns: int
    unit_columns: int
    blocks_per_group: int
    blocks_per_superblock: int


# Words of a call, by place, after FIRST, LAST, THREADS and ROWS: `packed_integers` fills them in, `integer_programs`
# reads them.
ARG_X, ARG_X_CODES, ARG_X_SCALES, ARG_X_SUMS, ARG_OUT = range(4, 9)  # addresses
# Counts; tiles of a row of OUT
ARG_COLUMNS, ARG_UNITS_PER_ROW, ARG_GROUPS, ARG_TILES = range(9, 13)
ARG_STRIP = 13  # rows that stay in a cache while all tiles pass
ARG_PLANES = 14  # addresses of up to three planes
ARG_PARAMETERS = 17  # addresses of the parameters, in the order of PARAMETERS
# For grouped products: address of the pairs' owners; how many owners a row has
ARG_EXPERTS, ARG_TOP_K = 22, 23
# Rows of a program that reads weights from memory once; one of more takes them out of a cache, and all its registers.
FEW_ROWS = 4
PARAM_NAMES = ("scales", "zeros", "mins", "d", "dmin")


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """What a program for packed integers is generated for.

    Attributes:
        blocks: how columns are divided.
        widths: bit widths of the planes of a code.
        zero_kind: ``centre`` (symmetric codes), ``zeros`` or ``mins``.
        center_code: the code of the value 0 if ``zero_kind`` is ``centre``.
        param_dtypes: types of the parameters that exist, by name (`PARAM_NAMES`).
        dtype: type of activations and results.
        shared_rows: rows of activations that are multiplied together.
        instruction_set: one of `instruction_sets.INSTRUCTION_SETS`.
        packed_nibbles: the lower level of parameters is stored as two 4-bit integers per byte.
        input_bits: bits of the integers to which activations are rounded, 16 or 8.
    """

    blocks: ColumnBlocks
    widths: tuple[int, ...]
    zero_kind: str
    center_code: int
    param_dtypes: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    shared_rows: int
    instruction_set: str
    packed_nibbles: bool = False
    input_bits: int = 16


def words_per_row(width: int, columns: int) -> int:
    """Return the number of words of a plane that ``columns`` columns of a row fill."""
    return -(-columns // (32 // width))


def paired_order(lanes: int) -> list[int]:
    """Return the order in which 16-bit fields give the columns of ``lanes`` neighbors."""
    return [first + neighbor for first in range(0, lanes, 4) for neighbor in PAIR_ORDER]


def locate_pair(column: int) -> tuple[int, int]:
    """Return the index of the 16-bit pair that holds a column, and 1 if it is in the upper half, else 0."""
    position = PAIR_ORDER.index(column % 4)
    return column // 4 * 2 + position // 2, position % 2


def choose_column_blocks(
    widths: tuple[int, ...],
    columns: int,
    group: int,
    superblock: int,
    lanes: int,
    *,
    pairs: bool = False,
) -> ColumnBlocks | None:
    """Return how columns are divided, or None if no block of whole vectors divides the group.

    ``pairs``: two groups share a byte of parameters, so that a unit has to contain both.
    """
    sizes = range(MAX_BLOCK_COLUMNS, 0, -lanes)
    block = next((size for size in sizes if group % size == 0), 0)
    unit = lcm(block, 32 // min(widths))
    if pairs:
        unit = lcm(unit, 2 * block)
    if not block or unit > MAX_UNIT_COLUMNS or (pairs and block < group):
        return None
    return ColumnBlocks(
        lanes, block, unit, 0 if group >= columns else group // block, superblock // block
    )


def pack_lanes(codes: Tensor, widths: tuple[int, ...], blocks: ColumnBlocks) -> list[Tensor]:
    """Pack uint8 codes ``[out, in]`` into one int32 tensor ``[tiles, words, lanes]`` per plane."""
    rows, columns = codes.shape
    padding = (0, -columns % blocks.unit_columns, 0, -rows % blocks.lanes)
    padded = torch.nn.functional.pad(codes, padding)
    planes, low_bit = [], 0
    for width in widths:
        fields = 8 // width
        fields_of_words = (padded >> low_bit) & (2**width - 1)
        fields_of_words = fields_of_words.view(
            -1, blocks.lanes, padded.shape[1] // (4 * fields), fields, 4
        )
        words = torch.zeros(fields_of_words.shape[:3], dtype=torch.int32, device=codes.device)
        for field in range(fields):
            for byte in range(4):
                words |= fields_of_words[..., field, byte].int() << (width * field + 8 * byte)
        planes.append(words.transpose(1, 2).contiguous())
        low_bit += width
    return planes


def tile_parameter(parameter: Tensor, lanes: int, groups: int) -> Tensor:
    """Rearrange a parameter ``[out, groups]`` to ``[tiles, groups, lanes]``, padded with zeros."""
    rows, num_groups = parameter.shape
    padded = torch.nn.functional.pad(parameter, (0, groups - num_groups, 0, -rows % lanes))
    return padded.view(-1, lanes, groups).transpose(1, 2).contiguous()
