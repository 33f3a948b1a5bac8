"""For each vector of digits that is no point of a lattice, the points nearest to it: where ggml's search looks.

A vector of digits is a number, its key (base 3, of the 4-vectors base 8). For each key that is a point there is its
place; for each other one a run of points in the first few shells around it, by distance, then by place. Runs are
padded to a multiple of `LANES` with their last point, and lie digit by digit, so that one vector instruction measures
many points; in bytes, since they do not fit the cache otherwise.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from quantforge.packers.lattices.lattice_points import digits
from quantforge.packers.lattices.lattice_types import LATTICES

LANES = 8
_SHELLS = {"iq1_s": 3, "iq1_m": 3, "iq2_s": 1, "iq2_xxs": 2, "iq2_xs": 2, "iq3_xxs": 2, "iq3_s": 3}


class Neighbours(NamedTuple):
    """Where to look.

    Attributes:
        place: int32 ``[keys]``, of the point that a key is, or -1.
        begin: int32 ``[keys]``, of the run of a key, in points.
        many: int32 ``[keys]``, points of the run without padding.
        near: int8 ``[width * points]``: digit ``i`` of point ``j`` of a run is at ``width * begin + i * padded + j``.
            Digits are counted from the middle of ternary points, and by odd numbers of the others, as ggml does.
        places: int32 ``[points]``, the place of each in the table.
        digits: uint8 ``[points of the table, width]``.
    """

    place: NDArray[numpy.int32]
    begin: NDArray[numpy.int32]
    many: NDArray[numpy.int32]
    near: NDArray[numpy.int8]
    places: NDArray[numpy.int32]
    digits: NDArray[numpy.uint8]


@cache
def neighbours(grid: str) -> Neighbours:
    """Return the neighbours of all keys of a type."""
    lattice, table = LATTICES[grid], digits(grid).astype(numpy.int64)
    base, width = len(lattice.values), lattice.width
    powers = base ** numpy.arange(width)
    keys = base**width
    place = numpy.full(keys, -1, numpy.int32)
    place[table @ powers] = numpy.arange(len(table), dtype=numpy.int32)
    missing = numpy.flatnonzero(place < 0)
    vectors = missing[:, None] // powers % base
    # Products of small integers are exact in float32.
    squared = numpy.float32(4) * (
        (vectors**2).sum(1)[:, None]
        + (table**2).sum(1)[None]
        - 2 * (vectors.astype(numpy.float32) @ table.T.astype(numpy.float32))
    ).astype(numpy.float32)
    reach = numpy.full(len(missing), -1, numpy.float32)
    for _ in range(_SHELLS[grid]):
        beyond = numpy.where(squared > reach[:, None], squared, numpy.inf).min(1)
        reach = numpy.where(numpy.isfinite(beyond), beyond, reach).astype(numpy.float32)
    row, column = numpy.nonzero(squared <= reach[:, None])
    order = numpy.lexsort((column, squared[row, column], row))
    row, column = row[order], column[order]
    have = numpy.bincount(row, minlength=len(missing))
    padded = -(-have // LANES) * LANES
    first = numpy.cumsum(padded) - padded
    index = numpy.empty(padded.sum(), numpy.int32)
    near = numpy.empty(width * len(index), numpy.int8)
    odd = (2 * table + 1 if lattice.signs else table - 1).astype(numpy.int8)
    taken = numpy.cumsum(have) - have
    for run, (begin, size, total) in enumerate(zip(first, have, padded, strict=True)):
        mine = column[taken[run] : taken[run] + size]
        index[begin : begin + size] = mine
        index[begin + size : begin + total] = mine[-1]
        lying = near[width * begin : width * (begin + total)].reshape(width, total)
        lying[:, :size], lying[:, size:] = odd[mine].T, odd[mine[-1:]].T
    start, count = numpy.zeros(keys, numpy.int32), numpy.zeros(keys, numpy.int32)
    start[missing], count[missing] = first, have
    return Neighbours(place, start, count, near, index, digits(grid))
