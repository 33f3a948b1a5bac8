"""Fit the parameters of ggml's types again for fixed codes, restricted to what can be stored.

Values are ``step * v + offset``. For each group step and offset are fitted. In a K-quant these are integers times the
units of the block: two linear equations give the best real numbers, and the best of the integers around them are taken.
Then the units of each block of 256 are fitted in the same way. Parameters change only in the rows where that lowers the
error.

All parameters are float32 copies of the stored ones, one column per group (or block).
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

GroupParams = dict[str, Tensor]  # the parameters of one group or block, each [rows, 1]
NEIGHBOR_MOVES = (0, -1, 1)


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:  # noqa: ARG001
    """Return the refinement steps: step and offset of each group, then the units of each block if the type has any."""
    block = GGML_BLOCKS[scheme.grid]
    groups = RefitStep(block.group_size, partial(_refit_group, scheme.grid))
    units = RefitStep(block.columns, partial(_refit_units, scheme.grid))
    return (groups, units) if scheme.grid in SCALE_RANGES else (groups,)


def _refit_group(grid: str, parameters: dict[str, Tensor], fixed: FixedCodes) -> Tensor:
    """Change the parameters of one group where that lowers the error; return by how much it falls."""
    values = decode_values(fixed.codes, CODE_RANGES[grid])
    group_params = _group_params(parameters, grid, fixed.group)
    error = QuadraticError.from_directions(values, torch.ones_like(values), fixed)
    step, offset = _step_and_offset(group_params, grid)
    best_changes = error.minimize(offset="mins" in group_params)

    def gain(candidate: GroupParams) -> Tensor:
        new_step, new_offset = _step_and_offset(group_params | candidate, grid)
        return error.gain(new_step - step, new_offset - offset)

    return take_best(group_params, _candidate_params(group_params, grid, *best_changes), gain)


def _refit_units(grid: str, parameters: dict[str, Tensor], fixed: FixedCodes) -> Tensor:
    """Change the units of one block where that lowers the error, with fixed integers; return by how much it falls."""
    block, block_index = GGML_BLOCKS[grid], fixed.group
    num_groups = block.columns // block.group_size
    groups = slice(block_index * num_groups, (block_index + 1) * num_groups)

    def spread(key: str) -> Tensor:
        return parameters[key][:, groups].T.repeat_interleave(block.group_size, 0)

    step_direction = decode_values(fixed.codes, CODE_RANGES[grid]) * spread("scales")
    affine = "dmin" in parameters
    offset_direction = -spread("mins") if affine else torch.zeros_like(step_direction)
    block_params: GroupParams = {
        key: parameters[key][:, block_index : block_index + 1]
        for key in ("d", "dmin")
        if key in parameters
    }
    error = QuadraticError.from_directions(step_direction, offset_direction, fixed)
    no_change = torch.zeros_like(block_params["d"])

    def gain(candidate: GroupParams) -> Tensor:
        changes = (
            candidate[key] - block_params[key] if key in candidate else no_change
            for key in ("d", "dmin")
        )
        return error.gain(*changes)

    d_change, dmin_change = error.minimize(offset=affine)
    return take_best(
        block_params, [_round_to_float16(block_params, {"d": d_change, "dmin": dmin_change})], gain
    )


def _group_params(parameters: Mapping[str, Tensor], grid: str, group: int) -> GroupParams:
    """Return views of the parameters of one group."""
    block = group * GGML_BLOCKS[grid].group_size // GGML_BLOCKS[grid].columns
    index_of = {"d": block, "dmin": block}
    return {
        key: value[:, (parameter_index := index_of.get(key, group)) : parameter_index + 1]
        for key, value in parameters.items()
    }


def _candidate_params(
    group_params: GroupParams, grid: str, step_change: Tensor, offset_change: Tensor
) -> Iterator[GroupParams]:
    """Yield parameters that a group could store, near the given changes ``[rows, 1]``; the block's units are fixed."""
    if "exponents" in group_params:
        for delta in (-1, 1):
            yield {"exponents": (group_params["exponents"] + delta).clamp(0, 254)}
    elif "d" not in group_params:
        yield _round_to_float16(group_params, {"scales": step_change, "mins": offset_change})
    else:
        limits = SCALE_RANGES[grid]
        integer_changes = {"scales": _integer_change(step_change, group_params["d"])}
        if "mins" in group_params:
            integer_changes["mins"] = _integer_change(-offset_change, group_params["dmin"])
        for scale in NEIGHBOR_MOVES:
            for minimum in NEIGHBOR_MOVES if "mins" in group_params else (0,):
                moves = {"scales": scale, "mins": minimum}
                yield {
                    key: (group_params[key] + change + moves[key]).clamp(limits.low, limits.high)
                    for key, change in integer_changes.items()
                }


def _round_to_float16(params: GroupParams, changes: Mapping[str, Tensor]) -> GroupParams:
    return {
        key: (params[key] + change).half().float()
        for key, change in changes.items()
        if key in params
    }


def _integer_change(change: Tensor, unit: Tensor) -> Tensor:
    return (change / torch.where(unit == 0, torch.inf, unit)).round()


def _step_and_offset(params: GroupParams, grid: str) -> tuple[Tensor, Tensor]:
    """Return the step and the offset of a group with these parameters, ``[rows, 1]``."""
    step, offset = group_steps(params, grid)
    return step, torch.zeros_like(step) if offset is None else offset


def take_best(
    params: GroupParams,
    candidates: Iterable[GroupParams],
    gain_of: Callable[[GroupParams], Tensor],
) -> Tensor:
    """Write the candidate with the largest gain into ``params``, row by row; return the gains ``[rows]``."""
    best = torch.zeros_like(next(iter(params.values())), dtype=torch.float64)
    best_params: GroupParams = {}
    for candidate in candidates:
        gain = gain_of(candidate)
        is_better = gain > best  # false for what is not a number
        for value in candidate.values():
            is_better &= value.isfinite()
        best = torch.where(is_better, gain, best)
        best_params = {
            key: torch.where(is_better, value, best_params.get(key, params[key]))
            for key, value in candidate.items()
        }
    for key, value in best_params.items():
        params[key].copy_(value)
    return best[:, 0]


@dataclass(frozen=True, slots=True)
class QuadraticError:
    """The change of the squared error if values move by ``a * step_direction + b * offset_direction``.

    Its coefficients are ``[rows, 1]``.
    """

    step_gradient: Tensor
    offset_gradient: Tensor
    step_step: Tensor
    step_offset: Tensor
    offset_offset: Tensor

    @classmethod
    def from_directions(
        cls, step_direction: Tensor, offset_direction: Tensor, fixed: FixedCodes
    ) -> QuadraticError:
        """Compute the coefficients from the two directions, each ``[columns, rows]``, and the gradient and Hessian."""
        gradient, hessian = fixed.gradient, fixed.hessian
        hessian_up = matmul(hessian, step_direction)
        hessian_down = matmul(hessian, offset_direction)
        products = (
            step_direction * gradient,
            offset_direction * gradient,
            step_direction * hessian_up,
            offset_direction * hessian_up,
            offset_direction * hessian_down,
        )
        return cls(*(terms.sum(0, dtype=torch.float64).unsqueeze(1) for terms in products))

    def minimize(self, *, offset: bool) -> tuple[Tensor, Tensor]:
        """Return the ``a`` and ``b`` that lower the error most; without ``offset`` ``b`` is 0."""
        step_only = torch.where(self.step_step > 0, self.step_gradient / self.step_step, 0.0)
        if not offset:
            return step_only.float(), torch.zeros_like(step_only).float()
        determinant = self.step_step * self.offset_offset - self.step_offset * self.step_offset
        solvable = determinant > 1e-9 * self.step_step * self.offset_offset
        a = self.step_gradient * self.offset_offset - self.offset_gradient * self.step_offset
        b = self.offset_gradient * self.step_step - self.step_gradient * self.step_offset
        return (
            torch.where(solvable, a / determinant, step_only).float(),
            torch.where(solvable, b / determinant, 0.0).float(),
        )

    def gain(self, a: Tensor, b: Tensor) -> Tensor:
        """Return by how much the squared error falls for the changes ``a`` and ``b``."""
        a, b = a.double(), b.double()
        square = a * a * self.step_step + 2 * a * b * self.step_offset + b * b * self.offset_offset
        return 2 * (a * self.step_gradient + b * self.offset_gradient) - square
