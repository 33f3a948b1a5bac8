"""Parameters of ggml's grids fitted again with the codes held, restricted to what can be stored.

Values are ``step * v + offset`` of parameters that blocks share. Of each group step and offset are fitted, which for a
K-quant are integers times the units of its block: the best real numbers are the solution of two equations, and of the
integers around it the best are taken. Of each block of 256 its units are fitted, likewise. A change is made in the rows
where it lowers the error.

All parameters are float32 copies of what is stored, one column for a group (or a block).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantforge.grids import GGML_BLOCKS
from quantforge.numerics.products import matmul
from quantforge.packers.ggml.grid import CODE_RANGES, SCALE_RANGES, decode_values, group_steps
from quantforge.packers.hessian_refit import FixedCodes, RefitStep
from quantforge.scheme import Scheme

GroupParams = dict[str, Tensor]  # of one group or block: [rows, 1] each
NEIGHBOR_MOVES = (0, -1, 1)


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:  # noqa: ARG001
    """Return the steps of fitting again: step and offset of each group, then the units of each block that has any."""
    block = GGML_BLOCKS[scheme.grid]
    groups = RefitStep(block.group, partial(_refit_group, scheme.grid))
    units = RefitStep(block.columns, partial(_refit_units, scheme.grid))
    return (groups, units) if scheme.grid in SCALE_RANGES else (groups,)


def _refit_group(grid: str, parameters: dict[str, Tensor], held: FixedCodes) -> Tensor:
    """Choose other parameters of one group where they are better; return what they gain."""
    values = decode_values(held.codes, CODE_RANGES[grid])
    columns = _group_params(parameters, grid, held.group)
    plane = QuadraticError.of(values, torch.ones_like(values), held)
    step, offset = _step_and_offset(columns, grid)
    wished = plane.best(offset="mins" in columns)

    def gain(tried: GroupParams) -> Tensor:
        new_step, new_offset = _step_and_offset(columns | tried, grid)
        return plane.gain(new_step - step, new_offset - offset)

    return take_best(columns, _candidate_params(columns, grid, *wished), gain)


def _refit_units(grid: str, parameters: dict[str, Tensor], held: FixedCodes) -> Tensor:
    """Choose other units of one block, the integers of its groups held; return what they gain."""
    block, place = GGML_BLOCKS[grid], held.group
    count = block.columns // block.group
    groups = slice(place * count, (place + 1) * count)

    def spread(key: str) -> Tensor:
        return parameters[key][:, groups].T.repeat_interleave(block.group, 0)

    up = decode_values(held.codes, CODE_RANGES[grid]) * spread("scales")
    affine = "dmin" in parameters
    down = -spread("mins") if affine else torch.zeros_like(up)
    columns: GroupParams = {
        key: parameters[key][:, place : place + 1] for key in ("d", "dmin") if key in parameters
    }
    plane = QuadraticError.of(up, down, held)
    none = torch.zeros_like(columns["d"])

    def gain(tried: GroupParams) -> Tensor:
        changes = (tried[key] - columns[key] if key in tried else none for key in ("d", "dmin"))
        return plane.gain(*changes)

    unit, lowering = plane.best(offset=affine)
    return take_best(columns, [_round_to_float16(columns, {"d": unit, "dmin": lowering})], gain)


def _group_params(parameters: Mapping[str, Tensor], grid: str, group: int) -> GroupParams:
    """Return views of the parameters of one group."""
    block = group * GGML_BLOCKS[grid].group // GGML_BLOCKS[grid].columns
    places = {"d": block, "dmin": block}
    return {
        key: value[:, (place := places.get(key, group)) : place + 1]
        for key, value in parameters.items()
    }


def _candidate_params(
    columns: GroupParams, grid: str, step_change: Tensor, offset_change: Tensor
) -> Iterator[GroupParams]:
    """Yield parameters that a group could store instead, its unit held, near the wished changes ``[rows, 1]``."""
    if "exponents" in columns:
        for move in (-1, 1):
            yield {"exponents": (columns["exponents"] + move).clamp(0, 254)}
    elif "d" not in columns:
        yield _round_to_float16(columns, {"scales": step_change, "mins": offset_change})
    else:
        limits = SCALE_RANGES[grid]
        wished = {"scales": _integer_change(step_change, columns["d"])}
        if "mins" in columns:
            wished["mins"] = _integer_change(-offset_change, columns["dmin"])
        for scale in NEIGHBOR_MOVES:
            for least in NEIGHBOR_MOVES if "mins" in columns else (0,):
                moves = {"scales": scale, "mins": least}
                yield {
                    key: (columns[key] + wish + moves[key]).clamp(limits.low, limits.high)
                    for key, wish in wished.items()
                }


def _round_to_float16(columns: GroupParams, changes: Mapping[str, Tensor]) -> GroupParams:
    return {
        key: (columns[key] + change).half().float()
        for key, change in changes.items()
        if key in columns
    }


def _integer_change(change: Tensor, unit: Tensor) -> Tensor:
    return (change / torch.where(unit == 0, torch.inf, unit)).round()


def _step_and_offset(columns: GroupParams, grid: str) -> tuple[Tensor, Tensor]:
    """Return the step and offset that the parameters of a group stand for, ``[rows, 1]``."""
    step, offset = group_steps(columns, grid)
    return step, torch.zeros_like(step) if offset is None else offset


def take_best(
    columns: GroupParams,
    candidates: Iterable[GroupParams],
    gain_of: Callable[[GroupParams], Tensor],
) -> Tensor:
    """Write the candidate with the largest gain into ``columns``, row by row; return the gains ``[rows]``."""
    best = torch.zeros_like(next(iter(columns.values())), dtype=torch.float64)
    chosen: GroupParams = {}
    for tried in candidates:
        gain = gain_of(tried)
        better = gain > best  # false for what is not a number
        for value in tried.values():
            better &= value.isfinite()
        best = torch.where(better, gain, best)
        chosen = {
            key: torch.where(better, value, chosen.get(key, columns[key]))
            for key, value in tried.items()
        }
    for key, value in chosen.items():
        columns[key].copy_(value)
    return best[:, 0]


@dataclass(frozen=True, slots=True)
class QuadraticError:
    """The error as a function of ``a`` and ``b`` when values change by ``a up + b down``: sums, ``[rows, 1]``."""

    up_gradient: Tensor
    down_gradient: Tensor
    up_up: Tensor
    up_down: Tensor
    down_down: Tensor

    @classmethod
    def of(cls, up: Tensor, down: Tensor, held: FixedCodes) -> QuadraticError:
        """Sum the products of ``up``, ``down`` and the gradient, each ``[columns, rows]``."""
        gradient, hessian = held.gradient, held.hessian
        up_moved, down_moved = matmul(hessian, up), matmul(hessian, down)
        products = (
            up * gradient,
            down * gradient,
            up * up_moved,
            down * up_moved,
            down * down_moved,
        )
        return cls(*(terms.sum(0, dtype=torch.float64).unsqueeze(1) for terms in products))

    def best(self, *, offset: bool) -> tuple[Tensor, Tensor]:
        """Return the ``a`` and ``b`` that lower the error most; without ``offset`` ``b`` is 0."""
        alone = torch.where(self.up_up > 0, self.up_gradient / self.up_up, 0.0)
        if not offset:
            return alone.float(), torch.zeros_like(alone).float()
        determinant = self.up_up * self.down_down - self.up_down * self.up_down
        solvable = determinant > 1e-9 * self.up_up * self.down_down
        a = self.up_gradient * self.down_down - self.down_gradient * self.up_down
        b = self.down_gradient * self.up_up - self.up_gradient * self.up_down
        return (
            torch.where(solvable, a / determinant, alone).float(),
            torch.where(solvable, b / determinant, 0.0).float(),
        )

    def gain(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the amount by which the squared error falls."""
        a, b = a.double(), b.double()
        square = a * a * self.up_up + 2 * a * b * self.up_down + b * b * self.down_down
        return 2 * (a * self.up_gradient + b * self.down_gradient) - square
