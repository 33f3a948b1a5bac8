"""Points of the lattices: the tables that codes of IQ1 to IQ3 look up.

They are facts of the format. `scripts/lattice_points.py` reads them off what `gguf.quants.dequantize` makes of blocks
that count through the codes, and writes ``points.bin``: 16 bits for a point, see there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.packers.lattices.lattice_types import LATTICES, Lattice

FILE = Path(__file__).with_name("points.bin")
STORED = (
    "iq1_s",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq3_xxs",
    "iq3_s",
)  # iq1_m has the points of iq1_s
_EIGHT = torch.arange(8, dtype=torch.int32)


def digit_values(lattice: Lattice) -> NDArray[numpy.float32]:
    """Return the values that digits of stored points stand for."""
    return numpy.array(lattice.values, numpy.float32)


@cache
def digits(grid: str) -> NDArray[numpy.uint8]:
    """Return the digits of all points, ``[points, width]``: places in `Lattice.values`."""
    name = "iq1_s" if grid == "iq1_m" else grid
    before = sum(LATTICES[other].points for other in STORED[: STORED.index(name)])
    lattice = LATTICES[name]
    numbers = numpy.fromfile(FILE, "<u2", lattice.points, offset=2 * before).astype(numpy.int64)
    base = len(lattice.values)
    return (numbers[:, None] // base ** numpy.arange(lattice.width) % base).astype(numpy.uint8)


@cache
def points(grid: str) -> NDArray[numpy.float32]:
    """Return all points, float32 ``[points, width]``, without signs and shift."""
    return digit_values(LATTICES[grid])[digits(grid)]


def values_of(codes: Tensor, grid: str) -> Tensor:
    """Return what ``codes`` ``[..., n]`` stand for in units of the step, float32 ``[..., n * columns]``.

    The shift of a group (iq1_s) is not in it.
    """
    lattice, codes = LATTICES[grid], codes.int()
    table = torch.from_numpy(points(grid)).to(codes.device)
    places = _EIGHT[: lattice.vectors].to(codes.device) * lattice.index_bits
    index = (codes.unsqueeze(-1) >> places) & (lattice.points - 1)
    values = table[index.long()].flatten(-2)
    above = codes.unsqueeze(-1) >> lattice.sign_place
    if lattice.signs:
        negative = (above >> _EIGHT[: lattice.columns].to(codes.device)) & 1
        values = torch.where(negative.bool(), -values, values)
    elif lattice.shifts_codes:
        values = values + torch.where(above.bool(), -lattice.shift, lattice.shift)
    return values.flatten(-2)
