"""Scales and gains that are learned: each times a factor that Adam fits, and rounded to its stored type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.model.learned_codes import ALL, FIRST, SECOND
from quantforge.model.tuning_bounds import MOST

EPSILON = 1e-8  # of Adam


@dataclass(slots=True, eq=False)
class Learned:
    """One tensor of scales, or the gains of one norm.

    Attributes:
        start: float32, what it was.
        dtype: in which it is stored.
        factor: what is learned, 0 for no change.
        rate: with which it is learned at first.
        offset: that the norm adds to what is stored.
        known: a factor, and what is stored at it.
    """

    start: Tensor
    dtype: torch.dtype
    factor: Tensor
    rate: float
    offset: float = 0.0
    known: tuple[Tensor, Tensor] | None = None
    _moments: tuple[Tensor, Tensor] | None = None
    _steps: int = 0

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype, rate: float, offset: float = 0.0) -> Learned:
        """Begin with a value."""
        start = value.detach().float().clone()
        return cls(start, dtype, torch.zeros_like(start), rate, offset)

    @classmethod
    def at(cls, start: Tensor, now: Tensor, rate: float, offset: float) -> Learned:
        """Go on with a value that was ``start`` and is stored as ``now``."""
        one = cls.of(start, now.dtype, rate, offset)
        factor = (now.float() + offset) / (one.start + offset) - 1
        one.factor.copy_(torch.where(factor.isfinite(), factor, 0).clamp(-MOST, MOST))
        one.known = (one.factor.clone(), now)
        return one

    def stored(self, rows: slice = ALL) -> Tensor:
        """Return the present value of a run of rows in its stored type."""
        before, own = self.start[rows], self.factor[rows]
        start = before + self.offset
        value = (start + start * own - self.offset).to(self.dtype)
        seen = value.float()  # of floats of 8 bits torch compares none
        kept = seen.isfinite() & ((seen != 0) | (before == 0))
        found = torch.where(kept, seen, before)
        if self.known is not None:  # to the last bit
            factor, now = (one[rows] for one in self.known)
            found = torch.where(own == factor, now.float(), found)
        return found.to(self.dtype)

    def step(self, gradient: Tensor | None, share: float) -> None:
        """Move the factor as Adam does, within its bounds; nothing without a gradient.

        Of torch's Adam only the formula is taken: importing it takes two seconds and 160 MB.

        Args:
            gradient: of the loss by the factor.
            share: of the first rate that is left.
        """
        if gradient is None:
            return
        if self._moments is None:
            self._moments = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self._steps += 1
        mean, square = self._moments
        mean.lerp_(gradient, 1 - FIRST)
        square.lerp_(gradient.square(), 1 - SECOND)
        size = (square / (1 - SECOND**self._steps)).sqrt_().add_(EPSILON)
        rate = self.rate * share / (1 - FIRST**self._steps)
        self.factor.sub_(mean / size, alpha=rate).clamp_(-MOST, MOST)

    def gradient(self, of_value: Tensor, rows: slice = ALL) -> Tensor:
        """Return the gradient of the factor of a run of rows, given that of the value."""
        return of_value * (self.start[rows] + self.offset)
