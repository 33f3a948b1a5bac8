"""The search of `scale_search` on integers, which have zero points or one code more on their negative side.

On a symmetric grid scales of both signs are tried, so that the longer side can serve the longer tail of the group
("full-range symmetric" in AutoRound's documentation); else each scale with three zeros. Large matrices are searched by
`scale_loops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.packers import row_codes, scale_loops
from quantforge.packers.scale_loops import POLISH
from quantforge.packers.scale_search import Search, chunks

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
    return groups.shape[2] == 1 and row_codes.suits(groups[:, :, 0])


def _spread_out(importance: Tensor, groups: Tensor) -> Tensor:
    return importance[0, :, 0].expand(groups.shape[1], groups.shape[3]).contiguous()


def _middle(groups: Tensor) -> Tensor:
    return (groups.amin((-2, -1)) + groups.amax((-2, -1))) / 2


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

    def _spread(self, scales: Tensor) -> Tensor:
        return scales.unsqueeze(1)

    def _total(self, values: Tensor) -> Tensor:
        # Part by part: one long sum would depend on the number of threads.
        return values.sum(0).sum(1)

    def _missed(self, codes: Tensor, scale: Tensor) -> Tensor:
        torch.mul(codes, self._spread(scale), out=self._room)
        return torch.sub(self.groups, self._room, out=self._room)
