"""Other parameters near the present ones, for refinement: what a group or a block of 256 could store instead.

A rounder that holds the codes knows by how much step and offset should change; here is what can be stored near that.
All parameters are float32 copies of what is stored, one column for a group (or a block).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quantforge.grids import SUPERBLOCKS
from quantforge.packers.ggml.grid import LIMITS, steps

Columns = dict[str, Tensor]  # of one group: [rows, 1] each
NEAR = (0, -1, 1)


def of_group(parameters: Mapping[str, Tensor], grid: str, group: int) -> Columns:
    """Return views of the parameters of one group."""
    block = group * SUPERBLOCKS[grid].group // SUPERBLOCKS[grid].columns
    places = {"d": block, "dmin": block}
    return {
        key: value[:, (place := places.get(key, group)) : place + 1]
        for key, value in parameters.items()
    }


def near(
    columns: Columns, grid: str, step_change: Tensor, offset_change: Tensor
) -> Iterator[Columns]:
    """Yield parameters that a group could store instead, its unit held, near the wished changes ``[rows, 1]``."""
    if "exponents" in columns:
        for move in (-1, 1):
            yield {"exponents": (columns["exponents"] + move).clamp(0, 254)}
    elif "d" not in columns:
        yield _rounded(columns, {"scales": step_change, "mins": offset_change})
    else:
        limits = LIMITS[grid]
        wished = {"scales": _in_units(step_change, columns["d"])}
        if "mins" in columns:
            wished["mins"] = _in_units(-offset_change, columns["dmin"])
        for scale in NEAR:
            for least in NEAR if "mins" in columns else (0,):
                moves = {"scales": scale, "mins": least}
                yield {
                    key: (columns[key] + wish + moves[key]).clamp(limits.low, limits.high)
                    for key, wish in wished.items()
                }


def units_near(columns: Columns, unit_change: Tensor, lowering_change: Tensor) -> Iterator[Columns]:
    """Yield the units that a block could store instead, the integers of its groups held."""
    yield _rounded(columns, {"d": unit_change, "dmin": lowering_change})


def _rounded(columns: Columns, changes: Mapping[str, Tensor]) -> Columns:
    return {
        key: (columns[key] + change).half().float()
        for key, change in changes.items()
        if key in columns
    }


def _in_units(change: Tensor, unit: Tensor) -> Tensor:
    return (change / torch.where(unit == 0, torch.inf, unit)).round()


def step_and_offset(columns: Columns, grid: str) -> tuple[Tensor, Tensor]:
    """Return the step and offset that the parameters of a group stand for, ``[rows, 1]``."""
    step, offset = steps(columns, grid)
    return step, torch.zeros_like(step) if offset is None else offset
