"""Form of packed integers that a program is made for, and the words (addresses, counts) that it is called with.

The launcher, `packed_integers`, fills the words in; the programs (`integer_products`, `integer_decoding`) read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantforge_kernels.cpu.lane_layout import Blocks

# Words of the argument, by place, after FIRST, LAST, THREADS and ROWS.
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
    """Form for which a program is made.

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
