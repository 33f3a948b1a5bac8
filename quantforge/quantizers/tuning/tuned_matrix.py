"""A linear during tuning: each of its scales has a learned factor, and its codes may have learned offsets.

In every grid, values are a sum over its scales (and minima, and the scales of a block), each times a function of the
codes. So the gradient of one is that of the matrix times the values decoded with this one set to 1 and the others
to 0. Codes, and integer scales of groups within a block, are learned in whole steps: the gradient is that of the
matrix times the difference between the values decoded with 1 and with 0.

For uniform integers with scales per group or row, all of that is a product or two with the codes and the scales; one
strip of rows at a time is decoded, and its gradients are computed, while it is in a core's cache
(`TunedMatrix.strips`).

A scale or gain is multiplied by a factor optimized by Adam, and rounded to its stored type.

A code has an offset in grid steps, which is rounded before use. The gradient of an offset is that of the value times
the scale, as if nothing were rounded (straight-through). The gradients of a few rows carry little information about a
single code. So offsets start at 0, half a step from any change, with a learning rate at which a change takes many
agreeing optimizer steps. Codes changed by noise cost more than the others gain: the divergence stays above its
starting value until the learning rate has decayed.

The optimizer of codes is Adam with the second moment stored per row and column, as in Adafactor (Shazeer and Stern,
arXiv 1804.04235), and updates limited to the learning rate: with offsets and first moments in 16 bits, a weight takes
four bytes in addition to its code. An optimizer step has three parts, so that strips of rows can be processed in
parallel while they are in the caches: `accumulate` takes the gradients of a strip, `combine_strips` the results of all
strips, and `update_strip` updates the codes of each strip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quantforge.packers import get_packer
from quantforge.packers.integer import code_range
from quantforge.packers.nearest_levels import look_up
from quantforge.packers.tensor import INPUT_PARAMS, MATRIX_PARAMS, QuantizedTensor
from quantforge.quantizers.tuning import MAX_CODE_STEPS, MAX_RELATIVE_CHANGE
from quantforge.scheme import Scheme

CODES = "codes"
INTEGER_PARAMETERS = ("scales", "mins")  # parameters that may be integers scaled per block
FACTOR_RATE = 1e-2  # learning rate of factors, extrapolated to 0 bits
BLOCK_FACTOR_RATE_SHARE = 0.3  # share of it for a factor of all scales of a block
STRIP_WEIGHTS = 1 << 16  # weights in a strip of rows, whose temporaries stay in the L2 cache
EPSILON = 1e-8  # of Adam
CODE_MARGIN = 0.49  # grid steps that an offset may exceed the last reachable code
FIRST_MOMENT_DECAY, SECOND_MOMENT_DECAY = 0.9, 0.99  # decay of the moments per step
OFFSET_BITS = 14
OFFSET_UNIT = 1 << OFFSET_BITS  # int16 units per grid step of an offset
CODE_MARGINS = (-CODE_MARGIN, CODE_MARGIN)
ALL_ROWS = slice(None)


class StripGradients(NamedTuple):
    """Gradients of a strip of rows, by name.

    Attributes:
        factors: gradients of the scale factors.
        sums: results of `LearnedCodes.accumulate`, for `LearnedCodes.combine_strips`.
    """

    factors: dict[str, Tensor]
    sums: dict[str, Tensor]


@dataclass(slots=True, eq=False)
class TunedMatrix:
    """A linear whose scales and optionally codes are tuned.

    Attributes:
        tensor: the linear as it was written.
        scales: tuned scale parameters, by name.
        codes: values tuned in whole steps: integer parameters by name, and `CODES`.
        cached_scales: the current scales of uniform integers, float32, between `cache_scales` and `drop_scales`.
    """

    tensor: QuantizedTensor
    scales: dict[str, LearnedFactor]
    codes: dict[str, LearnedCodes]
    cached_scales: Tensor | None = None

    @classmethod
    def of(cls, tensor: QuantizedTensor, rate: float) -> TunedMatrix:
        """Create from a linear as it was written.

        Args:
            tensor: the linear.
            rate: initial learning rate of codes and integers, 0 to freeze them.
        """
        first = factor_rate(tensor.scheme)
        scales = {
            key: LearnedFactor.of(value, value.dtype, first)
            for key, value in tensor.parameters.items()
            if value.is_floating_point() and key not in (*INPUT_PARAMS, *MATRIX_PARAMS)
        }
        return cls(tensor, scales, _learned_codes(tensor, rate) if rate else {})

    @property
    def device(self) -> torch.device:
        """Return the device of the codes and of all tuned values."""
        return self.tensor.codes.device

    def result(self) -> QuantizedTensor:
        """Return the linear with its current scales and codes."""
        new_parameters = {key: learned.stored() for key, learned in self.scales.items()}
        new_parameters |= {key: learned.stored() for key, learned in self.codes.items()}
        codes = new_parameters.pop(CODES, self.tensor.codes)
        return replace(
            self.tensor, codes=codes, parameters={**self.tensor.parameters, **new_parameters}
        )

    def cache_scales(self) -> None:
        """Cache the current scales for `weight` and `accumulate`, until `drop_scales`."""
        self.cached_scales = self._current_scales(ALL_ROWS) if self._is_uniform_integer else None

    def drop_scales(self) -> None:
        """Drop the cached scales."""
        self.cached_scales = None

    def strips(self) -> Sequence[slice]:
        """Return strips of rows that may be processed in parallel: a single one if rows depend on each other."""
        rows, columns = self.tensor.shape
        step = (
            max(1, STRIP_WEIGHTS // columns)
            if self._is_uniform_integer and self.device.type == "cpu"
            else rows
        )
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def weight(self, rows: slice = ALL_ROWS) -> Tensor:
        """Decode the current matrix ``[out_features, in_features]``, or one strip of its rows."""
        if not self._is_uniform_integer:
            return self.result().decode()
        return self._multiply_scales(self._unscaled_values(rows), rows)

    def accumulate(self, gradient: Tensor, rows: slice, weight: Tensor) -> StripGradients:
        """Accumulate the gradient of a strip: the first part of an optimizer step.

        Args:
            gradient: gradient of ``weight``; overwritten.
            rows: the strip.
            weight: what `weight` returned for it.

        Returns:
            The gradients of the strip, to be passed to `combine_strips` with those of all strips.
        """
        if not self._is_uniform_integer:
            gradients = self.code_gradients(gradient).items()
            squares = {
                key: self.codes[key].accumulate(code_gradient) for key, code_gradient in gradients
            }
            return StripGradients(self.scale_gradients(gradient), squares)
        scales, current_scales = self.scales["scales"], self._current_scales(rows)
        codes, code_sums = self.codes.get(CODES), dict[str, Tensor]()
        sums = _by_group(gradient * weight, scales.start).sum(-1)
        if codes is not None:
            code_sums[CODES] = codes.accumulate(self._multiply_scales(gradient, rows), rows)
        return StripGradients(
            {
                "scales": scales.gradient(
                    (sums / current_scales).where(current_scales != 0, 0), rows
                )
            },
            code_sums,
        )

    def combine_strips(
        self, strips: Iterable[StripGradients], rate_share: float
    ) -> dict[str, Tensor]:
        """Return the gradients of the scale factors, given the results of `accumulate` for all strips in order.

        ``rate_share`` is the current share of the initial learning rate of codes.
        """
        strip_gradients = [*strips]
        for key, codes in self.codes.items():
            codes.combine_strips([strip.sums[key] for strip in strip_gradients], rate_share)
        return {
            key: torch.cat([strip.factors[key] for strip in strip_gradients]) for key in self.scales
        }

    def update_strip(self, rows: slice) -> None:
        """Update the codes of a strip of rows: the last part of an optimizer step."""
        for codes in self.codes.values():
            codes.update_strip(rows if self._is_uniform_integer else ALL_ROWS)

    def scale_gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the scale factors, given that of the matrix ``[out_features, in_features]``."""
        if self._is_uniform_integer:
            scales = self.scales["scales"]
            products = self._unscaled_values(ALL_ROWS).mul_(gradient)
            return {"scales": scales.gradient(_by_group(products, scales.start).sum(-1))}
        current, gradients = self.result(), {}
        zero_parameters = {key: torch.zeros_like(scale.start) for key, scale in self.scales.items()}
        for key, scale in self.scales.items():
            products = gradient * _decoded(
                current, zero_parameters | {key: torch.ones_like(scale.start)}
            )
            gradients[key] = scale.gradient(products.reshape(*scale.start.shape, -1).sum(-1))
        return gradients

    def code_gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of codes and integer parameters, given that of the matrix."""
        if self._is_uniform_integer and self.codes:
            return {CODES: self._multiply_scales(gradient.clone(), ALL_ROWS)}
        current, gradients = self.result(), {}
        for key, codes in self.codes.items():
            step = _decoded(current, {key: torch.ones_like(codes.start)})
            step -= _decoded(current, {key: torch.zeros_like(codes.start)})
            gradients[key] = (gradient * step).reshape(*codes.start.shape, -1).sum(-1)
        return gradients

    @property
    def _is_uniform_integer(self) -> bool:
        """Return whether the matrix is integers with one scale per group or row, and nothing else."""
        has_only_scales = self.tensor.scheme.integer and [*self.scales] == ["scales"]
        by_row = has_only_scales and len(self.scales["scales"].start) == len(self.tensor.codes)
        return by_row and "outlier_columns" not in self.tensor.parameters

    def _unscaled_values(self, rows: slice) -> Tensor:
        """Return codes minus zero points of a strip of rows of uniform integers."""
        codes = self.codes[CODES].stored(rows) if CODES in self.codes else self.tensor.codes[rows]
        values = codes.float()
        if (zeros := self.tensor.parameters.get("zeros")) is not None:
            _by_group(values, zeros).sub_(zeros[rows][..., None])
        return values

    def _multiply_scales(self, values: Tensor, rows: slice) -> Tensor:
        """Multiply values of a strip of rows of uniform integers by their scales, in place."""
        scales = self._current_scales(rows)
        _by_group(values, scales).mul_(scales[..., None])
        return values

    def _current_scales(self, rows: slice) -> Tensor:
        """Return the current scales of a strip of rows of uniform integers."""
        if self.cached_scales is not None:
            return self.cached_scales[rows]
        return self.scales["scales"].stored(rows).float()


def factor_rate(scheme: Scheme) -> float:
    """Return the initial learning rate of the factors of a scheme's scales."""
    shared = scheme.has_learnable_scales and scheme.block is not None
    return (
        FACTOR_RATE * (BLOCK_FACTOR_RATE_SHARE if shared else 1.0) / 2 ** (scheme.weight_bits / 2)
    )


def _by_group(values: Tensor, scales: Tensor) -> Tensor:
    """Return a view ``[rows, groups, size]`` of rows, with one group per column of ``scales``."""
    return values.view(len(values), scales.shape[1], -1)


def _learned_codes(tensor: QuantizedTensor, rate: float) -> dict[str, LearnedCodes]:
    scheme = tensor.scheme
    if scheme.integer:
        return {CODES: LearnedCodes(tensor.codes, code_range(scheme), rate)}
    block, learned = scheme.block, dict[str, LearnedCodes]()
    if block is not None and block.units is not None:
        integer_keys = (key for key in INTEGER_PARAMETERS if key in tensor.parameters)
        learned = {
            key: LearnedCodes(tensor.parameters[key], block.units, rate) for key in integer_keys
        }
    if scheme.code_values:
        learned[CODES] = LearnedTableCodes.of(tensor.codes, scheme.code_values, rate)
    elif block is not None and block.weights_per_code == 1:  # else a code picks a point
        learned[CODES] = LearnedCodes(tensor.codes, (block.codes[0], block.codes[1]), rate)
    return learned


def _decoded(tensor: QuantizedTensor, replacements: Mapping[str, Tensor]) -> Tensor:
    """Decode a linear with some parameters or codes replaced."""
    codes = replacements.get(CODES, tensor.codes)
    return get_packer(tensor.scheme).decode(
        codes, {**tensor.parameters, **replacements}, tensor.scheme
    )


# Learned values


@dataclass(slots=True, eq=False)
class LearnedCodes:
    """Tuned codes ``[out_features, in_features]`` of one linear.

    Attributes:
        start: the original codes.
        limits: the smallest and the largest code.
        rate: initial learning rate, in grid steps.
        offsets: learned offsets, int16, in units of ``1 / OFFSET_UNIT`` of a step; 0 for no change.
    """

    start: Tensor
    limits: tuple[int, int]
    rate: float
    offsets: Tensor = field(init=False)
    _moment: Tensor = field(init=False)
    _rows: Tensor = field(init=False)
    _columns: Tensor = field(init=False)
    _steps: int = field(init=False, default=0)
    # Rates of a step, and what moments are multiplied with in it
    _rate: float = field(init=False, default=0.0)
    _update_factors: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Initialize offsets and moments to 0."""
        self.offsets = torch.zeros_like(self.start, dtype=torch.int16)
        self._moment = torch.zeros_like(self.start, dtype=torch.bfloat16)
        self._rows, self._columns = (
            torch.zeros(size, device=self.start.device) for size in self.start.shape
        )

    def stored(self, rows: slice = ALL_ROWS) -> Tensor:
        """Return the current codes of a strip of rows."""
        start = self.start[rows]
        return self._changes(rows).to(start.dtype).add_(start)  # modulo 256 if unsigned

    def step(self, gradient: Tensor, rate_share: float) -> None:
        """Do one optimizer step.

        Args:
            gradient: gradient of the loss with respect to the offsets, float32 ``[out_features, in_features]``.
            rate_share: current share of the initial learning rate.
        """
        self.combine_strips([self.accumulate(gradient)], rate_share)
        self.update_strip()

    def accumulate(self, gradient: Tensor, rows: slice = ALL_ROWS) -> Tensor:
        """Update the moments with the gradient of a strip of rows; return its sum of squares for `combine_strips`."""
        moment = self._moment[rows]
        moment.copy_(moment.float().lerp_(gradient, 1 - FIRST_MOMENT_DECAY))
        squares = gradient.square()
        self._rows[rows].lerp_(squares.mean(1), 1 - SECOND_MOMENT_DECAY)
        return squares.sum(0)

    def combine_strips(self, sums: Iterable[Tensor], rate_share: float) -> None:
        """Combine the results of `accumulate` for all strips, in order.

        ``rate_share`` is the current share of the initial learning rate.
        """
        self._steps += 1
        self._columns.lerp_(reduce(torch.add, sums) / len(self.start), 1 - SECOND_MOMENT_DECAY)
        tiny = torch.finfo(torch.float32).tiny  # avoids 0/0 where no gradient arrived
        mean = self._rows.mean().clamp_(min=tiny)
        self._rate = self.rate * rate_share / (1 - FIRST_MOMENT_DECAY**self._steps) * OFFSET_UNIT
        of_rows = (self._rows / (1 - SECOND_MOMENT_DECAY**self._steps)).sqrt_().clamp_(min=tiny)
        of_columns = (self._columns / mean).sqrt_().clamp_(min=tiny)
        self._update_factors = self._rate / of_rows, of_columns.reciprocal_()

    def update_strip(self, rows: slice = ALL_ROWS) -> None:
        """Update the offsets of a strip of rows, after `combine_strips`."""
        low, high = (
            (limit + margin) * OFFSET_UNIT
            for limit, margin in zip(self.limits, CODE_MARGINS, strict=True)
        )
        furthest, rate = (MAX_CODE_STEPS + CODE_MARGIN) * OFFSET_UNIT, self._rate
        (of_rows, of_columns), offsets_before = self._update_factors, self.offsets[rows]
        step = self._moment[rows].float().mul_(of_rows[rows, None]).mul_(of_columns)
        self.limit_update(step, rows)
        codes = self.start[rows].float().mul_(OFFSET_UNIT)
        new_offsets = (
            offsets_before.float().sub_(step.clamp_(-rate, rate)).add_(codes).clamp_(low, high)
        )
        offsets_before.copy_(new_offsets.sub_(codes).clamp_(-furthest, furthest).round_())

    def snapshot(self) -> Tensor:
        """Return the change of each code in steps, int8."""
        return self._changes(ALL_ROWS).to(torch.int8)

    def restore(self, snapshot: Tensor) -> None:
        """Restore offsets from a snapshot."""
        self.offsets.copy_(snapshot.to(torch.int16) << OFFSET_BITS)

    def limit_update(self, step: Tensor, rows: slice) -> None:
        """Reduce updates in place if neighboring values are further apart; here they are evenly spaced."""

    def _changes(self, rows: slice) -> Tensor:
        """Return the changes of the codes of a strip of rows in steps, int16."""
        return self.offsets[rows].add(OFFSET_UNIT >> 1).bitwise_right_shift_(OFFSET_BITS)


@dataclass(slots=True, eq=False)
class LearnedTableCodes(LearnedCodes):
    """Codes that index a table of values; the learned offsets are of ranks among the sorted values.

    The gradient is that of a value, in any unit, and the learning rate that of the smallest gap between values. An
    update moves equally far in values everywhere, so that a code takes twice as many steps to cross a gap twice as
    wide. With equal updates in ranks, wide gaps would be crossed as quickly, and those cost most if the cause was
    noise.

    Attributes:
        codes: code of each rank.
        shares: factors of updates between each rank and the next.
    """

    codes: Tensor
    shares: Tensor

    @classmethod
    def of(cls, codes: Tensor, values: Sequence[int], rate: float) -> LearnedTableCodes:
        """Create from codes that index ``values``; the first of equal values represents all of them."""
        rising = sorted({value: code for code, value in reversed([*enumerate(values)])}.items())
        index_of_value = {value: index for index, (value, _) in enumerate(rising)}
        place_of = torch.tensor([index_of_value[value] for value in values], dtype=torch.uint8)
        gaps = torch.tensor([value for value, _ in rising], dtype=torch.float32).diff()
        sorted_codes = torch.tensor([code for _, code in rising], dtype=torch.uint8)
        start, limits = look_up(place_of, codes), (0, len(rising) - 1)
        return cls(start, limits, rate, sorted_codes, gaps.min() / gaps)

    def stored(self, rows: slice = ALL_ROWS) -> Tensor:
        """Return the current codes of a strip of rows."""
        return look_up(self.codes, LearnedCodes.stored(self, rows))

    def limit_update(self, step: Tensor, rows: slice) -> None:
        """Multiply updates by the share of the gap that they enter."""
        table_positions = (
            self.start[rows].int().bitwise_left_shift_(OFFSET_BITS).add_(self.offsets[rows])
        )
        gap = (
            table_positions.sub_((step > 0).int())
            .bitwise_right_shift_(OFFSET_BITS)
            .clamp_(0, len(self.shares) - 1)
        )
        step.mul_(look_up(self.shares, gap.to(torch.uint8)))


@dataclass(slots=True, eq=False)
class LearnedFactor:
    """Factor of one tensor of scales, or of the gains of one norm.

    Attributes:
        start: the original value, float32.
        dtype: type of the stored value.
        factor: learned relative change, 0 for no change.
        rate: initial learning rate.
        offset: offset that the norm adds to the stored value.
        known: a factor and its exact stored value.
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
    def of(
        cls, value: Tensor, dtype: torch.dtype, rate: float, offset: float = 0.0
    ) -> LearnedFactor:
        """Create from a value, with no change."""
        start = value.detach().float().clone()
        return cls(start, dtype, torch.zeros_like(start), rate, offset)

    @classmethod
    def resume(cls, start: Tensor, current: Tensor, rate: float, offset: float) -> LearnedFactor:
        """Create from the original value ``start`` and the value ``current`` that is stored for it."""
        learned = cls.of(start, current.dtype, rate, offset)
        factor = (current.float() + offset) / (learned.start + offset) - 1
        learned.factor.copy_(
            torch.where(factor.isfinite(), factor, 0).clamp(
                -MAX_RELATIVE_CHANGE, MAX_RELATIVE_CHANGE
            )
        )
        learned.known = (learned.factor.clone(), current)
        return learned

    def stored(self, rows: slice = ALL_ROWS) -> Tensor:
        """Return the current value of a strip of rows in its stored type."""
        start_values, row_factor = self.start[rows], self.factor[rows]
        start = start_values + self.offset
        value = (start + start * row_factor - self.offset).to(self.dtype)
        stored_values = value.float()  # of floats of 8 bits torch compares none
        is_storable = stored_values.isfinite() & ((stored_values != 0) | (start_values == 0))
        stored_factor = torch.where(is_storable, stored_values, start_values)
        if self.known is not None:  # to the last bit
            factor, current = (tensor[rows] for tensor in self.known)
            stored_factor = torch.where(row_factor == factor, current.float(), stored_factor)
        return stored_factor.to(self.dtype)

    def step(self, gradient: Tensor | None, rate_share: float) -> None:
        """Do one step of Adam within bounds; do nothing without a gradient.

        torch's Adam is not used: importing it takes two seconds and 160 MB.

        Args:
            gradient: gradient of the loss with respect to the factor.
            rate_share: current share of the initial learning rate.
        """
        if gradient is None:
            return
        if self._moments is None:
            self._moments = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self._steps += 1
        mean, square = self._moments
        mean.lerp_(gradient, 1 - FIRST_MOMENT_DECAY)
        square.lerp_(gradient.square(), 1 - SECOND_MOMENT_DECAY)
        size = (square / (1 - SECOND_MOMENT_DECAY**self._steps)).sqrt_().add_(EPSILON)
        rate = self.rate * rate_share / (1 - FIRST_MOMENT_DECAY**self._steps)
        self.factor.sub_(mean / size, alpha=rate).clamp_(-MAX_RELATIVE_CHANGE, MAX_RELATIVE_CHANGE)

    def gradient(self, of_value: Tensor, rows: slice = ALL_ROWS) -> Tensor:
        """Return the gradient of the factor of a strip of rows, given the gradient of the value."""
        return of_value * (self.start[rows] + self.offset)
