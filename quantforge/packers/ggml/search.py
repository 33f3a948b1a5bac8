"""Search scales that minimize ``sum w (x - q)^2``, with ``w = importance * sqrt(x^2 + mean x^2)``.

The square root favors large weights: the plain sum pulls them towards 0, and errors of one sign add up in the
output. (The factor is ggml's; ``mean`` is over the row here.)

1. `fit_groups` finds real-valued step and offset of each group by least squares, from a few ranges (`Candidates`).
2. The same search finds the unit of each block of 256 from the steps of its groups, and that of its offsets.
3. With the units rounded to float16, `choose_integers` tries the integers around each group's step and offset, and
   takes those with the smallest error.
4. Units are fitted once more, in closed form for fixed codes and integers, and step 3 is repeated around them.

Without an importance matrix the search is brief: it starts with fewer ranges, the integers of offsets stay the same in
step 4, and grids without offsets skip step 4.

Rows are side by side, in panels ``[panels, columns, rows]``. On a CPU the inner loops are compiled (`search_loops`):
panels have `LANES` rows, the last one is padded with zeros, and sums are in the order of the columns. On other devices
torch computes the same, one candidate for all groups at a time, with one panel for all rows.

The error of a group is ``sum w (x - step v - offset)^2``. For the codes of a candidate the best step and offset are a
least-squares fit, computed as a correction of the candidate from moments of its residual,
``r = x - step v - offset``: sums of ``w r^2``, ``w v^2``, ``w v``, ``w r v`` and ``w r``. (With moments of ``x`` the
error would be a small difference of large numbers.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy
import torch
from torch import Tensor

from quantforge.grids import E2M1_VALUES, GGML_BLOCKS, Zero
from quantforge.packers.ggml.grid import (
    CODE_RANGES,
    LANES,
    SCALE_RANGES,
    CodeRange,
    decode_half_e8m0,
    decode_values,
    nearest_codes,
    split_groups,
    value_thresholds,
)
from quantforge.scheme import Scheme

# Weights processed at a time: they and their importance stay in a core's cache
CHUNK_WEIGHTS = 1 << 18
BRIEF_STARTS = 6  # starting ranges of a brief search
MIN_FLOAT16 = 2.0**-24  # the smallest float16 above 0
# Variance of the codes relative to their squares, below which the codes of a group are taken as equal.
MIN_VARIANCE_SHARE = 1e-5
# Changes of the integers of step and offset that are tried.
SCALE_AND_MIN_MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
SCALE_MOVES = ((0, 0), (-1, 0), (1, 0))


def search_parameters(
    weight: Tensor, scheme: Scheme, importance: Tensor | None
) -> dict[str, Tensor]:
    """Return the stored parameters of ``weight`` ``[rows, in]`` float32; ``importance`` is ``[in]``."""
    chunks = [
        {key: value[: len(rows)] for key, value in _search_panel(rows, scheme, importance).items()}
        for rows in torch.split(weight, LANES * max(1, CHUNK_WEIGHTS // (LANES * weight.shape[1])))
    ]
    return {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}


def _search_panel(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> dict[str, Tensor]:
    column_weights = (
        weight.new_ones(weight.shape[1]) if importance is None else importance.to(weight)
    )
    x, weights = arrange_panels(weight, column_weights)
    if scheme.grid == "mxfp4":
        parameters = _search_exponents(x, weights)
    elif scheme.grid in SCALE_RANGES:
        parameters = _search_superblocks(x, weights, scheme.grid, brief=importance is None)
    else:
        block = GGML_BLOCKS[scheme.grid]
        step, offset, *_ = fit_groups(
            x, weights, block.group_size, CODE_RANGES[scheme.grid], CANDIDATES[scheme.grid]
        )
        parameters = {"scales": round_to_float16(step)}
        if block.zero is Zero.MIN:
            parameters["mins"] = round_to_float16(offset)
    return {key: value.transpose(1, 2).flatten(0, 1) for key, value in parameters.items()}


def round_to_float16(scales: Tensor) -> Tensor:
    """Round to float16; only 0 becomes 0."""
    rounded = scales.half()
    smallest = torch.copysign(torch.full_like(scales, MIN_FLOAT16), scales).half()
    return torch.where((rounded == 0) & (scales != 0), smallest, rounded)


def _search_exponents(x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Choose the exponent of each block: the one that covers its range, the one below or the one above."""
    absmax = split_groups(x.abs(), 32).amax(2)
    # Half the step that covers the block; it is taken 1, 2 or 4 times. Codes stand for twice their value.
    exponents = torch.where(absmax > 0, absmax.frexp().exponent + 123, 0).clamp_(0, 252)
    units = decode_half_e8m0(exponents)
    zeros = torch.zeros_like(units)
    start, units = torch.stack([2 * units, zeros]), torch.stack([units, zeros])
    candidates = IntegerCandidates(start, units, (1, 4), ((0, 0), (-1, 0), (2, 0)))
    choice = choose_integers(x, weights, candidates, CodeRange(0, 15, E2M1_VALUES))
    return {"exponents": (exponents + choice[5].log2()).to(torch.uint8)}


def _search_superblocks(x: Tensor, weights: Tensor, grid: str, *, brief: bool) -> dict[str, Tensor]:
    block = GGML_BLOCKS[grid]
    code_range = CODE_RANGES[grid]
    scale_range = SCALE_RANGES[grid]
    candidates = CANDIDATES[grid]
    groups, affine = block.columns // block.group_size, block.zero is Zero.MIN
    candidates = (
        replace(candidates, starts=candidates.starts[:BRIEF_STARTS]) if brief else candidates
    )
    step, offset, squares, group_weight = fit_groups(
        x, weights, block.group_size, code_range, candidates
    )
    targets, units = (step, offset), [_fit_unit(step, squares, groups, scale_range)]
    units.append(
        _fit_unit(-offset, group_weight, groups, scale_range)
        if affine
        else torch.zeros_like(units[0])
    )

    def choose(start: tuple[Tensor, Tensor], moves: Sequence[tuple[int, int]]) -> Tensor:
        integer_candidates = (
            torch.stack(start),
            torch.stack(units).float(),
            (scale_range.low, scale_range.high),
            moves,
        )
        return choose_integers(x, weights, IntegerCandidates(*integer_candidates), code_range)

    choice = choose(targets, SCALE_AND_MIN_MOVES if affine else SCALE_MOVES)
    if affine or not brief:
        targets = _refit_targets(choice, units, group_weight, affine)
        units = _refit_units(choice, units, group_weight, groups, affine)
        choice = choose(targets, SCALE_AND_MIN_MOVES if affine and not brief else SCALE_MOVES)
    integers = choice[5:].to(torch.uint8 if affine else torch.int8)
    if affine:
        return {"d": units[0], "dmin": units[1], "scales": integers[0], "mins": integers[1]}
    return {"d": units[0], "scales": integers[0]}


def _fit_unit(values: Tensor, weights: Tensor, groups: int, integer_range: CodeRange) -> Tensor:
    """Return the float16 unit of each block such that its ``values`` are nearly integer multiples of it."""
    fitted = fit_groups(
        values.contiguous(),
        weights.contiguous(),
        groups,
        integer_range,
        UNIT_CANDIDATES[integer_range.high],
    )
    return round_to_float16(fitted[0])


def _multiply_units(unit: Tensor, integers: Tensor) -> Tensor:
    """Multiply ``unit`` ``[panels, blocks, LANES]`` float16 with the ``integers`` of its groups."""
    return (
        unit.float().unsqueeze(2) * split_groups(integers, integers.shape[1] // unit.shape[1])
    ).flatten(1, 2)


def _refit_targets(
    choice: Tensor, units: list[Tensor], group_weight: Tensor, affine: bool
) -> tuple[Tensor, Tensor]:
    """Return the best step and offset of each group for fixed codes."""
    _, weighted_squares, weighted_codes, products, residual, scales, mins = choice
    step, offset = _multiply_units(units[0], scales), -_multiply_units(units[1], mins)
    if not affine:
        return step + torch.where(weighted_squares > 0, products / weighted_squares, 0.0), offset
    variance = weighted_squares - weighted_codes * weighted_codes / group_weight
    step_change = (products - weighted_codes * residual / group_weight) / variance
    offset_change = (residual - step_change * weighted_codes) / group_weight
    is_valid = (variance > MIN_VARIANCE_SHARE * weighted_squares) & (step + step_change > 0)
    is_valid &= offset + offset_change <= 0
    return torch.where(is_valid, step + step_change, step), torch.where(
        is_valid, offset + offset_change, offset
    )


def _refit_units(
    choice: Tensor, units: list[Tensor], group_weight: Tensor, groups: int, affine: bool
) -> list[Tensor]:
    """Return the best units for fixed codes and integers, rounded to float16, hence not always an improvement."""
    _, weighted_squares, weighted_codes, products, residual, scales, mins = choice

    def total(terms: Tensor) -> Tensor:
        # One by one: what torch sums at once may depend on the number of threads.
        result, *other_terms = split_groups(terms.double(), groups).unbind(2)
        for term in other_terms:
            result = result + term
        return result

    step_step, step_gradient = total(scales * scales * weighted_squares), total(scales * products)
    if not affine:
        change = torch.where(step_step > 0, step_gradient / step_step, 0.0)
        return [round_to_float16((units[0].double() + change).float()), units[1]]
    step_offset = -total(scales * mins * weighted_codes)
    offset_offset = total(mins * mins * group_weight)
    offset_gradient = -total(mins * residual)
    determinant = step_step * offset_offset - step_offset * step_offset
    changes = (
        (step_gradient * offset_offset - offset_gradient * step_offset) / determinant,
        (offset_gradient * step_step - step_gradient * step_offset) / determinant,
    )
    new_units = [unit.double() + change for unit, change in zip(units, changes, strict=True)]
    is_valid = (
        (determinant > 1e-9 * step_step * offset_offset) & (new_units[0] > 0) & (new_units[1] >= 0)
    )
    return [
        round_to_float16(torch.where(is_valid, new_unit, old_unit.double()).float())
        for new_unit, old_unit in zip(new_units, units, strict=True)
    ]


# The inner loops


class OffsetKind(Enum):
    """Which offsets a group may have: none, at most zero, or any."""

    NONE = auto()
    BELOW_ZERO = auto()
    FREE = auto()


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates that the search tries for one group.

    Attributes:
        starts: without an offset ``(target, 0)``: the (real) code to which the group's largest magnitude is scaled;
            with an offset, the shares of the range that are cut off at its low and at its high end.
        refine_rounds: how often the best candidate is encoded and fitted again.
        offset: which offsets are allowed.
    """

    starts: tuple[tuple[float, float], ...]
    refine_rounds: int
    offset: OffsetKind = OffsetKind.NONE


@dataclass(frozen=True, slots=True)
class IntegerCandidates:
    """Integer multiples of the block's units to try as a group's step and offset.

    Attributes:
        start: step and offset around which integers are tried, ``[2, panels, groups, rows]``.
        units: units of the steps and of the negated offsets, ``[2, panels, blocks, rows]``.
        integer_limits: the smallest and the largest integer.
        changes: for each candidate, the numbers added to the integers nearest to ``start``.
    """

    start: Tensor
    units: Tensor
    integer_limits: tuple[int, int]
    changes: Sequence[tuple[int, int]]


def _use_compiled_loops(x: Tensor) -> bool:
    """Return whether the compiled loops can process ``x``."""
    return x.device.type == "cpu"


def arrange_panels(rows: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` and ``importance * sqrt(x^2 + mean x^2)`` as panels ``[panels, columns, rows of a panel]``.

    ``rows`` is ``[rows, columns]``, ``importance`` ``[columns]``; the mean is over the row.
    """
    if _use_compiled_loops(rows):
        from quantforge.packers.ggml import search_loops

        num_panels = -(-len(rows) // LANES)
        x = torch.empty(num_panels, rows.shape[1], LANES)
        weights = torch.empty_like(x)
        arrays = (rows.contiguous(), importance.contiguous(), x, weights)
        search_loops.arrange_panels(*(array.numpy() for array in arrays))
        return x, weights
    x = rows.T.unsqueeze(0).contiguous()
    return x, (x * x + rows.square().mean(1)).sqrt_() * importance.view(1, -1, 1)


def fit_groups(
    x: Tensor, weights: Tensor, size: int, grid: CodeRange, candidates: Candidates
) -> Tensor:
    """Find step and offset of groups of ``size`` columns; ``x`` and ``weights`` are ``[panels, columns, rows]``.

    Returns:
        ``[4, panels, groups, rows]``: step, offset, sums of ``w v^2`` and of ``w``. The step of an empty group is 0.
    """
    if _use_compiled_loops(x):
        from quantforge.packers.ggml import search_loops

        out = torch.empty(4, x.shape[0], x.shape[1] // size, x.shape[2])
        start_array = numpy.array(candidates.starts, numpy.float32)
        offset_options = (
            candidates.offset is not OffsetKind.NONE,
            candidates.offset is OffsetKind.BELOW_ZERO,
        )
        options = (start_array, candidates.refine_rounds, *offset_options, *value_thresholds(grid))
        search_loops.fit_groups(x.numpy(), weights.numpy(), *options, out.numpy())
        return out
    group_weight = split_groups(weights, size).sum(2)
    groups = split_groups(x, size)
    low, high = groups.amin(2), groups.amax(2)
    signed_extreme = torch.where(high > -low, high, low)
    if candidates.offset is OffsetKind.BELOW_ZERO:
        low = low.clamp(max=0)
    zeros = torch.zeros_like(low)
    offset = zeros if candidates.offset is OffsetKind.NONE else low
    best = torch.stack([torch.full_like(low, torch.inf), zeros, offset, zeros])
    for low_share, high_share in candidates.starts:
        if candidates.offset is OffsetKind.NONE:
            start = signed_extreme / low_share, zeros
        else:
            start = (
                (high - low) * (1 - low_share - high_share) / grid.high,
                low + (high - low) * low_share,
            )
        best = _improve_best(
            best, start, moments(x, weights, *start, grid), group_weight, candidates.offset
        )
    for _ in range(candidates.refine_rounds):
        sums = moments(x, weights, best[1], best[2], grid)
        best = _improve_best(best, (best[1], best[2]), sums, group_weight, candidates.offset)
    return torch.cat([best[1:], group_weight.unsqueeze(0)])


def choose_integers(
    x: Tensor, weights: Tensor, candidates: IntegerCandidates, grid: CodeRange
) -> Tensor:
    """Choose the integers of each group with the least weighted error.

    ``x`` and ``weights`` are ``[panels, columns, rows]``.

    Returns:
        ``[7, panels, groups, rows]``: the `moments`, then the integers of step and negated offset.
    """
    if _use_compiled_loops(x):
        from quantforge.packers.ggml import search_loops

        out = torch.empty(7, *candidates.start.shape[1:])
        moves = numpy.array((candidates.integer_limits, *candidates.changes), numpy.float32)
        arrays = (array.numpy() for array in (x, weights, candidates.start, candidates.units))
        search_loops.choose_integers(*arrays, moves, *value_thresholds(grid), out.numpy())
        return out
    start, units, limits = candidates.start, candidates.units, candidates.integer_limits
    groups_per_block = start.shape[2] // units.shape[2]
    d, dmin = units.repeat_interleave(groups_per_block, 2)
    nearest_integers = [
        (start[0] / torch.where(d == 0, 1.0, d)).round().clamp(*limits),
        (-start[1] / torch.where(dmin == 0, 1.0, dmin)).round().clamp(*limits),
    ]
    best: Tensor | None = None
    for move in candidates.changes:
        scale, minimum = (
            (integer + delta).clamp(*limits)
            for integer, delta in zip(nearest_integers, move, strict=True)
        )
        sums = moments(x, weights, d * scale, -(dmin * minimum), grid)
        candidate = torch.cat([sums, scale.unsqueeze(0), minimum.unsqueeze(0)])
        best = candidate if best is None else torch.where(candidate[0] < best[0], candidate, best)
    assert best is not None
    return best


def moments(x: Tensor, weights: Tensor, step: Tensor, offset: Tensor, grid: CodeRange) -> Tensor:
    """Sum ``w r^2``, ``w v^2``, ``w v``, ``w r v`` and ``w r`` over each group; the sums are shaped like ``step``.

    Args:
        x: ``[panels, columns, rows]``.
        weights: of the same shape.
        step: ``[panels, groups, rows]``.
        offset: of the same shape.
        grid: the values ``v``.
    """
    x, weights = (split_groups(array, array.shape[1] // step.shape[1]) for array in (x, weights))
    step, offset = step.unsqueeze(2), offset.unsqueeze(2)
    inverse = torch.where(step == 0, 0.0, step.reciprocal())
    values = decode_values(nearest_codes((x - offset) * inverse, grid), grid)
    residual = x - offset - step * values
    weighted_values, weighted_residual = weights * values, weights * residual
    sums = (
        weighted_residual * residual,
        weighted_values * values,
        weighted_values,
        weighted_residual * values,
        weighted_residual,
    )
    return torch.stack([terms.sum(2) for terms in sums])


def _improve_best(
    best: Tensor,
    candidate: tuple[Tensor, Tensor],
    sums: Tensor,
    group_weight: Tensor,
    kind: OffsetKind,
) -> Tensor:
    """Fit step and offset to the codes of the candidate; keep them where the error is smaller."""
    (step, offset), (error, squares, weighted_codes, products, residual) = candidate, sums
    if kind is OffsetKind.NONE:
        step_change = products / squares
        offset_change = torch.zeros_like(step)
        is_valid = squares > 0
        error_decrease = products * step_change
    else:
        variance = squares - weighted_codes * weighted_codes / group_weight
        covariance = products - weighted_codes * residual / group_weight
        step_change = covariance / variance
        offset_change = (residual - step_change * weighted_codes) / group_weight
        error_decrease = covariance * step_change + residual * residual / group_weight
        is_constant = ~(variance > MIN_VARIANCE_SHARE * squares)
        clamp_offset = torch.zeros_like(is_constant)
        if kind is OffsetKind.BELOW_ZERO:
            clamp_offset = is_constant | (offset + offset_change > 0)
            product_at_zero = products + offset * weighted_codes
            step_change = torch.where(clamp_offset, product_at_zero / squares, step_change)
            offset_change = torch.where(clamp_offset, -offset, offset_change)
            clamped_decrease = (
                product_at_zero * step_change
                - 2 * offset * residual
                - offset * offset * group_weight
            )
            error_decrease = torch.where(clamp_offset, clamped_decrease, error_decrease)
        is_valid = (clamp_offset | ~is_constant) & (step + step_change > 0)
    fitted = torch.stack(
        [error - error_decrease, step + step_change, offset + offset_change, squares]
    )
    return torch.where(is_valid & (fitted[0] < best[0]), fitted, best)


# The starting ranges of the search for the scale of a group, for each type. They were chosen one by one from a dense
# grid (61 of each sign without an offset, 17 x 17 with one), each time the range that lowered the error of a small
# llama's layers most. docs/results/gguf-encoding.md has the difference to the dense grid.


def _reach_starts(*numbers: float) -> tuple[tuple[float, float], ...]:
    return tuple((number, 0.0) for number in numbers)


_FOUR_BITS = _reach_starts(-8.08, -7.12, -8.64, -7.76, -6.16, -9.2, -8.32, -6.8, -7.36, 8.56)
_FIVE_BITS = _reach_starts(-16, -15.04, -14.08, -16.48, -12.96, -15.68, -17.28, -12, -14.72, -15.36)
_TABLE = _reach_starts(
    -128.3, 114.3, -109.2, -137.2, -121.9, 123.2, 109.2, -102.9, 90.2, -132.1, -146, -86.4
)
_FOUR_BIT_RANGES = (
    (0.007, 0.007), (-0.012, 0.026), (0.026, -0.012), (0.016, -0.04), (0.016, -0.003), (-0.04, 0.007),
    (-0.003, 0.016), (0.044, -0.003), (-0.012, -0.021), (0.007, 0.054), (0.026, 0.026), (-0.003, -0.04),
)  # fmt: skip
_FIVE_BIT_RANGES = (
    (-0.001, -0.001), (-0.019, 0.012), (0.006, -0.007), (-0.007, 0.006), (-0.001, -0.019), (-0.019, -0.001),
    (-0.019, -0.019), (0.018, -0.001), (-0.001, 0.018), (0.012, 0.012), (0.006, -0.019), (-0.019, 0.006),
)  # fmt: skip

CANDIDATES: Mapping[str, Candidates] = {
    "q4_0": Candidates(_FOUR_BITS, 1),
    "q4_1": Candidates(_FOUR_BIT_RANGES, 1, OffsetKind.FREE),
    "q5_0": Candidates(_FIVE_BITS, 1),
    "q5_1": Candidates(_FIVE_BIT_RANGES, 1, OffsetKind.FREE),
    "q8_0": Candidates(_reach_starts(-128, -127, 127, -126.3), 0),
    "q2_k": Candidates(
        (
            (0.085, 0.085), (0.01, 0.16), (0.135, 0.01), (-0.015, 0.035), (0.21, -0.015), (-0.015, 0.235),
            (0.11, 0.035), (0.06, 0.135), (0.21, 0.11), (0.01, -0.04), (-0.04, 0.085), (0.31, 0.035),
        ),
        1,
        OffsetKind.BELOW_ZERO,
    ),
    "q3_k": Candidates(_reach_starts(-4.12, -3.2, -4.6, -3.8, 4.36, -2.92, -4.32, 3.6, -2.24), 1),
    "q4_k": Candidates(_FOUR_BIT_RANGES, 1, OffsetKind.BELOW_ZERO),
    "q5_k": Candidates(_FIVE_BIT_RANGES, 1, OffsetKind.BELOW_ZERO),
    "q6_k": Candidates(
        _reach_starts(-32, -31.04, -30.08, -29.12, -28.16, -26.88, -25.92, -32.64, -24.96, -24), 1
    ),
    "iq4_nl": Candidates(_TABLE, 1),
    "iq4_xs": Candidates(_TABLE, 1),
    "tq1_0": Candidates(_reach_starts(0.8, 1, 1.25, 1.6, 2, 2.5), 2),
    "tq2_0": Candidates(_reach_starts(0.8, 1, 1.25, 1.6, 2, 2.5), 2),
}  # fmt: skip

# For the integer scales of groups, by their largest value (4, 6 and 8 bits).
UNIT_CANDIDATES: Mapping[int, Candidates] = {
    15: Candidates(_reach_starts(15, 15.4, 14.5, 14, 13.4, 12.7, 12), 1),
    63: Candidates(_reach_starts(63, 63.4, 62.5, 62, 61, 60, 58), 1),
    31: Candidates(_reach_starts(-32, -32.5, -31.5, -31, -30, -29, 31), 1),
    127: Candidates(_reach_starts(-128, -127, -126, 127), 1),
}
