"""Codes that are learned: each has an offset, in steps of its grid, which is rounded before it is used.

The gradient of an offset is that of the value times the scale, as if nothing were rounded (straight through). Gradients
of a few rows say little of a single code, so that offsets begin at 0, half a step from any change, and go at a rate at
which it takes many steps that agree. A code that changed on noise costs more than the rest gains: until the rate has
fallen the divergence is above what it began with.

The optimizer is Adam with the second moment kept by row and column, as in Adafactor (Shazeer and Stern, arXiv
1804.04235), and steps no longer than the rate: with offsets and first moments in 16 bits a weight takes four bytes
beside its code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantforge.model.tuning_bounds import MOST_STEPS

BESIDE = 0.49  # of a step: how far an offset may go beyond the last code that it can reach
FIRST, SECOND = 0.9, 0.99  # shares of the moments that a step keeps


@dataclass(slots=True, eq=False)
class LearnedCodes:
    """The codes ``[out_features, in_features]`` of one linear.

    Attributes:
        start: what they were.
        limits: the least and the greatest code.
        rate: the first step of Adam, in steps of the grid.
        offsets: what is learned, 0 for no change.
    """

    start: Tensor
    limits: tuple[int, int]
    rate: float
    offsets: Tensor = field(init=False)
    _moment: Tensor = field(init=False)
    _rows: Tensor = field(init=False)
    _columns: Tensor = field(init=False)
    _steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Begin with no change."""
        self.offsets = torch.zeros_like(self.start, dtype=torch.float16)
        self._moment = torch.zeros_like(self.start, dtype=torch.bfloat16)
        self._rows, self._columns = (
            torch.zeros(size, device=self.start.device) for size in self.start.shape
        )

    def stored(self) -> Tensor:
        """Return the present codes."""
        return (self.start + self.snapshot()).to(self.start.dtype)

    def step(self, gradient: Tensor, share: float) -> None:
        """Move the offsets.

        Args:
            gradient: of the loss by the offsets, float32 ``[out_features, in_features]``.
            share: of the first rate that is left.
        """
        self._steps += 1
        squares = gradient.square()
        self._rows.lerp_(squares.mean(1), 1 - SECOND)
        self._columns.lerp_(squares.mean(0), 1 - SECOND)
        moment = self._moment.float().lerp_(gradient, 1 - FIRST)
        self._moment.copy_(moment)
        mean = self._rows.mean()
        if not float(mean):
            return  # no gradient has reached it
        seen = self._rows[:, None] * (self._columns / mean) / (1 - SECOND**self._steps)
        size = seen.sqrt_().clamp_(min=torch.finfo(torch.float32).tiny)
        rate = self.rate * share / (1 - FIRST**self._steps)
        least, most = (limit - self.start.float() for limit in self.limits)
        moved = self.offsets.float().sub_(moment.div_(size).clamp_(-1, 1), alpha=rate)
        moved = torch.maximum(moved, least.clamp_(min=-MOST_STEPS) - BESIDE)
        self.offsets.copy_(torch.minimum(moved, most.clamp_(max=MOST_STEPS) + BESIDE))

    def snapshot(self) -> Tensor:
        """Return by how many steps each code has changed, int8."""
        return self.offsets.round().to(torch.int8)

    def restore(self, snapshot: Tensor) -> None:
        """Go back to a snapshot."""
        self.offsets.copy_(snapshot)
