"""Scales that minimise the weighted squared error of a group instead of covering its range.

For codes ``q`` and column weights ``h`` the best scale is a least-squares fit, ``s = A / B`` with ``A = sum h w q``
and ``B = sum h q^2``, and the error of any scale with those codes is ``sum h w^2 - 2 s A + s^2 B``. So each
candidate costs one rounding: its codes give ``A`` and ``B``, the fitted scale is rounded to its stored type, and the
error is exact for the rounded one. Encoding again with that scale can only lower it.

A symmetric grid has one code more on its negative side; a scale of either sign is tried, so that the longer side
can serve the longer tail of the group (METHODS: "full-range symmetric", auto-round).
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 17  # elements of a chunk of rows: its temporaries stay in a core's cache
RANGES = 24  # candidate ranges of each coding
NARROWEST = 0.4  # of the full range
POLISH = 2  # rounds of encoding again and fitting again


def search_scales(
    groups: Tensor, scales: Tensor, importance: Tensor, low: int, high: int
) -> Tensor:
    """Search the scales ``[rows, groups]`` of a symmetric grid for ``groups`` ``[rows, groups, size]``.

    ``scales`` are the plain ones: they give the stored type, and stay where nothing is better. ``importance``
    broadcasts to ``groups``.
    """
    found = torch.empty_like(scales)
    step = max(1, CHUNK // max(1, groups[0].numel()))
    for start in range(0, len(groups), step):
        rows = slice(start, start + step)
        search = _Search(groups[rows], importance, scales[rows], None, low, high)
        for sign in (1.0, -1.0):
            for part in _parts(groups.device):
                search.consider(scales[rows].float() * (sign * part))
        found[rows] = search.polished()[0]
    return found


def search_scales_and_zeros(
    groups: Tensor, scales: Tensor, zeros: Tensor, importance: Tensor, high: int
) -> tuple[Tensor, Tensor]:
    """Search scales and zeros (float, integer-valued) ``[rows, groups]`` of an asymmetric grid; as `search_scales`."""
    found, moved = torch.empty_like(scales), torch.empty_like(zeros)
    step = max(1, CHUNK // max(1, groups[0].numel()))
    for start in range(0, len(groups), step):
        rows = slice(start, start + step)
        search = _Search(groups[rows], importance, scales[rows], zeros[rows], 0, high)
        middle = (groups[rows].amin(-1) + groups[rows].amax(-1)) / 2
        for part in _parts(groups.device):
            scale = scales[rows].float() * part
            centre = (high / 2 - middle / scale).round()
            for shift in (-1, 0, 1):
                search.consider(scale, (centre + shift).clamp_(0, high))
        found[rows], moved[rows] = search.polished()
    return found, moved


def _parts(device: torch.device) -> list[float]:
    return torch.linspace(1.05, NARROWEST, RANGES, dtype=torch.float64).tolist()


class _Search:
    """The best scale (and zero) so far of each group of a chunk."""

    def __init__(
        self,
        groups: Tensor,
        importance: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        low: int,
        high: int,
    ) -> None:
        self.groups, self.importance, self.low, self.high = groups, importance, low, high
        self.weighted = groups * importance
        self.scales, self.zeros = scales.clone(), None if zeros is None else zeros.clone()
        products, squares = self._moments(scales.float(), zeros)
        self.error = _error(scales.float(), products, squares)

    def consider(self, scale: Tensor, zero: Tensor | None = None) -> None:
        """Take the codes of a candidate, fit their scale, and keep it where it is better."""
        products, squares = self._moments(scale, zero)
        fitted = (products / squares).to(self.scales.dtype)
        error = _error(fitted.float(), products, squares)
        # A group without a non-zero code gives 0/0, and comparisons with NaN are false.
        better = (error < self.error) & (fitted != 0) & fitted.isfinite()
        self.error = torch.where(better, error, self.error)
        self.scales = torch.where(better, fitted, self.scales)
        if self.zeros is not None and zero is not None:
            self.zeros = torch.where(better, zero, self.zeros)

    def polished(self) -> tuple[Tensor, Tensor | None]:
        for _ in range(POLISH):
            self.consider(self.scales.float(), self.zeros)
        return self.scales, self.zeros

    def _moments(self, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        codes = (self.groups * scale.reciprocal().unsqueeze(-1)).round_()
        if zero is None:
            codes.clamp_(self.low, self.high)
        else:
            zero = zero.unsqueeze(-1)
            codes.clamp_(self.low - zero, self.high - zero)
        products = (codes * self.weighted).sum(-1)
        return products, codes.square_().mul_(self.importance).sum(-1)


def _error(scale: Tensor, products: Tensor, squares: Tensor) -> Tensor:
    """Squared error of ``scale``, less the constant ``sum h w^2``."""
    return scale * (scale * squares - 2 * products)
