"""Scales of groups on any grid of fixed levels that minimise the weighted squared error.

A candidate scale ``s`` gives each weight the level ``v`` nearest to ``w / s``; the best scale for these levels is
``sum h w v / sum h v^2``, with column weights ``h``. It is rounded to its stored type before its error counts, so that
what wins here wins in a file. Candidates run from a little more than the one that covers the group to about half of it,
of both signs where the levels are not symmetric and the stored type has a sign; the winner is fitted twice more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

CHUNK = 1 << 17  # elements of a chunk of rows: its temporaries stay in a core's cache
POLISH = 2

Levels = Callable[[Tensor], Tensor]  # values in units of the scale -> the nearest levels
Stored = Callable[
    [Tensor, slice], Tensor
]  # scales (float32) of some rows -> as the file has them, in float32


def search(
    groups: Tensor,
    start: Tensor,
    importance: Tensor | None,
    levels: Levels,
    stored: Stored,
    factors: Sequence[float],
) -> Tensor:
    """Return scales ``[rows, groups]`` (float32, as `stored` returns them).

    Args:
        groups: ``[rows, groups, size]`` float32.
        start: scales ``[rows, groups]`` as stored; they stay where nothing is better.
        importance: ``[groups, size]`` non-negative, or None for equal weights.
        levels: rounds values in units of their scale.
        stored: rounds scales; it is told which rows they are of.
        factors: candidates as multiples of ``start``.
    """
    found = torch.empty_like(start)
    step = max(1, CHUNK // max(1, groups[0].numel()))
    for first in range(0, len(groups), step):
        rows = slice(first, min(first + step, len(groups)))
        one = _LevelSearch(groups[rows], importance, levels, partial(_of_rows, stored, rows))
        found[rows] = one.best(start[rows], factors)
    return found


def _of_rows(stored: Stored, rows: slice, scales: Tensor) -> Tensor:
    return stored(scales, rows)


class _LevelSearch:
    """The search over one chunk of rows."""

    def __init__(
        self,
        groups: Tensor,
        importance: Tensor | None,
        levels: Levels,
        stored: Callable[[Tensor], Tensor],
    ) -> None:
        self.groups, self.levels, self.stored = groups, levels, stored
        self.importance = importance
        self.weighted = groups if importance is None else groups * importance

    def best(self, start: Tensor, factors: Sequence[float]) -> Tensor:
        scales = start.clone()
        error = self._error(self._levels(scales), scales)
        trials = [start * factor for factor in factors]
        for index in range(len(trials) + POLISH):
            values = self._levels(trials[index] if index < len(trials) else scales)
            fitted = self.stored(self._fitted(values))
            found = self._error(values, fitted)
            better = (found < error) & (fitted != 0)  # a comparison with NaN is false
            scales = torch.where(better, fitted, scales)
            error = torch.where(better, found, error)
        return scales

    def _levels(self, scales: Tensor) -> Tensor:
        return self.levels(self.groups * scales.reciprocal().unsqueeze(-1))

    def _fitted(self, values: Tensor) -> Tensor:
        squares = values.square()
        if self.importance is not None:
            squares *= self.importance
        return torch.nan_to_num((values * self.weighted).sum(-1) / squares.sum(-1), 0.0, 0.0, 0.0)

    def _error(self, values: Tensor, scales: Tensor) -> Tensor:
        residual = torch.addcmul(self.groups, values, scales.unsqueeze(-1), value=-1).square_()
        if self.importance is not None:
            residual *= self.importance
        return residual.sum(-1)
