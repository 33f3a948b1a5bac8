"""Scales that minimise the weighted squared error of a group instead of covering its range.

A candidate scale gives codes ``q``; the best scale for those codes is a least-squares fit over the columns of the
group, ``s = sum h w q / sum h q^2`` with column weights ``h``. It is rounded to its stored type before its error
counts, so what wins here also wins in a file; encoding again with it can only lower the error.

A symmetric grid has one code more on its negative side. Scales of both signs are tried, so that the longer side can
serve the longer tail of the group ("full-range symmetric" in AutoRound's documentation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.packers import row_codes as rows
from quantforge.packers import scale_loops
from quantforge.packers.scale_loops import POLISH

CHUNK = 1 << 17  # elements of a chunk of rows: its temporaries stay in a core's cache
RANGES = 14  # candidates of each sign (or zero), from `WIDEST` to `NARROWEST` times the whole range
WIDEST, NARROWEST = 1.05, 0.4
PARTS = [WIDEST - (WIDEST - NARROWEST) / (RANGES - 1) * index for index in range(RANGES)]


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
    for chunk in _chunks(groups):
        plain = scales[chunk].T.contiguous()
        search = _Search(groups[chunk], importance, (low, high), plain, torch.zeros_like(plain))
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

    No zero is below ``least_zero``.

    Otherwise as `search_scales`.
    """
    if _suits(groups):
        weights = _spread_out(importance, groups)
        limits = 0, high, least_zero
        return scale_loops.search(groups[:, :, 0], weights, scales, zeros, PARTS, limits)
    found, moved = torch.empty_like(scales), torch.empty_like(zeros)
    for chunk in _chunks(groups):
        plain, middle = scales[chunk].T.contiguous(), _middle(groups[chunk]).T.contiguous()
        search = _Search(groups[chunk], importance, (0, high), plain, zeros[chunk].T.contiguous())
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
    return groups.shape[2] == 1 and rows.suits(groups[:, :, 0])


def _spread_out(importance: Tensor, groups: Tensor) -> Tensor:
    return importance[0, :, 0].expand(groups.shape[1], groups.shape[3]).contiguous()


def _middle(groups: Tensor) -> Tensor:
    return (groups.amin((-2, -1)) + groups.amax((-2, -1))) / 2


def _chunks(groups: Tensor) -> list[slice]:
    step = max(1, CHUNK // max(1, groups[0].numel()))
    return [slice(start, start + step) for start in range(0, len(groups), step)]


class _Search:
    """The best scale and zero so far of each group of a chunk, ``[groups, rows]``.

    The columns of a group lie along the first dimension: then what belongs to neighbours is neighbours in memory, and
    each step is vector instructions, whatever the size of a group. Three buffers serve all candidates.
    """

    def __init__(
        self,
        groups: Tensor,
        importance: Tensor,
        codes: tuple[int, int],
        scales: Tensor,
        zeros: Tensor,
    ) -> None:
        self.groups = groups.permute(3, 1, 2, 0).contiguous()  # [size, groups, parts, rows]
        self.importance, self.range = importance.permute(3, 1, 2, 0), codes
        self.weighted = self.groups * self.importance
        self.scales, self.zeros = scales, zeros
        self._rounded, self._codes, self._room = (torch.empty_like(self.groups) for _ in range(3))
        self.round(scales.float())
        self._clip(zeros)
        self.error = self._error(scales.float())

    def round(self, scale: Tensor) -> None:
        """Round to multiples of a candidate's scale."""
        torch.mul(self.groups, scale.reciprocal().unsqueeze(1), out=self._rounded).round_()

    def peak(self) -> float:
        """Return the largest magnitude that `round` gave."""
        least, most = self._rounded.aminmax()
        return max(-least.item(), most.item())

    def turn(self) -> None:
        """Go over to the scale of the other sign."""
        self._rounded.neg_()

    def consider(self, zero: Tensor) -> None:
        """Take the codes of a candidate, fit their scale, and keep it where it is better."""
        self._clip(zero)
        products = self._total(torch.mul(self._codes, self.weighted, out=self._room))
        squares = torch.mul(self._codes, self._codes, out=self._room).mul_(self.importance)
        fitted = (products / self._total(squares)).to(self.scales.dtype)
        scale = fitted.float()
        error = self._error(scale)
        # Without a non-zero code the fit is 0/0, beyond its type infinite: an error is NaN then, and not smaller.
        better = (error < self.error) & (scale != 0)
        self.error = torch.where(better, error, self.error)
        self.scales = torch.where(better, fitted, self.scales)
        self.zeros = torch.where(better, zero, self.zeros)

    def finish(self) -> Tensor:
        for _ in range(POLISH):
            self.round(self.scales.float())
            self.consider(self.zeros)
        return self.scales

    def _clip(self, zero: Tensor) -> None:
        """Turn rounded values into codes less the zero."""
        low, high = self.range
        if high < -2 * low:  # symmetric: the limits are numbers, which is faster
            torch.clamp(self._rounded, low, high, out=self._codes)
        else:
            torch.clamp(
                self._rounded,
                (low - zero).unsqueeze(1),
                (high - zero).unsqueeze(1),
                out=self._codes,
            )

    def _error(self, scale: Tensor) -> Tensor:
        # Not by the expanded square: its terms cancel, and near ties would be decided by rounding errors.
        torch.mul(self._codes, scale.unsqueeze(1), out=self._room)
        torch.sub(self.groups, self._room, out=self._room)
        return self._total(self._room.square_().mul_(self.importance))

    @staticmethod
    def _total(values: Tensor) -> Tensor:
        """Sum over a group. Part by part: one long sum would depend on the number of threads."""
        return values.sum(0).sum(1)
