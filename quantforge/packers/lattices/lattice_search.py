"""Scales that minimise ``sum w (x - q)^2`` of every block jointly with its codes, ``w`` as in `nearest_points.weights`.

ggml finds the scale of each group as a real number, rounds it to a level of the block and keeps the codes of the real
one. Here its result is the start, from some of its scales. Then each group takes, of its level and those beside it,
the one with the smallest error once all of its codes are chosen anew for it; the unit of the block is fitted to codes
and levels; and both are done once more where that pays. A level is given up where weights rounded alone already lose
too much.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from quantforge.grids import SUPERBLOCKS
from quantforge.packers.lattices import lattice_reference, nearest_points
from quantforge.packers.lattices.lattice_points import points
from quantforge.packers.lattices.lattice_types import LATTICES
from quantforge.scheme import Scheme

ROWS = 256  # at a time


def searched(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, *, brief: bool
) -> dict[str, Tensor]:
    """Return the parameters of ``weight`` ``[rows, in]`` float32; with ``brief`` those that ggml finds."""
    weights = weight.new_ones(weight.shape[1]) if importance is None else importance.to(weight)
    parts = [_searched(rows, scheme, weights, brief) for rows in torch.split(weight, ROWS)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _searched(weight: Tensor, scheme: Scheme, importance: Tensor, brief: bool) -> dict[str, Tensor]:
    block, lattice = SUPERBLOCKS[scheme.grid], LATTICES[scheme.grid]
    every = 1 if brief else lattice.every
    parameters = dict(
        lattice_reference.quantize(weight, scheme, importance, every=every).parameters
    )
    if brief:
        return parameters
    from quantforge.packers.lattices import diagonal_loops

    assert block.units is not None
    x, w = (
        nearest_points.array(part).reshape(-1, block.columns)
        for part in (weight, nearest_points.weights(weight, importance))
    )
    units = nearest_points.array(parameters["d"]).reshape(-1).copy()
    levels = parameters["scales"].cpu().numpy().reshape(len(x), -1).copy()
    shared = "shifts" in parameters
    lowered = (
        parameters["shifts"].cpu().numpy().reshape(levels.shape).copy()
        if shared
        else numpy.zeros_like(levels)
    )
    diagonal_loops.search(
        x, w, (bool(lattice.signs), lattice.signs == "even", lattice.shifts_codes, shared, block.group,
        block.units[1], numpy.float32(lattice.unit), lattice.rounds),
        nearest_points.both_shifts(scheme.grid), nearest_points.tables(scheme.grid), points(scheme.grid),
        units, levels, lowered,
    )  # fmt: skip
    found = {"d": torch.from_numpy(units).half(), "scales": torch.from_numpy(levels)}
    if shared:
        found["shifts"] = torch.from_numpy(lowered)
    return {
        key: value.view(parameters[key].shape).to(weight.device) for key, value in found.items()
    }
