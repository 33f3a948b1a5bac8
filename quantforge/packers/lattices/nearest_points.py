"""Nearest points of a lattice, with signs, for vectors of many rows: the callers of `vector_loops`.

Under a diagonal metric each sign is that of its weight, where all signs are free; where their number must be even, the
cheapest is turned. Under a whole one (error feedback) turning a sign can pay, so that a few choices are tried, each
with all points.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from quantforge.packers.lattices import vector_loops
from quantforge.packers.lattices.lattice_points import points
from quantforge.packers.lattices.lattice_types import LATTICES


def weights(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return weights of errors as ggml has them: ``importance * sqrt(mean x^2 + x^2)``, the mean of 256 columns."""
    squares = weight.square()
    blocks = squares.view(len(weight), -1, min(256, weight.shape[1]))
    mean = blocks.mean(2, keepdim=True).expand_as(blocks).reshape(weight.shape)
    found = (mean + squares).sqrt()
    return found if importance is None else found * importance


def nearest_diagonal(
    weight: Tensor, step: Tensor, shift: Tensor | None, grid: str, weighted: Tensor
) -> Tensor:
    """Return codes of ``weight`` ``[rows, n]``; steps, shifts and weights of errors have the same shape."""
    lattice = LATTICES[grid]
    width = lattice.columns
    moved = shift if shift is not None else torch.zeros_like(step)
    x, w, s, m = (_array(part.reshape(-1, width)) for part in (weight, weighted, step, moved))
    codes = numpy.empty(len(x), numpy.int32)
    vector_loops.diagonal(
        x, w, s, m, points(grid), _form(grid), numpy.float32(lattice.shift), codes
    )
    return torch.from_numpy(codes).view(len(weight), -1).to(weight.device)


def nearest_metric(
    targets: Tensor, step: Tensor, shift: Tensor | None, grid: str, root: Tensor
) -> Tensor:
    """Return codes ``[rows, 1]`` near ``targets`` ``[rows, v]``, steps and shifts ``[rows]``; see `packer.nearest`."""
    lattice = LATTICES[grid]
    metric = _array(root.double() @ root.double().T)
    width = lattice.width
    marginal = metric[:width, :width]
    if lattice.vectors > 1:
        cross, rest = metric[:width, width:], metric[width:, width:]
        marginal = marginal - cross @ numpy.linalg.solve(rest.astype(numpy.float64), cross.T)
    moved = torch.zeros_like(step) if shift is None else shift
    codes = numpy.empty(len(targets), numpy.int32)
    arrays = tuple(_array(part) for part in (targets, step, moved))
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


def _array(part: Tensor) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.float32]]:
    found: numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.float32]] = (
        part.detach().cpu().float().contiguous().numpy()
    )
    return found
