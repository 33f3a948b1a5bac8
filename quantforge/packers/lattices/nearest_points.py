"""Nearest points of a lattice, with signs, for vectors of many rows: callers of `diagonal_loops` and `vector_loops`.

Under a diagonal metric each sign is that of its weight, where all signs are free; where their number must be even, the
cheapest is turned. Under a whole one (error feedback) turning a sign can pay, so that a few choices are tried, each
with all points.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from quantforge.packers.lattices.halves import halves
from quantforge.packers.lattices.lattice_points import digit_values, points
from quantforge.packers.lattices.lattice_types import LATTICES

Array = NDArray[numpy.float32]


def weights(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return weights of errors as ggml has them: ``importance * sqrt(mean x^2 + x^2)``, the mean of 256 columns."""
    from quantforge.packers.lattices import weight_loops

    columns = weight.shape[1]
    known = torch.ones(columns) if importance is None else importance
    if columns % 256 == 0:
        found = numpy.empty((weight.numel() // 256, 256), numpy.float32)
        by_block = array(known).reshape(-1, 256)
        weight_loops.weigh(
            array(weight).reshape(found.shape), by_block, False, numpy.float32(0), found
        )
        return torch.from_numpy(found).view(weight.shape).to(weight.device)
    squares = weight.square()  # of a toy
    return (squares.mean(1, keepdim=True) + squares).sqrt() * known.to(weight)


def nearest_diagonal(
    weight: Tensor, step: Tensor, shift: Tensor | None, grid: str, weighted: Tensor
) -> Tensor:
    """Return codes of ``weight`` ``[rows, n]``, whose errors have weights of the same shape.

    Steps have the same shape too, or one for each 8 columns, as shifts have.
    """
    from quantforge.packers.lattices import diagonal_loops

    lattice, rows = LATTICES[grid], len(weight)
    parts, spare = [weight, weighted, step], -weight.shape[1] % 8
    if spare:
        parts = [functional.pad(part, (0, spare)) for part in parts]
    x, w, s = (array(part) for part in parts)
    s = s.reshape(-1, 8 if s.size == x.size else 1)
    x, w = x.reshape(-1, 8), w.reshape(-1, 8)
    lowered = (
        torch.empty(0, dtype=torch.int64)
        if shift is None
        else (shift[:, :: 8 * shift.shape[1] // weight.shape[1]] < 0).flatten().long().cpu()
    )
    many = 8 // lattice.columns
    codes = numpy.empty((len(x), many), numpy.int32)
    signed, even = bool(lattice.signs), lattice.signs == "even"
    form = (signed, even, lattice.shifts_codes, lattice.index_bits, many)
    diagonal_loops.nearest(x, w, s, lowered.numpy(), both_shifts(grid), form, tables(grid), codes)
    found = torch.from_numpy(codes).view(rows, -1)[:, : weight.shape[1] // lattice.columns]
    return found.to(weight.device)


@cache
def tables(grid: str) -> tuple[Any, ...]:
    """Return a tuple as long as there are digits, their values and the tables of `halves`."""
    values = digit_values(LATTICES[grid])
    return ((0,) * len(values), values, *halves(grid))


@cache
def both_shifts(grid: str) -> Array:
    """Return the shifts that a code can have, up and down, float32 ``[2, 8]``."""
    raised = LATTICES[grid].shift
    return numpy.repeat(numpy.array([[raised], [-raised]], numpy.float32), 8, 1)


def nearest_metric(
    targets: Tensor, step: Tensor, shift: Tensor | None, grid: str, root: Tensor
) -> Tensor:
    """Return codes ``[rows, 1]`` near ``targets`` ``[rows, v]``, steps and shifts ``[rows]``; see `packer.nearest`."""
    from quantforge.packers.lattices import vector_loops

    lattice = LATTICES[grid]
    metric = array(root.double() @ root.double().T)
    width = lattice.width
    marginal = metric[:width, :width]
    if lattice.vectors > 1:
        cross, rest = metric[:width, width:], metric[width:, width:]
        marginal = marginal - cross @ numpy.linalg.solve(rest.astype(numpy.float64), cross.T)
    moved = torch.zeros_like(step) if shift is None else shift
    codes = numpy.empty(len(targets), numpy.int32)
    arrays = tuple(array(part) for part in (targets, step, moved))
    vector_loops.whole(
        *arrays, points(grid), _form(grid), numpy.float32(lattice.shift), metric,
        numpy.ascontiguousarray(marginal, numpy.float32), codes,
    )  # fmt: skip
    return torch.from_numpy(codes).unsqueeze(1).to(targets.device)


def _form(grid: str) -> tuple[int, int, int, bool, bool, bool]:
    """Return width of a point, points of a code, bits of a place; whether there are signs, even ones, two shifts."""
    lattice = LATTICES[grid]
    signed, even = bool(lattice.signs), lattice.signs == "even"
    return lattice.width, lattice.vectors, lattice.index_bits, signed, even, lattice.shifts_codes


def array(part: Tensor) -> Array:
    """Return ``part`` as contiguous float32."""
    found: Array = part.detach().cpu().float().contiguous().numpy()
    return found
