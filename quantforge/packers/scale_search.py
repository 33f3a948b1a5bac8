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

from quantforge.packers import rows, scale_loops
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
        plain = scales[chunk]
        search = _Search(groups[chunk], importance, (low, high), plain, torch.zeros_like(plain))
        for part in PARTS:
            search.consider(plain.float() * part, search.zeros)
            search.consider(plain.float() * -part, search.zeros)
        found[chunk] = search.finish()
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
        plain, middle = scales[chunk], _middle(groups[chunk])
        search = _Search(groups[chunk], importance, (0, high), plain, zeros[chunk])
        for part in PARTS:
            scale = plain.float() * part
            centre = (high / 2 - middle / scale).round()
            for shift in (-1, 0, 1):
                search.consider(scale, (centre + shift).clamp_(least_zero, high))
        found[chunk], moved[chunk] = search.finish(), search.zeros
    return found, moved


def _suits(groups: Tensor) -> bool:
    """Whether the compiled loops are for this matrix: its shape alone decides."""
    return groups.shape[2] == 1 and rows.suits(groups[:, :, 0])


def _spread_out(importance: Tensor, groups: Tensor) -> Tensor:
    return importance[0, :, 0].expand(groups.shape[1], groups.shape[3]).contiguous()


def _total(values: Tensor) -> Tensor:
    """Sum over a group. Part by part: one long sum would depend on the number of threads."""
    return values.sum(3).sum(2)


def _spread(parameter: Tensor) -> Tensor:
    return parameter[..., None, None]


def _middle(groups: Tensor) -> Tensor:
    return (groups.amin((-2, -1)) + groups.amax((-2, -1))) / 2


def _chunks(groups: Tensor) -> list[slice]:
    step = max(1, CHUNK // max(1, groups[0].numel()))
    return [slice(start, start + step) for start in range(0, len(groups), step)]


class _Search:
    """The best scale and zero so far of each group of a chunk."""

    def __init__(
        self,
        groups: Tensor,
        importance: Tensor,
        codes: tuple[int, int],
        scales: Tensor,
        zeros: Tensor,
    ) -> None:
        self.groups, self.importance, self.range = groups, importance, codes
        self.weighted = groups * importance
        self.scales, self.zeros = scales.clone(), zeros.clone()
        self.error = self._error(self._codes(scales.float(), zeros), scales.float())

    def consider(self, scale: Tensor, zero: Tensor) -> None:
        """Take the codes of a candidate, fit their scale, and keep it where it is better."""
        codes = self._codes(scale, zero)
        products = _total(codes * self.weighted)
        fitted = products / _total(codes.square().mul_(self.importance))
        fitted = fitted.to(self.scales.dtype)
        error = self._error(codes, fitted.float())
        # Without a non-zero code the fit is 0/0, and a comparison with NaN is false.
        better = (error < self.error) & (fitted != 0) & fitted.isfinite()
        self.error = torch.where(better, error, self.error)
        self.scales = torch.where(better, fitted, self.scales)
        self.zeros = torch.where(better, zero, self.zeros)

    def finish(self) -> Tensor:
        for _ in range(POLISH):
            self.consider(self.scales.float(), self.zeros)
        return self.scales

    def _codes(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Codes less the zero."""
        codes = (self.groups * _spread(scale.reciprocal())).round_()
        low, high = self.range
        if high < -2 * low:  # symmetric: the limits are numbers, which is faster
            return codes.clamp_(low, high)
        zero = _spread(zero)
        return codes.clamp_(low - zero, high - zero)

    def _error(self, codes: Tensor, scale: Tensor) -> Tensor:
        # Not by the expanded square: its terms cancel, and near ties would be decided by rounding errors.
        residual = torch.addcmul(self.groups, codes, _spread(scale), value=-1)
        return _total(residual.square_().mul_(self.importance))
