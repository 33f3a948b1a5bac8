"""What is learned: scales and gains, each times a factor, and codes, each with an offset that is rounded.

A scale or gain is multiplied with a factor that Adam fits, and rounded to its stored type.

A code has an offset, in steps of its grid, which is rounded before it is used. The gradient of an offset is that of the
value times the scale, as if nothing were rounded (straight through). Gradients of a few rows say little of a single
code, so that offsets begin at 0, half a step from any change, and go at a rate at which it takes many steps that agree.
A code that changed on noise costs more than the rest gains: until the rate has fallen the divergence is above what it
began with.

The optimizer of codes is Adam with the second moment kept by row and column, as in Adafactor (Shazeer and Stern, arXiv
1804.04235), and steps no longer than the rate: with offsets and first moments in 16 bits a weight takes four bytes
beside its code. A step comes in two halves, so that runs of rows may go side by side while they are in the caches:
`see` takes the gradients of a run, `seen` what all runs have returned, and then `move` moves the codes of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from quantforge.packers.levels import look_up
from quantforge.quantizers.tuning.bounds import MOST, MOST_STEPS

EPSILON = 1e-8  # of Adam
BESIDE = 0.49  # of a step: how far an offset may go beyond the last code that it can reach
FIRST, SECOND = 0.9, 0.99  # shares of the moments that a step keeps
BITS = 14
UNIT = 1 << BITS  # offsets are integers of 16 bits, in this part of a step
SIDES = (-BESIDE, BESIDE)
ALL = slice(None)


@dataclass(slots=True, eq=False)
class LearnedCodes:
    """The codes ``[out_features, in_features]`` of one linear.

    Attributes:
        start: what they were.
        limits: the least and the greatest code.
        rate: the first step of Adam, in steps of the grid.
        offsets: what is learned, int16 in `UNIT` of a step, 0 for no change.
    """

    start: Tensor
    limits: tuple[int, int]
    rate: float
    offsets: Tensor = field(init=False)
    _moment: Tensor = field(init=False)
    _rows: Tensor = field(init=False)
    _columns: Tensor = field(init=False)
    _steps: int = field(init=False, default=0)
    _rate: float = field(
        init=False, default=0.0
    )  # of a step, and what moments are multiplied with in it
    _factors: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no change."""
        self.offsets = torch.zeros_like(self.start, dtype=torch.int16)
        self._moment = torch.zeros_like(self.start, dtype=torch.bfloat16)
        self._rows, self._columns = (
            torch.zeros(size, device=self.start.device) for size in self.start.shape
        )

    def stored(self, rows: slice = ALL) -> Tensor:
        """Return the present codes of a run of rows."""
        start = self.start[rows]
        return self._changes(rows).to(start.dtype).add_(start)  # modulo 256, where that is unsigned

    def step(self, gradient: Tensor, share: float) -> None:
        """Move the offsets.

        Args:
            gradient: of the loss by the offsets, float32 ``[out_features, in_features]``.
            share: of the first rate that is left.
        """
        self.seen([self.see(gradient)], share)
        self.move()

    def see(self, gradient: Tensor, rows: slice = ALL) -> Tensor:
        """Take the gradient of a run of rows, and return what `seen` wants of it."""
        moment = self._moment[rows]
        moment.copy_(moment.float().lerp_(gradient, 1 - FIRST))
        squares = gradient.square()
        self._rows[rows].lerp_(squares.mean(1), 1 - SECOND)
        return squares.sum(0)

    def seen(self, sums: Iterable[Tensor], share: float) -> None:
        """Take what `see` has returned of all runs, in their order; ``share`` of the first rate is left."""
        self._steps += 1
        self._columns.lerp_(reduce(torch.add, sums) / len(self.start), 1 - SECOND)
        tiny = torch.finfo(torch.float32).tiny  # no gradient has reached it: its moment is 0, too
        mean = self._rows.mean().clamp_(min=tiny)
        self._rate = self.rate * share / (1 - FIRST**self._steps) * UNIT
        of_rows = (self._rows / (1 - SECOND**self._steps)).sqrt_().clamp_(min=tiny)
        of_columns = (self._columns / mean).sqrt_().clamp_(min=tiny)
        self._factors = self._rate / of_rows, of_columns.reciprocal_()

    def move(self, rows: slice = ALL) -> None:
        """Move the offsets of a run of rows, after `seen`."""
        low, high = ((limit + side) * UNIT for limit, side in zip(self.limits, SIDES, strict=True))
        furthest, rate = (MOST_STEPS + BESIDE) * UNIT, self._rate
        (of_rows, of_columns), before = self._factors, self.offsets[rows]
        step = self._moment[rows].float().mul_(of_rows[rows, None]).mul_(of_columns)
        self._narrowed(step, rows)
        codes = self.start[rows].float().mul_(UNIT)
        moved = before.float().sub_(step.clamp_(-rate, rate)).add_(codes).clamp_(low, high)
        before.copy_(moved.sub_(codes).clamp_(-furthest, furthest).round_())

    def snapshot(self) -> Tensor:
        """Return by how many steps each code has changed, int8."""
        return self._changes(ALL).to(torch.int8)

    def restore(self, snapshot: Tensor) -> None:
        """Go back to a snapshot."""
        self.offsets.copy_(snapshot.to(torch.int16) << BITS)

    def _narrowed(self, step: Tensor, rows: slice) -> None:
        """Make the steps shorter, in place, of offsets in a run of rows whose neighbours are further than others."""

    def _changes(self, rows: slice) -> Tensor:
        """Return by how many steps the codes of a run of rows have changed, int16."""
        return self.offsets[rows].add(UNIT >> 1).bitwise_right_shift_(BITS)


@dataclass(slots=True, eq=False)
class LearnedPlaces(LearnedCodes):
    """Codes that pick values of a table: what is learned are places among these in rising order.

    The gradient is that of a value, in any unit, and the rate that of the least gap between values. An offset goes as
    far in values wherever it is, so that a code takes twice as many steps to change over a gap twice as wide. With
    steps that are as long in places, wide gaps change as soon, and cost most where that was noise.

    Attributes:
        codes: by their places.
        shares: what a step is multiplied with between a place and the next.
    """

    codes: Tensor
    shares: Tensor

    @classmethod
    def of(cls, codes: Tensor, values: Sequence[int], rate: float) -> LearnedPlaces:
        """Begin with the codes of ``values``, of which the first stands for those that are equal."""
        rising = sorted({value: code for code, value in reversed([*enumerate(values)])}.items())
        places = {value: place for place, (value, _) in enumerate(rising)}
        place_of = torch.tensor([places[value] for value in values], dtype=torch.uint8)
        gaps = torch.tensor([value for value, _ in rising], dtype=torch.float32).diff()
        found = torch.tensor([code for _, code in rising], dtype=torch.uint8)
        start, limits = look_up(place_of, codes), (0, len(rising) - 1)
        return cls(start, limits, rate, found, gaps.min() / gaps)

    def stored(self, rows: slice = ALL) -> Tensor:
        """Return the present codes of a run of rows."""
        return look_up(self.codes, LearnedCodes.stored(self, rows))

    def _narrowed(self, step: Tensor, rows: slice) -> None:
        """Multiply the steps with the share of the gap into which they go."""
        at = self.start[rows].int().bitwise_left_shift_(BITS).add_(self.offsets[rows])
        gap = at.sub_((step > 0).int()).bitwise_right_shift_(BITS).clamp_(0, len(self.shares) - 1)
        step.mul_(look_up(self.shares, gap.to(torch.uint8)))


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
