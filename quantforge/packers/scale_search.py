"""Scales that minimise the weighted squared error of a group instead of covering its range.

A candidate scale gives codes ``q``; the best scale for those codes is a least-squares fit over the columns of the
group, ``s = sum h w q / sum h q^2`` with column weights ``h``. It is rounded to its stored type before its error
counts, so what wins here also wins in a file; encoding again with it can only lower the error.

Here are the search itself, and the one on grids of fixed levels, whose codes ``q`` are the levels nearest to ``w / s``;
`integer_search` has that of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantforge.packers.scale_loops import POLISH

CHUNK = 1 << 17  # elements of a chunk of rows: its temporaries stay in a core's cache
Levels = Callable[[Tensor], Tensor]  # values in units of the scale -> the nearest levels
Stored = Callable[[Tensor], Tensor]  # scales (float32) -> as the file has them


def search_levels(
    groups: Tensor,
    start: Tensor,
    importance: Tensor | None,
    levels: Levels,
    stored: Stored,
    factors: Sequence[float],
) -> Tensor:
    """Search the scales of a grid of fixed levels; return them as `stored` does, float32 ``[rows, groups]``.

    Args:
        groups: ``[rows, groups, size]`` float32.
        start: scales ``[rows, groups]`` as stored; they stay where nothing is better.
        importance: ``[groups, size]`` non-negative, or None for equal weights.
        levels: rounds values in units of their scale.
        stored: rounds scales (float32) to what a file holds of them, in float32.
        factors: candidates as multiples of ``start``.
    """
    weights = groups.new_ones(1, 1) if importance is None else importance
    found = torch.empty_like(start)
    for chunk in chunks(groups):
        plain = start[chunk]
        columns_first = groups[chunk].movedim(-1, 0), weights.T.unsqueeze(1)
        search = Search(*columns_first, plain, stored)

        def codes(scale: Tensor, search: Search = search) -> Tensor:
            return levels(search.in_units(scale).movedim(0, -1)).movedim(-1, 0)

        search.begin(codes(plain))
        for factor in factors:
            search.take(codes(plain * factor))
        for _ in range(POLISH):
            search.take(codes(search.scales))
        found[chunk] = search.scales
    return found


def chunks(groups: Tensor) -> list[slice]:
    """Return runs of rows of ``groups`` whose temporaries stay in a core's cache."""
    step = max(1, CHUNK // max(1, groups[0].numel()))
    return [slice(start, start + step) for start in range(0, len(groups), step)]


class Search:
    """The best scale so far of each group of a chunk; two buffers serve all candidates.

    Args:
        groups: the columns of a group along the first dimension.
        importance: broadcasts to ``groups``.
        scales: to begin with; they stay where nothing is better.
        stored: rounds scales to what a file holds.
    """

    def __init__(self, groups: Tensor, importance: Tensor, scales: Tensor, stored: Stored) -> None:
        self.groups, self.importance = groups, importance
        self.weighted = groups * importance
        self.scales, self.stored = scales, stored
        self._scaled, self._room = (torch.empty_like(self.groups) for _ in range(2))

    def in_units(self, scale: Tensor) -> Tensor:
        """Return the weights in units of a candidate's scale, in a buffer that the next call fills again."""
        return torch.mul(self.groups, self._spread(scale.reciprocal()), out=self._scaled)

    def begin(self, codes: Tensor) -> None:
        """Judge the scales to begin with, given their codes."""
        self.error = self._error(codes, self.scales.float())

    def take(self, codes: Tensor) -> Tensor:
        """Fit a scale to the codes of a candidate, keep it where its error is less, and return where that is (bool)."""
        products = self._total(torch.mul(codes, self.weighted, out=self._room))
        squares = torch.mul(codes, codes, out=self._room).mul_(self.importance)
        fit = torch.nan_to_num(products / self._total(squares), 0.0, 0.0, 0.0)
        fitted = self.stored(fit)
        scale = fitted.float()
        error = self._error(codes, scale)
        better = (error < self.error) & (
            scale != 0
        )  # of an infinite scale the error is NaN, and not smaller
        self.error = torch.where(better, error, self.error)
        self.scales = torch.where(better, fitted, self.scales)
        return better

    def _error(self, codes: Tensor, scale: Tensor) -> Tensor:
        # Not by the expanded square: its terms cancel, and near ties would be decided by rounding errors.
        return self._total(self._missed(codes, scale).square_().mul_(self.importance))

    def _missed(self, codes: Tensor, scale: Tensor) -> Tensor:
        return torch.addcmul(self.groups, codes, scale, value=-1, out=self._room)

    def _spread(self, scales: Tensor) -> Tensor:
        """Return scales so that they broadcast to the groups."""
        return scales

    def _total(self, values: Tensor) -> Tensor:
        """Sum over a group."""
        return values.sum(0)
