"""Tables of the halves of points, by which the nearest one is found without measuring all of them.

The digits of a point are two halves. The error of each half for all its digits is a row of sums, and for a first half
the second ones that make a point of the lattice are a row of zeros among infinities. First halves that cannot win with
the best of all second halves are left out, which are most.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from quantforge.packers.lattices.lattice_points import digits
from quantforge.packers.lattices.lattice_types import LATTICES

Array = NDArray[numpy.float32]


class Halves(NamedTuple):
    """Halves of the points of a lattice; the row of a half has `rows` runs of as many lanes for its last digit.

    Attributes:
        allowed: float32 ``[halves * halves]``, 0 where two halves are a point, else infinity.
        point: int32 ``[halves * halves]``: the place of the point in the table, or -1.
        powers: float32 ``[16]``, twice for 8 digits: what each adds to the place in `point`, 0 of other points.
        patterns: float32, of halves with three values: where each of the first three digits is 1, and where 2, then
            infinity where lanes are no half.
    """

    allowed: Array
    point: NDArray[numpy.int32]
    powers: Array
    patterns: Array


@cache
def halves(grid: str) -> Halves:
    """Return the halves of the points of a type."""
    lattice = LATTICES[grid]
    base, width = len(lattice.values), lattice.width
    steps = numpy.array([1, 3, 9, 32] if base == 3 else [1, 8])
    count = 96 if base == 3 else 64
    powers = numpy.concatenate([steps * count, steps])
    point = numpy.full(count * count, -1, numpy.int32)
    point[digits(grid).astype(numpy.int64) @ powers] = numpy.arange(lattice.points)
    allowed = numpy.where(point < 0, numpy.float32(numpy.inf), numpy.float32(0))
    spare = numpy.zeros(8 - width)
    both = numpy.concatenate([powers, spare, spare, powers])
    lanes = numpy.arange(32)
    ones = [lanes // 3**i % 3 == digit for i in range(3) for digit in (1, 2)]
    patterns = numpy.array([*ones, lanes], numpy.float32)
    patterns[6] = numpy.where(lanes < 27, 0, numpy.inf)
    return Halves(
        allowed.astype(numpy.float32), point, both.astype(numpy.float32), patterns.ravel()
    )
