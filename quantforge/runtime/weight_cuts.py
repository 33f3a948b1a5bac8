"""Cuts of a weight matrix: the rows, or the columns, that one of several processes holds of it.

A cut of columns lies between groups, so that no scale is cut. What is left is a matrix of its own: its codes and
parameters are those of the whole, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.errors import RefusedError
from quantforge.runtime.problems import Stated

_OF_ALL = frozenset({"table"})  # parameters of the grid, not of rows
_UPPER = frozenset({"d", "dmin"})  # one for each superblock


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one process.

    Attributes:
        rank: its number, from 0.
        ranks: how many processes there are.
        total: returns the sum of a tensor over all processes, the same bits in each; each has to call it.
    """

    rank: int
    ranks: int
    total: Callable[[Tensor], Tensor]

    def of(self, size: int, what: str) -> slice:
        """Return the run of ``size`` things that is this process's.

        Raises:
            RefusedError: there are not as many for each process.
        """
        if size % self.ranks:
            raise RefusedError(
                f"{what}: {size} cannot be split over {self.ranks} processes",
                "a number of processes that divides it",
            )
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)

    def of_heads(self, scale: Tensor) -> Tensor:
        """Return the scales ``[kv_heads, ...]`` of the heads of this process; one scale for all stays."""
        return scale if len(scale) == 1 else scale[self.of(len(scale), "key/value heads")]


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs of rows of a weight, or of its bias, one behind the other; or a run of columns.

    Attributes:
        module: whose weight it is.
        share: of the process that holds it.
        rows: the runs; none are all rows.
        columns: the run; None is all columns.
    """

    module: str
    share: Share
    rows: tuple[slice, ...] = ()
    columns: slice | None = None

    def plain(self, value: Tensor) -> Tensor:
        """Return what is left of a weight ``[out_features, in_features]`` or a bias ``[out_features]``, copied."""
        if self.rows:
            return torch.cat([value[run] for run in self.rows])
        return value if self.columns is None else value[:, self.columns].clone()

    def stated(self, whole: Stated) -> Stated:
        """Return what is left of a weight in the terms of the kernels.

        Raises:
            RefusedError: a group, or a tile of rows, would be cut.
        """
        problem, parameters = whole.problem, dict(whole.parameters)
        tile, group, upper = problem.tile_rows, problem.group_size, problem.superblock
        left = (problem.out_features, problem.in_features)
        rows, columns = self.rows or (slice(0, left[0]),), self.columns or slice(0, left[1])
        runs = [self._among(run, tile, left[0], "outputs in runs") for run in rows]
        runs = runs[:1] if tile >= left[0] else runs
        for name in parameters.keys() - _OF_ALL:
            size = upper if name in _UPPER else group
            part = self._among(columns, size, left[1], "inputs in groups")
            parameters[name] = torch.cat([parameters[name][run, part] for run in runs])
        width = columns.stop - columns.start
        smaller = replace(
            problem,
            out_features=sum(run.stop - run.start for run in rows),
            in_features=width,
            group_size=width if group == left[1] else group,
            superblock=width if upper == left[1] else upper,
        )
        codes = torch.cat([whole.codes[run, columns] for run in rows])
        return Stated(smaller, codes, parameters)

    def _among(self, run: slice, size: int, whole: int, what: str) -> slice:
        """Return a run of rows or columns among parameters of which each serves ``size`` of them."""
        if size >= whole:
            return slice(0, 1)
        if run.start % size or (run.stop % size and run.stop != whole):
            raise RefusedError(
                f"{self.module}: {whole} {what} of {size} cannot be cut at {run.start} and {run.stop}",
                "fewer processes, or a model in smaller groups",
                tensor=f"{self.module}.weight",
            )
        return slice(run.start // size, -(-run.stop // size))
