"""Points of the lattices: the tables that codes look up, and tables made of them in which nearest points are found.

The points are facts of the format. `scripts/lattice_points.py` reads them off what `gguf.quants.dequantize` makes of
blocks that count through the codes, and writes ``points.bin``: 16 bits for a point, its digits (places in
`Lattice.values`, the first weight lowest) in base 3, or base 8 for points of 4 weights.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.packers.lattices import LATTICES

POINTS_FILE = Path(__file__).with_name("points.bin")
STORED_TYPES = (
    "iq1_s",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq3_xxs",
    "iq3_s",
)  # iq1_m has the points of iq1_s
LANES = 8  # points that one vector instruction measures
# How many of the shells of points around a vector of digits its neighbours are.
_SHELLS = {"iq1_s": 3, "iq1_m": 3, "iq2_s": 1, "iq2_xxs": 2, "iq2_xs": 2, "iq3_xxs": 2, "iq3_s": 3}
_RANGE_8 = torch.arange(8, dtype=torch.int32)


def digit_values(grid: str) -> NDArray[numpy.float32]:
    """Return the values that digits of points stand for."""
    return numpy.array(LATTICES[grid].values, numpy.float32)


@cache
def point_digits(grid: str) -> NDArray[numpy.uint8]:
    """Return the digits of all points, ``[points, width]``."""
    name = "iq1_s" if grid == "iq1_m" else grid
    before = sum(LATTICES[other].points for other in STORED_TYPES[: STORED_TYPES.index(name)])
    lattice = LATTICES[name]
    numbers = numpy.fromfile(POINTS_FILE, "<u2", lattice.points, offset=2 * before).astype(
        numpy.int64
    )
    base = len(lattice.values)
    return (numbers[:, None] // base ** numpy.arange(lattice.width) % base).astype(numpy.uint8)


@cache
def lattice_points(grid: str) -> NDArray[numpy.float32]:
    """Return all points, float32 ``[points, width]``, without signs and shift."""
    return digit_values(grid)[point_digits(grid)]


def decode_values(codes: Tensor, grid: str) -> Tensor:
    """Return the values of ``codes`` ``[..., n]`` in units of the step, float32 ``[..., n * columns]``.

    The shift of a group (iq1_s) is not included.
    """
    lattice, codes = LATTICES[grid], codes.int()
    table = torch.from_numpy(lattice_points(grid)).to(codes.device)
    places = _RANGE_8[: lattice.vectors].to(codes.device) * lattice.index_bits
    index = (codes.unsqueeze(-1) >> places) & (lattice.points - 1)
    values = table[index.long()].flatten(-2)
    above = codes.unsqueeze(-1) >> lattice.sign_place
    if lattice.signs:
        negative = (above >> _RANGE_8[: lattice.columns].to(codes.device)) & 1
        values = torch.where(negative.bool(), -values, values)
    elif lattice.shifts_codes:
        values = values + torch.where(above.bool(), -lattice.shift, lattice.shift)
    return values.flatten(-2)


class NeighborLists(NamedTuple):
    """For each vector of digits that is not a point, the points nearest to it: where ggml searches.

    A vector of digits is a number, its key. For each key that is not a point there is a run of points: those in the
    first few shells around it, by distance, then by place. Runs are padded to a multiple of `LANES` with their last
    point, and stored digit by digit, so that one vector instruction measures many points; in bytes, since they would
    not fit in the cache otherwise.

    Attributes:
        place: int32 ``[keys]``, of the point that a key is, or -1.
        begin: int32 ``[keys]``, of the run of a key, in points.
        many: int32 ``[keys]``, points of the run without padding.
        near: int8 ``[width * points]``: digit ``i`` of point ``j`` of a run is at ``width * begin + i * padded + j``.
            Ternary digits are counted from the middle, others as odd numbers, as ggml counts.
        places: int32 ``[points]``, the place of each in the table.
    """

    place: NDArray[numpy.int32]
    begin: NDArray[numpy.int32]
    many: NDArray[numpy.int32]
    near: NDArray[numpy.int8]
    places: NDArray[numpy.int32]


@cache
def neighbor_lists(grid: str) -> NeighborLists:
    """Return the neighbours of all keys of a type."""
    lattice, table = LATTICES[grid], point_digits(grid).astype(numpy.int64)
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
    return NeighborLists(place, start, count, near, index)


class PointHalves(NamedTuple):
    """Halves of the digits of points, by which the nearest point is found without measuring all of them.

    The row of a first half has a lane for each second half: 64 for two of eight digits, 3 runs of 32 (27 are used) for
    four of three digits.

    Attributes:
        allowed: float32 ``[point_halves * point_halves]``, 0 where two halves are a point, else infinity.
        point: int32 ``[point_halves * point_halves]``: the place of the point in the table, or -1.
        powers: float32 ``[16]``, twice for 8 digits: what each adds to the place in `point`, 0 of other points.
        patterns: float32, of halves with three values: where each of the first three digits is 1, and where 2, then
            infinity where lanes are not a half.
    """

    allowed: NDArray[numpy.float32]
    point: NDArray[numpy.int32]
    powers: NDArray[numpy.float32]
    patterns: NDArray[numpy.float32]


@cache
def point_halves(grid: str) -> PointHalves:
    """Return the halves of the points of a type."""
    lattice = LATTICES[grid]
    base, width = len(lattice.values), lattice.width
    steps = numpy.array([1, 3, 9, 32] if base == 3 else [1, 8])
    count = 96 if base == 3 else 64
    powers = numpy.concatenate([steps * count, steps])
    point = numpy.full(count * count, -1, numpy.int32)
    point[point_digits(grid).astype(numpy.int64) @ powers] = numpy.arange(lattice.points)
    allowed = numpy.where(point < 0, numpy.float32(numpy.inf), numpy.float32(0))
    spare = numpy.zeros(8 - width)
    both = numpy.concatenate([powers, spare, spare, powers])
    lanes = numpy.arange(32)
    ones = [lanes // 3**i % 3 == digit for i in range(3) for digit in (1, 2)]
    patterns = numpy.array([*ones, lanes], numpy.float32)
    patterns[6] = numpy.where(lanes < 27, 0, numpy.inf)
    return PointHalves(
        allowed.astype(numpy.float32), point, both.astype(numpy.float32), patterns.ravel()
    )
