"""Parameters of lattice types fitted again with the codes held: the level of a group, and the unit of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quantforge.grids import SUPERBLOCKS
from quantforge.packers.ggml.refit import Plane, take_best
from quantforge.packers.lattices.lattice_points import values_of
from quantforge.packers.lattices.lattice_types import LATTICES
from quantforge.packers.moments import Held, Refit
from quantforge.scheme import Scheme


def refits(scheme: Scheme, in_features: int) -> Sequence[Refit]:  # noqa: ARG001
    """Return the steps of fitting again: the level of each group, then the unit of each block."""
    block = SUPERBLOCKS[scheme.grid]
    levels = Refit(block.group, partial(_refit_level, scheme.grid))
    return (levels, Refit(block.columns, partial(_refit_unit, scheme.grid)))


def _values(grid: str, parameters: dict[str, Tensor], held: Held, groups: slice) -> Tensor:
    """Return the values of the codes in units of the step, shift included, ``[columns, rows]``."""
    values = values_of(held.codes.T, grid).T
    if "shifts" not in parameters:
        return values
    raised = LATTICES[grid].shift
    shift = torch.where(parameters["shifts"][:, groups] > 0, -raised, raised)
    return values + shift.T.repeat_interleave(SUPERBLOCKS[grid].group, 0)


def _refit_level(grid: str, parameters: dict[str, Tensor], held: Held) -> Tensor:
    block, place = SUPERBLOCKS[grid], held.group
    above = place * block.group // block.columns
    unit = parameters["d"][:, above : above + 1] * (2 * LATTICES[grid].unit)  # of one level
    values = _values(grid, parameters, held, slice(place, place + 1))
    plane = Plane.of(values, torch.zeros_like(values), held)
    mine = {"scales": parameters["scales"][:, place : place + 1]}
    assert block.units is not None
    least, most = block.units

    def near() -> Iterator[dict[str, Tensor]]:
        for move in (-1, 1):
            yield {"scales": (mine["scales"] + move).clamp(least, most)}

    def gain(tried: dict[str, Tensor]) -> Tensor:
        change = (tried["scales"] - mine["scales"]) * unit
        return plane.gain(change, torch.zeros_like(change))

    return take_best(mine, near(), gain)


def _refit_unit(grid: str, parameters: dict[str, Tensor], held: Held) -> Tensor:
    block, place = SUPERBLOCKS[grid], held.group
    count = block.columns // block.group
    groups = slice(place * count, (place + 1) * count)
    levels = (2 * parameters["scales"][:, groups] + 1) * LATTICES[grid].unit
    up = _values(grid, parameters, held, groups) * levels.T.repeat_interleave(block.group, 0)
    plane = Plane.of(up, torch.zeros_like(up), held)
    mine = {"d": parameters["d"][:, place : place + 1]}
    wished, none = plane.best(offset=False)
    tried = {"d": (mine["d"] + wished).half().float()}

    def gain(found: dict[str, Tensor]) -> Tensor:
        return plane.gain(found["d"] - mine["d"], none)

    return take_best(mine, [tried], gain)
