"""Refinement for ggml's grids, whose values are ``step * v + offset`` of parameters that blocks share.

As in `refine`, codes go to the best point of their grid given all the others; between, parameters are fitted again
under the Hessian with the codes held, restricted to what can be stored:

- of each group the step and offset, which for a K-quant are integers times the units of its block: the best real
  numbers are the solution of two equations, and of the integers around it the best are taken;
- of each block of 256 its units, likewise.

A change is made in the rows where it lowers the error, so that the error of a row never rises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.grids import Superblock
from quantforge.numerics.products import addmm_, matmul
from quantforge.packers.ggml import refit
from quantforge.packers.ggml.grid import GRIDS, values_of
from quantforge.quantizers.refine import Refinement


class BlockRefinement(Refinement):
    """`Refinement` of a tensor whose scheme has a fixed layout."""

    def _improve_groups(self, gradient: Tensor, hessian: Tensor, start: int) -> Tensor:
        block, gained = self._block, gradient.new_zeros(gradient.shape[1], dtype=torch.float64)
        for first in range(0, len(gradient), block.group):
            columns = slice(first, first + block.group)
            gain = self._refit_group(gradient[columns], hessian[columns, columns], start + first)
            gained += self._settle(gradient, hessian, columns, start, gain)
        if "d" in self._parameters:
            for first in range(0, len(gradient), block.columns):
                columns = slice(first, first + block.columns)
                gain = self._refit_units(
                    gradient[columns], hessian[columns, columns], start + first
                )
                gained += self._settle(gradient, hessian, columns, start, gain)
        return gained

    @property
    def _block(self) -> Superblock:
        assert self.scheme.block is not None
        return self.scheme.block

    def _values(self, columns: slice) -> Tensor:
        return values_of(self._codes[columns], GRIDS[self.scheme.grid])

    def _refit_group(self, gradient: Tensor, hessian: Tensor, first: int) -> Tensor:
        """Choose other parameters of one group where they are better; return what they gain."""
        grid = self.scheme.grid
        values = self._values(slice(first, first + len(gradient)))
        columns = refit.of_group(self._parameters, grid, first // len(gradient))
        plane = _Plane.of(values, torch.ones_like(values), gradient, hessian)
        step, offset = refit.step_and_offset(columns, grid)
        wished = plane.best(offset="mins" in columns)

        def gain(tried: refit.Columns) -> Tensor:
            new_step, new_offset = refit.step_and_offset(columns | tried, grid)
            return plane.gain(new_step - step, new_offset - offset)

        return _take_best(columns, refit.near(columns, grid, *wished), gain)

    def _refit_units(self, gradient: Tensor, hessian: Tensor, first: int) -> Tensor:
        """Choose other units of one block where they are better; return what they gain."""
        block = self._block
        groups = slice(first // block.group, (first + block.columns) // block.group)
        place = first // block.columns

        def spread(key: str) -> Tensor:
            return self._parameters[key][:, groups].T.repeat_interleave(block.group, 0)

        up = self._values(slice(first, first + block.columns)) * spread("scales")
        affine = "dmin" in self._parameters
        down = -spread("mins") if affine else torch.zeros_like(up)
        columns: refit.Columns = {
            key: self._parameters[key][:, place : place + 1]
            for key in ("d", "dmin")
            if key in self._parameters
        }
        plane = _Plane.of(up, down, gradient, hessian)
        none = torch.zeros_like(columns["d"])

        def gain(tried: refit.Columns) -> Tensor:
            changes = (tried[key] - columns[key] if key in tried else none for key in ("d", "dmin"))
            return plane.gain(*changes)

        return _take_best(columns, refit.units_near(columns, *plane.best(offset=affine)), gain)

    def _settle(
        self, gradient: Tensor, hessian: Tensor, columns: slice, start: int, gain: Tensor
    ) -> Tensor:
        """Bring error and gradient up to date after the parameters of ``columns`` have changed; return ``gain``."""
        place = slice(start + columns.start, start + columns.stop)
        codes = self._codes[place].T
        error = (
            self._weight[place] - self.packer.decode(codes, self._parameters, self.scheme, place).T
        )
        change = self._error[place] - error
        self._error[place] = error
        addmm_(gradient, hessian[:, columns], change, alpha=-1)
        return gain


def _take_best(
    columns: refit.Columns,
    candidates: Iterable[refit.Columns],
    gain_of: Callable[[refit.Columns], Tensor],
) -> Tensor:
    """Write the candidate with the largest gain into ``columns``, row by row; return the gains ``[rows]``."""
    best = torch.zeros_like(next(iter(columns.values())), dtype=torch.float64)
    chosen: refit.Columns = {}
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
class _Plane:
    """The error as a function of ``a`` and ``b`` when values change by ``a up + b down``: sums, ``[rows, 1]``."""

    up_gradient: Tensor
    down_gradient: Tensor
    up_up: Tensor
    up_down: Tensor
    down_down: Tensor

    @classmethod
    def of(cls, up: Tensor, down: Tensor, gradient: Tensor, hessian: Tensor) -> _Plane:
        """Sum the products of ``up``, ``down`` and ``gradient``, each ``[columns, rows]``."""
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
