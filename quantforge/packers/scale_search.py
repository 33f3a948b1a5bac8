"""Scales that minimise the weighted squared error of a group instead of covering its range.

A candidate scale gives codes ``q``; the best scale for those codes is a least-squares fit over the columns of the
group, ``s = sum h w q / sum h q^2`` with column weights ``h``. It is rounded to its stored type before its error
counts, so what wins here also wins in a file; encoding again with it can only lower the error.

On grids of fixed levels (`search_levels`) the codes ``q`` are the levels nearest to ``w / s``. Integers have zero
points, or one code more on their negative side: on a symmetric grid (`search_scales`) scales of both signs are tried,
so that the longer side can serve the longer tail of the group ("full-range symmetric" in AutoRound's documentation);
else (`search_scales_and_zeros`) each scale with three zeros. Large matrices of integers are searched by `scale_loops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantforge.packers import row_encoding, scale_loops
from quantforge.packers.scale_loops import POLISH

CHUNK = 1 << 17  # elements of a chunk of rows: its temporaries stay in a core's cache
RANGES = 14  # candidates of integers for each sign (or zero), from `WIDEST` to `NARROWEST` times the whole range
WIDEST, NARROWEST = 1.05, 0.4
PARTS = [WIDEST - (WIDEST - NARROWEST) / (RANGES - 1) * index for index in range(RANGES)]
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


def search_scales(
    groups: Tensor, scales: Tensor, importance: Tensor, low: int, high: int
) -> Tensor:
    """Search the scales ``[rows, groups]`` of a symmetric grid for ``groups`` ``[rows, groups, parts, size]``.

    ``scales`` are the plain ones: they give the stored type, and stay where nothing is better. ``importance``
    broadcasts to ``groups``.
    """
    if _suits(groups):
        weights = _spread_out(importance, groups)
        limits = low, high, 0  # the last is for grids that have zeros
        return scale_loops.search(groups[:, :, 0], weights, scales, None, PARTS, limits)[0]
    found = torch.empty_like(scales)
    for chunk in chunks(groups):
        plain = scales[chunk].T.contiguous()
        none = torch.zeros_like(plain)
        search = _IntegerSearch(groups[chunk], importance, plain, (low, high), none)
        clipped = False
        for part in PARTS:
            search.round(plain.float() * part)
            search.consider(search.zeros)
            # As long as no code is cut off, the other sign gives the same values.
            clipped = clipped or search.peak() > high
            if clipped:
                search.turn()
                search.consider(search.zeros)
        found[chunk] = search.finish().T
    return found


def search_scales_and_zeros(
    groups: Tensor, scales: Tensor, zeros: Tensor, importance: Tensor, least_zero: int, high: int
) -> tuple[Tensor, Tensor]:
    """Search scales and zeros (floats) ``[rows, groups]`` of an asymmetric grid ``0..high``.

    No zero is below ``least_zero``. The rest is as of `search_scales`.
    """
    if _suits(groups):
        weights = _spread_out(importance, groups)
        limits = 0, high, least_zero
        return scale_loops.search(groups[:, :, 0], weights, scales, zeros, PARTS, limits)
    found, moved = torch.empty_like(scales), torch.empty_like(zeros)
    for chunk in chunks(groups):
        plain, middle = scales[chunk].T.contiguous(), _middle(groups[chunk]).T.contiguous()
        first = zeros[chunk].T.contiguous()
        search = _IntegerSearch(groups[chunk], importance, plain, (0, high), first)
        for part in PARTS:
            scale = plain.float() * part
            centre = (high / 2 - middle / scale).round()
            search.round(scale)
            for shift in (-1, 0, 1):
                search.consider((centre + shift).clamp_(least_zero, high))
        found[chunk], moved[chunk] = search.finish().T, search.zeros.T
    return found, moved


def _suits(groups: Tensor) -> bool:
    """Return whether the compiled loops are for this matrix: on a CPU its shape alone decides."""
    return groups.shape[2] == 1 and row_encoding.suits(groups[:, :, 0])


def _spread_out(importance: Tensor, groups: Tensor) -> Tensor:
    return importance[0, :, 0].expand(groups.shape[1], groups.shape[3]).contiguous()


def _middle(groups: Tensor) -> Tensor:
    return (groups.amin((-2, -1)) + groups.amax((-2, -1))) / 2


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
        return torch.mul(self.groups, self.spread(scale.reciprocal()), out=self._scaled)

    def begin(self, codes: Tensor) -> None:
        """Judge the scales to begin with, given their codes."""
        self.error = self._error(codes, self.scales.float())

    def take(self, codes: Tensor) -> Tensor:
        """Fit a scale to the codes of a candidate, keep it where its error is less, and return where that is (bool)."""
        products = self.total(torch.mul(codes, self.weighted, out=self._room))
        squares = torch.mul(codes, codes, out=self._room).mul_(self.importance)
        fit = torch.nan_to_num(products / self.total(squares), 0.0, 0.0, 0.0)
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
        return self.total(self.missed(codes, scale).square_().mul_(self.importance))

    def missed(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return what codes leave of the weights, in a buffer."""
        return torch.addcmul(self.groups, codes, scale, value=-1, out=self._room)

    def spread(self, scales: Tensor) -> Tensor:
        """Return scales so that they broadcast to the groups."""
        return scales

    def total(self, values: Tensor) -> Tensor:
        """Sum over a group."""
        return values.sum(0)


class _IntegerSearch(Search):
    """`Search` on integers, with the best zero so far; scales and zeros are ``[groups, rows]``.

    ``groups`` ``[rows, groups, parts, size]`` are copied with rows as the last dimension, so that each step is vector
    instructions, whatever the size of a group.
    """

    def __init__(
        self,
        groups: Tensor,
        importance: Tensor,
        scales: Tensor,
        codes: tuple[int, int],
        zeros: Tensor,
    ) -> None:
        columns_first = groups.permute(3, 1, 2, 0).contiguous(), importance.permute(3, 1, 2, 0)
        super().__init__(*columns_first, scales, lambda fitted: fitted.to(scales.dtype))
        self.range, self.zeros = codes, zeros
        self._codes = torch.empty_like(self.groups)
        self.round(scales.float())
        self.begin(self._clipped(zeros))

    def round(self, scale: Tensor) -> None:
        """Round to multiples of a candidate's scale."""
        self._rounded = self.in_units(scale).round_()

    def peak(self) -> float:
        """Return the largest magnitude that `round` gave."""
        least, most = self._rounded.aminmax()
        return max(-least.item(), most.item())

    def turn(self) -> None:
        """Go over to the scale of the other sign."""
        self._rounded.neg_()

    def consider(self, zero: Tensor) -> None:
        """Take the codes of a candidate, fit their scale, and keep it where it is better."""
        self.zeros = torch.where(self.take(self._clipped(zero)), zero, self.zeros)

    def finish(self) -> Tensor:
        """Fit the winner again, and return the scales."""
        for _ in range(POLISH):
            self.round(self.scales.float())
            self.consider(self.zeros)
        return self.scales

    def _clipped(self, zero: Tensor) -> Tensor:
        """Return what `round` gave, clamped to the codes less the zero."""
        low, high = self.range
        if high < -2 * low:  # symmetric: the limits are numbers, which is faster
            return torch.clamp(self._rounded, low, high, out=self._codes)
        least, most = (low - zero).unsqueeze(1), (high - zero).unsqueeze(1)
        return torch.clamp(self._rounded, least, most, out=self._codes)

    def spread(self, scales: Tensor) -> Tensor:
        return scales.unsqueeze(1)

    def total(self, values: Tensor) -> Tensor:
        # Part by part: one long sum would depend on the number of threads.
        return values.sum(0).sum(1)

    def missed(self, codes: Tensor, scale: Tensor) -> Tensor:
        torch.mul(codes, self.spread(scale), out=self._room)
        return torch.sub(self.groups, self._room, out=self._room)
