"""Scales that minimise ``sum w (x - q)^2`` of every block jointly with its codes, ``w`` as in `nearest_points.weights`.

ggml finds the scale of each group as a real number, rounds it to a level of the block and keeps the codes of the real
one. Here its result is the start. Then each group takes, of its level and those beside it, the one with the smallest
error once all of its codes are chosen anew for it; the unit of the block is fitted to codes and levels; and both are
done once more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.grids import SUPERBLOCKS
from quantforge.packers.lattices import lattice_reference, nearest_points
from quantforge.packers.lattices.lattice_points import values_of
from quantforge.packers.lattices.lattice_types import LATTICES
from quantforge.scheme import Scheme

ROUNDS = 2
ROWS = 256  # at a time
NEAR = (0, -1, 1)


def searched(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, *, brief: bool
) -> dict[str, Tensor]:
    """Return the parameters of ``weight`` ``[rows, in]`` float32; with ``brief`` those that ggml finds."""
    weights = weight.new_ones(weight.shape[1]) if importance is None else importance.to(weight)
    parts = [_searched(rows, scheme, weights, brief) for rows in torch.split(weight, ROWS)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _searched(weight: Tensor, scheme: Scheme, importance: Tensor, brief: bool) -> dict[str, Tensor]:
    parameters = dict(lattice_reference.quantize(weight, scheme, importance).parameters)
    if brief:
        return parameters
    weighted = nearest_points.weights(weight, importance)
    for _ in range(ROUNDS):
        parameters = _unit_fitted(
            weight, weighted, scheme.grid, *_levels(weight, weighted, scheme.grid, parameters)
        )
    return parameters


def _levels(
    weight: Tensor, weighted: Tensor, grid: str, parameters: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return parameters with the best level (and shift) of each group, and the values of the codes for these."""
    block, lattice = SUPERBLOCKS[grid], LATTICES[grid]
    assert block.units is not None
    least, most = block.units
    shifts = (0, 1) if "shifts" in parameters else (None,)
    spread = (
        parameters["d"].float().repeat_interleave(block.columns // block.group, 1) * lattice.unit
    )
    best = torch.full_like(spread, torch.inf)
    chosen, values = dict(parameters), torch.zeros_like(weight)
    for move in NEAR:
        level = (parameters["scales"].int() + move).clamp(least, most).to(torch.uint8)
        step = ((2 * level.float() + 1) * spread).repeat_interleave(block.group, 1)
        for lowered in shifts:
            shift = (
                None
                if lowered is None
                else torch.full_like(step, (1 - 2 * lowered) * lattice.shift)
            )
            codes = nearest_points.nearest_diagonal(weight, step, shift, grid, weighted)
            found = values_of(codes, grid)
            found = found if shift is None else found + shift
            lost = ((weight - found * step).square() * weighted).view(*best.shape, -1).sum(2)
            better = lost < best
            best = torch.where(better, lost, best)
            chosen["scales"] = torch.where(better, level, chosen["scales"])
            if lowered is not None:
                chosen["shifts"] = torch.where(better, lowered, chosen["shifts"]).to(torch.uint8)
            values = torch.where(better.repeat_interleave(block.group, 1), found, values)
    return chosen, values


def _unit_fitted(
    weight: Tensor, weighted: Tensor, grid: str, parameters: dict[str, Tensor], values: Tensor
) -> dict[str, Tensor]:
    """Return parameters with the unit of each block that fits best, levels and values held."""
    block = SUPERBLOCKS[grid]
    levels = (2 * parameters["scales"].float() + 1) * LATTICES[grid].unit
    scaled = values * levels.repeat_interleave(block.group, 1)
    shape = (len(weight), -1, block.columns)
    top = (weighted * scaled * weight).view(shape).double().sum(2)
    bottom = (weighted * scaled * scaled).view(shape).double().sum(2)
    unit = torch.where(bottom > 0, top / bottom, 0.0).half()
    return parameters | {"d": torch.where(unit > 0, unit, parameters["d"])}
