"""A linear whose scales are learned, each times a factor, and maybe its codes, each with an offset that is rounded.

Every grid's values are a sum over its scales (and minima, and what a block multiplies them with): each times what the
codes make of it. So the gradient of one is that of the matrix times what the packer decodes with it 1 and the others 0.
Codes, and the integers that groups have as scales under a scale of their block, are learned in whole steps: the
gradient is that of the matrix times what the packer decodes with 1, less what it decodes with 0.

For plain integers with scales per group or row all of that is a product or two with the codes and the scales; one strip
of rows at a time is decoded, and its gradients are computed, while it is in a core's cache (`TunedMatrix.strips`).

A scale or gain is multiplied by a factor that Adam fits, and rounded to its stored type.

A code has an offset, in steps of its grid, which is rounded before it is used. The gradient of an offset is that of the
value times the scale, as if nothing were rounded (straight-through). The gradients of a few rows say little about a
single code. So offsets start at 0, half a step from any change, with a learning rate at which a change takes many
optimizer steps that agree. A code that changes because of noise costs more than the others gain: the divergence stays
above its starting value until the learning rate has decayed.

The optimizer of codes is Adam with the second moment stored per row and column, as in Adafactor (Shazeer and Stern,
arXiv 1804.04235), and updates limited to the learning rate: with offsets and first moments in 16 bits a weight takes
four bytes beside its code. An optimizer step has three parts, so that strips of rows can be processed in parallel while
they are in the caches: `see` takes the gradients of a strip, `seen` the results of all strips, and `move` updates the
codes of each strip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quantforge.packers import packer_of
from quantforge.packers.integer import code_range
from quantforge.packers.nearest_levels import look_up
from quantforge.packers.tensor import OF_INPUT, OF_MATRIX, QuantizedTensor
from quantforge.quantizers.tuning import MOST, MOST_STEPS
from quantforge.scheme import Scheme

CODES = "codes"
INTEGERS = ("scales", "mins")  # parameters that are integers under a scale of their block
RATE = 1e-2  # of factors under codes of 0 bits
IN_BLOCKS = 0.3  # of it, where one multiplies the scales of all groups of a block
STRIP = 1 << 16  # weights of a strip of rows, whose temporaries stay in the second cache
EPSILON = 1e-8  # of Adam
BESIDE = 0.49  # of a step: how far an offset may go beyond the last code that it can reach
FIRST, SECOND = 0.9, 0.99  # shares of the moments that a step keeps
BITS = 14
UNIT = 1 << BITS  # offsets are integers of 16 bits, in this part of a step
SIDES = (-BESIDE, BESIDE)
ALL = slice(None)


class StripGradients(NamedTuple):
    """Gradients of the factors of a strip of rows, and the input of `LearnedCodes.seen`, by name."""

    factors: dict[str, Tensor]
    sums: dict[str, Tensor]


@dataclass(slots=True, eq=False)
class TunedMatrix:
    """A linear whose scales are learned.

    Attributes:
        tensor: the linear as it was written.
        scales: learned parameters, by name.
        codes: what is learned in whole steps: integer parameters by name, and `CODES`.
        held: the current scales of plain integers, float32, between `hold` and `let_go`.
    """

    tensor: QuantizedTensor
    scales: dict[str, Learned]
    codes: dict[str, LearnedCodes]
    held: Tensor | None = None

    @classmethod
    def of(cls, tensor: QuantizedTensor, rate: float) -> TunedMatrix:
        """Start from a linear as it was written.

        Args:
            tensor: the linear.
            rate: initial learning rate of codes and integers, 0 to freeze them.
        """
        first = factor_rate(tensor.scheme)
        scales = {
            key: Learned.of(value, value.dtype, first)
            for key, value in tensor.parameters.items()
            if value.is_floating_point() and key not in (*OF_INPUT, *OF_MATRIX)
        }
        return cls(tensor, scales, _learned_codes(tensor, rate) if rate else {})

    @property
    def device(self) -> torch.device:
        """Return the device of the codes and of everything that is learned."""
        return self.tensor.codes.device

    def result(self) -> QuantizedTensor:
        """Return the linear as it is now."""
        changed = {key: one.stored() for key, one in self.scales.items()}
        changed |= {key: one.stored() for key, one in self.codes.items()}
        codes = changed.pop(CODES, self.tensor.codes)
        return replace(self.tensor, codes=codes, parameters={**self.tensor.parameters, **changed})

    def hold(self) -> None:
        """Cache the current scales for `weight` and `see`, until `let_go`."""
        self.held = self._now(ALL) if self._plain else None

    def let_go(self) -> None:
        """Drop the cached scales."""
        self.held = None

    def strips(self) -> Sequence[slice]:
        """Return strips of rows that may be processed in parallel: one if rows depend on each other."""
        rows, columns = self.tensor.shape
        step = max(1, STRIP // columns) if self._plain and self.device.type == "cpu" else rows
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def weight(self, rows: slice = ALL) -> Tensor:
        """Decode the current matrix ``[out_features, in_features]``, or one of the `strips` of it."""
        if not self._plain:
            return self.result().decode()
        return self._scaled(self._values(rows), rows)

    def see(self, gradient: Tensor, rows: slice, weight: Tensor) -> StripGradients:
        """Take the gradient of one of the `strips`: the first part of an optimizer step.

        Args:
            gradient: of ``weight``; overwritten.
            rows: the strip.
            weight: what `weight` returned for it.

        Returns:
            An argument of `seen`, which takes those of all strips.
        """
        if not self._plain:
            found = self.code_gradients(gradient).items()
            squares = {key: self.codes[key].see(one) for key, one in found}
            return StripGradients(self.scale_gradients(gradient), squares)
        scales, now = self.scales["scales"], self._now(rows)
        codes, moved = self.codes.get(CODES), dict[str, Tensor]()
        sums = _by_group(gradient * weight, scales.start).sum(-1)
        if codes is not None:
            moved[CODES] = codes.see(self._scaled(gradient, rows), rows)
        return StripGradients(
            {"scales": scales.gradient((sums / now).where(now != 0, 0), rows)}, moved
        )

    def seen(self, strips: Iterable[StripGradients], share: float) -> dict[str, Tensor]:
        """Return the gradients of the factors, given the results of `see` for all strips in order.

        ``share`` is the part of the initial learning rate that applies to what is learned in steps.
        """
        found = [*strips]
        for key, one in self.codes.items():
            one.seen([strip.sums[key] for strip in found], share)
        return {key: torch.cat([strip.factors[key] for strip in found]) for key in self.scales}

    def move(self, rows: slice) -> None:
        """Update what is learned in steps, of one of the `strips`: the last part of an optimizer step."""
        for one in self.codes.values():
            one.move(rows if self._plain else ALL)

    def scale_gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the factors, given that of the matrix ``[out_features, in_features]``."""
        if self._plain:
            scales = self.scales["scales"]
            products = self._values(ALL).mul_(gradient)
            return {"scales": scales.gradient(_by_group(products, scales.start).sum(-1))}
        now, found = self.result(), {}
        none = {key: torch.zeros_like(one.start) for key, one in self.scales.items()}
        for key, one in self.scales.items():
            products = gradient * _decoded(now, none | {key: torch.ones_like(one.start)})
            found[key] = one.gradient(products.reshape(*one.start.shape, -1).sum(-1))
        return found

    def code_gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of what is learned in steps, given that of the matrix."""
        if self._plain and self.codes:
            return {CODES: self._scaled(gradient.clone(), ALL)}
        now, found = self.result(), {}
        for key, one in self.codes.items():
            step = _decoded(now, {key: torch.ones_like(one.start)})
            step -= _decoded(now, {key: torch.zeros_like(one.start)})
            found[key] = (gradient * step).reshape(*one.start.shape, -1).sum(-1)
        return found

    @property
    def _plain(self) -> bool:
        """Return whether it is integers under one scale for each group or row, and nothing else."""
        plain = self.tensor.scheme.integer and [*self.scales] == ["scales"]
        by_row = plain and len(self.scales["scales"].start) == len(self.tensor.codes)
        return by_row and "outlier_columns" not in self.tensor.parameters

    def _values(self, rows: slice) -> Tensor:
        """Return what the scales of plain integers are multiplied with, of a strip of rows."""
        codes = self.codes[CODES].stored(rows) if CODES in self.codes else self.tensor.codes[rows]
        values = codes.float()
        if (zeros := self.tensor.parameters.get("zeros")) is not None:
            _by_group(values, zeros).sub_(zeros[rows][..., None])
        return values

    def _scaled(self, values: Tensor, rows: slice) -> Tensor:
        """Multiply values of a strip of rows of plain integers with their scales, in place."""
        scales = self._now(rows)
        _by_group(values, scales).mul_(scales[..., None])
        return values

    def _now(self, rows: slice) -> Tensor:
        """Return the scales of a strip of rows of plain integers."""
        if self.held is not None:
            return self.held[rows]
        return self.scales["scales"].stored(rows).float()


def factor_rate(scheme: Scheme) -> float:
    """Return the initial learning rate of the factors of a scheme's scales."""
    shared = scheme.scaled and scheme.block is not None
    return RATE * (IN_BLOCKS if shared else 1.0) / 2 ** (scheme.weight_bits / 2)


def _by_group(values: Tensor, scales: Tensor) -> Tensor:
    """Return a view ``[rows, groups, size]`` of rows that have as many groups as ``scales`` has columns."""
    return values.view(len(values), scales.shape[1], -1)


def _learned_codes(tensor: QuantizedTensor, rate: float) -> dict[str, LearnedCodes]:
    scheme = tensor.scheme
    if scheme.integer:
        return {CODES: LearnedCodes(tensor.codes, code_range(scheme), rate)}
    block, found = scheme.block, dict[str, LearnedCodes]()
    if block is not None and block.units is not None:
        kept = (key for key in INTEGERS if key in tensor.parameters)
        found = {key: LearnedCodes(tensor.parameters[key], block.units, rate) for key in kept}
    if scheme.table:
        found[CODES] = LearnedPlaces.of(tensor.codes, scheme.table, rate)
    elif block is not None and block.vector == 1:  # else a code picks a point
        found[CODES] = LearnedCodes(tensor.codes, (block.codes[0], block.codes[1]), rate)
    return found


def _decoded(tensor: QuantizedTensor, changed: Mapping[str, Tensor]) -> Tensor:
    """Return the values of a linear with other parameters, or codes."""
    codes = changed.get(CODES, tensor.codes)
    return packer_of(tensor.scheme).decode(codes, {**tensor.parameters, **changed}, tensor.scheme)


# What is learned


@dataclass(slots=True, eq=False)
class LearnedCodes:
    """The codes ``[out_features, in_features]`` of one linear.

    Attributes:
        start: the original codes.
        limits: the least and the greatest code.
        rate: initial learning rate, in steps of the grid.
        offsets: what is learned, int16, in units of ``1 / UNIT`` of a step; 0 for no change.
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
        """Start without a change."""
        self.offsets = torch.zeros_like(self.start, dtype=torch.int16)
        self._moment = torch.zeros_like(self.start, dtype=torch.bfloat16)
        self._rows, self._columns = (
            torch.zeros(size, device=self.start.device) for size in self.start.shape
        )

    def stored(self, rows: slice = ALL) -> Tensor:
        """Return the current codes of a strip of rows."""
        start = self.start[rows]
        return self._changes(rows).to(start.dtype).add_(start)  # modulo 256, where that is unsigned

    def step(self, gradient: Tensor, share: float) -> None:
        """Do one optimizer step.

        Args:
            gradient: of the loss with respect to the offsets, float32 ``[out_features, in_features]``.
            share: of the initial learning rate.
        """
        self.seen([self.see(gradient)], share)
        self.move()

    def see(self, gradient: Tensor, rows: slice = ALL) -> Tensor:
        """Take the gradient of a strip of rows, and return an argument of `seen`."""
        moment = self._moment[rows]
        moment.copy_(moment.float().lerp_(gradient, 1 - FIRST))
        squares = gradient.square()
        self._rows[rows].lerp_(squares.mean(1), 1 - SECOND)
        return squares.sum(0)

    def seen(self, sums: Iterable[Tensor], share: float) -> None:
        """Take the results of `see` for all strips, in order; ``share`` is the part of the initial learning rate."""
        self._steps += 1
        self._columns.lerp_(reduce(torch.add, sums) / len(self.start), 1 - SECOND)
        tiny = torch.finfo(torch.float32).tiny  # no gradient has reached it: its moment is 0, too
        mean = self._rows.mean().clamp_(min=tiny)
        self._rate = self.rate * share / (1 - FIRST**self._steps) * UNIT
        of_rows = (self._rows / (1 - SECOND**self._steps)).sqrt_().clamp_(min=tiny)
        of_columns = (self._columns / mean).sqrt_().clamp_(min=tiny)
        self._factors = self._rate / of_rows, of_columns.reciprocal_()

    def move(self, rows: slice = ALL) -> None:
        """Update the offsets of a strip of rows, after `seen`."""
        low, high = ((limit + side) * UNIT for limit, side in zip(self.limits, SIDES, strict=True))
        furthest, rate = (MOST_STEPS + BESIDE) * UNIT, self._rate
        (of_rows, of_columns), before = self._factors, self.offsets[rows]
        step = self._moment[rows].float().mul_(of_rows[rows, None]).mul_(of_columns)
        self.shorten(step, rows)
        codes = self.start[rows].float().mul_(UNIT)
        moved = before.float().sub_(step.clamp_(-rate, rate)).add_(codes).clamp_(low, high)
        before.copy_(moved.sub_(codes).clamp_(-furthest, furthest).round_())

    def snapshot(self) -> Tensor:
        """Return the change of each code in steps, int8."""
        return self._changes(ALL).to(torch.int8)

    def restore(self, snapshot: Tensor) -> None:
        """Go back to a snapshot."""
        self.offsets.copy_(snapshot.to(torch.int16) << BITS)

    def shorten(self, step: Tensor, rows: slice) -> None:
        """Shorten updates in place where neighbouring values are further apart; here they are equally far."""

    def _changes(self, rows: slice) -> Tensor:
        """Return the changes of the codes of a strip of rows in steps, int16."""
        return self.offsets[rows].add(UNIT >> 1).bitwise_right_shift_(BITS)


@dataclass(slots=True, eq=False)
class LearnedPlaces(LearnedCodes):
    """Codes that index a table of values: what is learned are ranks among the sorted values.

    The gradient is that of a value, in any unit, and the learning rate that of the least gap between values. An update
    moves equally far in values everywhere, so that a code takes twice as many steps to cross a gap twice as wide. With
    equally long updates in ranks, wide gaps would be crossed as soon, and those cost most if it was noise.

    Attributes:
        codes: by rank.
        shares: factors of updates between each rank and the next.
    """

    codes: Tensor
    shares: Tensor

    @classmethod
    def of(cls, codes: Tensor, values: Sequence[int], rate: float) -> LearnedPlaces:
        """Start from codes of ``values``; the first of equal values stands for all of them."""
        rising = sorted({value: code for code, value in reversed([*enumerate(values)])}.items())
        places = {value: place for place, (value, _) in enumerate(rising)}
        place_of = torch.tensor([places[value] for value in values], dtype=torch.uint8)
        gaps = torch.tensor([value for value, _ in rising], dtype=torch.float32).diff()
        found = torch.tensor([code for _, code in rising], dtype=torch.uint8)
        start, limits = look_up(place_of, codes), (0, len(rising) - 1)
        return cls(start, limits, rate, found, gaps.min() / gaps)

    def stored(self, rows: slice = ALL) -> Tensor:
        """Return the current codes of a strip of rows."""
        return look_up(self.codes, LearnedCodes.stored(self, rows))

    def shorten(self, step: Tensor, rows: slice) -> None:
        """Multiply updates by the share of the gap that they enter."""
        at = self.start[rows].int().bitwise_left_shift_(BITS).add_(self.offsets[rows])
        gap = at.sub_((step > 0).int()).bitwise_right_shift_(BITS).clamp_(0, len(self.shares) - 1)
        step.mul_(look_up(self.shares, gap.to(torch.uint8)))


@dataclass(slots=True, eq=False)
class Learned:
    """One tensor of scales, or the gains of one norm.

    Attributes:
        start: the original value, float32.
        dtype: of the stored value.
        factor: what is learned, 0 for no change.
        rate: initial learning rate.
        offset: that the norm adds to the stored value.
        known: a factor and the stored value for it.
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
        """Start from a value."""
        start = value.detach().float().clone()
        return cls(start, dtype, torch.zeros_like(start), rate, offset)

    @classmethod
    def at(cls, start: Tensor, now: Tensor, rate: float, offset: float) -> Learned:
        """Resume from a value that was ``start`` and is stored as ``now``."""
        one = cls.of(start, now.dtype, rate, offset)
        factor = (now.float() + offset) / (one.start + offset) - 1
        one.factor.copy_(torch.where(factor.isfinite(), factor, 0).clamp(-MOST, MOST))
        one.known = (one.factor.clone(), now)
        return one

    def stored(self, rows: slice = ALL) -> Tensor:
        """Return the current value of a strip of rows in its stored type."""
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
        """Do one step of Adam within bounds; without a gradient do nothing.

        Not torch's Adam: importing that takes two seconds and 160 MB.

        Args:
            gradient: of the loss with respect to the factor.
            share: of the initial learning rate.
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
        """Return the gradient of the factor of a strip of rows, given the gradient of the value."""
        return of_value * (self.start[rows] + self.offset)
