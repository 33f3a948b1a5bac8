"""The points of each lattice, and tables in which nearest points are found.

The points are facts of the format. `scripts/lattice_points.py` reads them off what `gguf.quants.dequantize` makes of
blocks that enumerate the codes, and writes ``points.bin``: 16 bits per point, its digits (indices into
`Lattice.magnitudes`, the first weight lowest) in base 3, or in base 8 for points of 4 weights.
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
# iq1_m has the points of iq1_s.
STORED_TYPES = ("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
LANES = 8  # points measured by one vector instruction
# The number of smallest distances at which points are neighbors of a vector of digits.
_SHELLS = {"iq1_s": 3, "iq1_m": 3, "iq2_s": 1, "iq2_xxs": 2, "iq2_xs": 2, "iq3_xxs": 2, "iq3_s": 3}
_RANGE_8 = torch.arange(8, dtype=torch.int32)


def digit_values(grid: str) -> NDArray[numpy.float32]:
    """Return the values that the digits of points stand for."""
    return numpy.array(LATTICES[grid].magnitudes, numpy.float32)


@cache
def point_digits(grid: str) -> NDArray[numpy.uint8]:
    """Return the digits of all points, ``[points, width]``."""
    name = "iq1_s" if grid == "iq1_m" else grid
    points_before = sum(
        LATTICES[other].num_points for other in STORED_TYPES[: STORED_TYPES.index(name)]
    )
    lattice = LATTICES[name]
    numbers = numpy.fromfile(
        POINTS_FILE, "<u2", lattice.num_points, offset=2 * points_before
    ).astype(numpy.int64)
    base = len(lattice.magnitudes)
    return (numbers[:, None] // base ** numpy.arange(lattice.width) % base).astype(numpy.uint8)


@cache
def lattice_points(grid: str) -> NDArray[numpy.float32]:
    """Return all points without signs and shift, float32 ``[points, width]``."""
    return digit_values(grid)[point_digits(grid)]


def decode_values(codes: Tensor, grid: str) -> Tensor:
    """Return the values of ``codes`` ``[..., n]`` in units of the step, float32 ``[..., n * weights_per_code]``.

    The shift of a group (iq1_s) is not included.
    """
    lattice, codes = LATTICES[grid], codes.int()
    table = torch.from_numpy(lattice_points(grid)).to(codes.device)
    index_shifts = _RANGE_8[: lattice.points_per_code].to(codes.device) * lattice.index_bits
    index = (codes.unsqueeze(-1) >> index_shifts) & (lattice.num_points - 1)
    values = table[index.long()].flatten(-2)
    sign_bits = codes.unsqueeze(-1) >> lattice.sign_shift
    if lattice.signs:
        negative = (sign_bits >> _RANGE_8[: lattice.weights_per_code].to(codes.device)) & 1
        values = torch.where(negative.bool(), -values, values)
    elif lattice.shift_per_code:
        values = values + torch.where(sign_bits.bool(), -lattice.shift_size, lattice.shift_size)
    return values.flatten(-2)


class NeighborLists(NamedTuple):
    """For each vector of digits that is not a point, the points nearest to it: the candidates of ggml's search.

    A vector of digits, read as a number, is called its key. For each key that is not a point there is a run of points:
    those at the few smallest distances from it, ordered by distance, then by index. Runs are padded to a multiple of
    `LANES` with their last point, and stored digit by digit, so that one vector instruction measures many points; as
    bytes, since they would not fit in the cache otherwise.

    Attributes:
        point_of_key: int32 ``[keys]``, the index of the point with this key, or -1.
        run_start: int32 ``[keys]``, start of the key's run, in points.
        run_length: int32 ``[keys]``, points of the run without padding.
        neighbor_digits: int8 ``[width * points]``: digit ``i`` of point ``j`` of a run is at
            ``width * run_start + i * padded + j``. Ternary digits are -1, 0 and 1, others the odd numbers
            ``2 digit + 1``, as in ggml.
        point_index: int32 ``[points]``, the index of each point of the runs in the table.
    """

    point_of_key: NDArray[numpy.int32]
    run_start: NDArray[numpy.int32]
    run_length: NDArray[numpy.int32]
    neighbor_digits: NDArray[numpy.int8]
    point_index: NDArray[numpy.int32]


@cache
def neighbor_lists(grid: str) -> NeighborLists:
    """Compute the `NeighborLists` of a type."""
    lattice, digits = LATTICES[grid], point_digits(grid).astype(numpy.int64)
    base, width = len(lattice.magnitudes), lattice.width
    powers = base ** numpy.arange(width)
    keys = base**width
    point_of_key = numpy.full(keys, -1, numpy.int32)
    point_of_key[digits @ powers] = numpy.arange(len(digits), dtype=numpy.int32)
    off_grid_keys = numpy.flatnonzero(point_of_key < 0)
    vectors = off_grid_keys[:, None] // powers % base
    # Products of small integers are exact in float32.
    distances = numpy.float32(4) * (
        (vectors**2).sum(1)[:, None]
        + (digits**2).sum(1)[None]
        - 2 * (vectors.astype(numpy.float32) @ digits.T.astype(numpy.float32))
    ).astype(numpy.float32)
    max_distances = numpy.full(len(off_grid_keys), -1, numpy.float32)
    for _ in range(_SHELLS[grid]):
        next_shell = numpy.where(distances > max_distances[:, None], distances, numpy.inf).min(1)
        max_distances = numpy.where(numpy.isfinite(next_shell), next_shell, max_distances).astype(
            numpy.float32
        )
    row, column = numpy.nonzero(distances <= max_distances[:, None])
    order = numpy.lexsort((column, distances[row, column], row))
    row, column = row[order], column[order]
    run_lengths = numpy.bincount(row, minlength=len(off_grid_keys))
    padded_lengths = -(-run_lengths // LANES) * LANES
    run_starts = numpy.cumsum(padded_lengths) - padded_lengths
    point_index = numpy.empty(padded_lengths.sum(), numpy.int32)
    neighbor_digits = numpy.empty(width * len(point_index), numpy.int8)
    odd_digits = (2 * digits + 1 if lattice.signs else digits - 1).astype(numpy.int8)
    pair_starts = numpy.cumsum(run_lengths) - run_lengths
    for key_index, (run_start, run_length, padded_length) in enumerate(
        zip(run_starts, run_lengths, padded_lengths, strict=True)
    ):
        run_points = column[pair_starts[key_index] : pair_starts[key_index] + run_length]
        point_index[run_start : run_start + run_length] = run_points
        point_index[run_start + run_length : run_start + padded_length] = run_points[-1]
        run_digits = neighbor_digits[
            width * run_start : width * (run_start + padded_length)
        ].reshape(width, padded_length)
        run_digits[:, :run_length], run_digits[:, run_length:] = (
            odd_digits[run_points].T,
            odd_digits[run_points[-1:]].T,
        )
    starts_by_key, lengths_by_key = numpy.zeros(keys, numpy.int32), numpy.zeros(keys, numpy.int32)
    starts_by_key[off_grid_keys], lengths_by_key[off_grid_keys] = run_starts, run_lengths
    return NeighborLists(point_of_key, starts_by_key, lengths_by_key, neighbor_digits, point_index)


class PointHalves(NamedTuple):
    """Tables to find the nearest point by halves of its digits, without measuring all points.

    Sums for the second halves are stored in lanes: 64 for two of eight digits, 3 runs of 32 (27 are used) for four of
    three digits.

    Attributes:
        allowed: float32 ``[halves * halves]``, 0 if two halves form a point, else infinity.
        point_of_key: int32 ``[halves * halves]``: the index of the point in the table, or -1.
        key_weights: float32 ``[16]``, once or twice 8 digits: what each digit adds to the position in `point_of_key`; 0
            for digits of the other point.
        patterns: float32, for halves with three values: where each of the first three digits is 1, and where 2, then
            infinity where lanes are not a half.
    """

    allowed: NDArray[numpy.float32]
    point_of_key: NDArray[numpy.int32]
    key_weights: NDArray[numpy.float32]
    patterns: NDArray[numpy.float32]


@cache
def point_halves(grid: str) -> PointHalves:
    """Compute the `PointHalves` of a type."""
    lattice = LATTICES[grid]
    base, width = len(lattice.magnitudes), lattice.width
    steps = numpy.array([1, 3, 9, 32] if base == 3 else [1, 8])
    num_lanes = 96 if base == 3 else 64
    powers = numpy.concatenate([steps * num_lanes, steps])
    point_of_key = numpy.full(num_lanes * num_lanes, -1, numpy.int32)
    point_of_key[point_digits(grid).astype(numpy.int64) @ powers] = numpy.arange(lattice.num_points)
    half_penalties = numpy.where(point_of_key < 0, numpy.float32(numpy.inf), numpy.float32(0))
    padding = numpy.zeros(8 - width)
    all_powers = numpy.concatenate([powers, padding, padding, powers])
    lanes = numpy.arange(32)
    digit_masks = [lanes // 3**i % 3 == digit for i in range(3) for digit in (1, 2)]
    patterns = numpy.array([*digit_masks, lanes], numpy.float32)
    patterns[6] = numpy.where(lanes < 27, 0, numpy.inf)
    return PointHalves(
        half_penalties.astype(numpy.float32),
        point_of_key,
        all_powers.astype(numpy.float32),
        patterns.ravel(),
    )
