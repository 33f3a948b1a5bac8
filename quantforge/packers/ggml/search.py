"""Scales that minimise ``sum w (x - q)^2`` of every block, ``w = importance * sqrt(x^2 + mean x^2)``.

The square root favours large weights: the plain sum pulls them towards 0, and errors of one sign add up in the
output. (The factor is ggml's; ``mean`` is over the row here.)

1. `fit_groups` finds step and offset of each group as real numbers, from a few ranges by least squares (`Candidates`).
2. The same search finds the unit of a block of 256, over its steps instead of its weights, and that of its offsets. 3.
With the units as stored, `choose_integers` takes for each group the integers beside its step and offset that have the
   smallest error.
4. Units are fitted once more, in closed form with codes and integers held, and step 3 is repeated around them.

Where no importance is known the search is brief: it begins with fewer ranges, the integers of offsets stay in step 4,
and grids without offsets skip step 4.

Rows are side by side, in panels ``[panels, columns, rows]``. On a CPU the inner loops are compiled (`search_loops`):
panels have `LANES` rows, the last one is filled up with zeros, and a sum has the order of its columns. Elsewhere torch
computes the same, one candidate for all groups at a time, with one panel for all rows.

The error of a group is ``sum w (x - step v - offset)^2``. For the codes that a candidate gives, the best step and
offset are a least-squares fit, stated as a correction of the candidate from moments of what it leaves,
``r = x - step v - offset``: sums of ``w r^2``, ``w v^2``, ``w v``, ``w r v`` and ``w r``. (From moments of ``x`` the
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

CHUNK_WEIGHTS = 1 << 18  # weights at a time: they and their importance stay in a core's cache
BRIEF_STARTS = 6  # ranges to begin with when the search is brief
MIN_FLOAT16 = 2.0**-24  # the smallest float16 above 0
MIN_VARIANCE_SHARE = 1e-5  # of the squares of the codes: less is a rounding error of equal codes
# What to add to the integers of step and offset.
SCALE_AND_MIN_MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
SCALE_MOVES = ((0, 0), (-1, 0), (1, 0))


def search_parameters(
    weight: Tensor, scheme: Scheme, importance: Tensor | None
) -> dict[str, Tensor]:
    """Return the parameters of ``weight`` ``[rows, in]`` float32, as stored; ``importance`` ``[in]``."""
    parts = [
        {key: value[: len(rows)] for key, value in _search_panel(rows, scheme, importance).items()}
        for rows in torch.split(weight, LANES * max(1, CHUNK_WEIGHTS // (LANES * weight.shape[1])))
    ]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _search_panel(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> dict[str, Tensor]:
    columns = weight.new_ones(weight.shape[1]) if importance is None else importance.to(weight)
    x, weights = arrange_panels(weight, columns)
    if scheme.grid == "mxfp4":
        found = _search_exponents(x, weights)
    elif scheme.grid in SCALE_RANGES:
        found = _search_superblocks(x, weights, scheme.grid, brief=importance is None)
    else:
        block = GGML_BLOCKS[scheme.grid]
        step, offset, *_ = fit_groups(
            x, weights, block.group, CODE_RANGES[scheme.grid], CANDIDATES[scheme.grid]
        )
        found = {"scales": round_to_float16(step)}
        if block.zero is Zero.MIN:
            found["mins"] = round_to_float16(offset)
    return {key: value.transpose(1, 2).flatten(0, 1) for key, value in found.items()}


def round_to_float16(scales: Tensor) -> Tensor:
    """Round to float16; what is not 0 stays so."""
    rounded = scales.half()
    least = torch.copysign(torch.full_like(scales, MIN_FLOAT16), scales).half()
    return torch.where((rounded == 0) & (scales != 0), least, rounded)


def _search_exponents(x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Choose for each block the exponent that covers it, the one below or the one above."""
    largest = split_groups(x.abs(), 32).amax(2)
    # Half the step that covers the block; it is taken 1, 2 or 4 times. Codes stand for twice their value.
    exponents = torch.where(largest > 0, largest.frexp().exponent + 123, 0).clamp_(0, 252)
    units = decode_half_e8m0(exponents)
    none = torch.zeros_like(units)
    start, units = torch.stack([2 * units, none]), torch.stack([units, none])
    among = IntegerCandidates(start, units, (1, 4), ((0, 0), (-1, 0), (2, 0)))
    found = choose_integers(x, weights, among, CodeRange(0, 15, E2M1_VALUES))
    return {"exponents": (exponents + found[5].log2()).to(torch.uint8)}


def _search_superblocks(x: Tensor, weights: Tensor, grid: str, *, brief: bool) -> dict[str, Tensor]:
    block, codes, limits, trials = (
        GGML_BLOCKS[grid],
        CODE_RANGES[grid],
        SCALE_RANGES[grid],
        CANDIDATES[grid],
    )
    groups, affine = block.columns // block.group, block.zero is Zero.MIN
    trials = replace(trials, starts=trials.starts[:BRIEF_STARTS]) if brief else trials
    step, offset, squares, weight = fit_groups(x, weights, block.group, codes, trials)
    targets, units = (step, offset), [_fit_unit(step, squares, groups, limits)]
    units.append(
        _fit_unit(-offset, weight, groups, limits) if affine else torch.zeros_like(units[0])
    )

    def chosen(start: tuple[Tensor, Tensor], moves: Sequence[tuple[int, int]]) -> Tensor:
        among = (torch.stack(start), torch.stack(units).float(), (limits.low, limits.high), moves)
        return choose_integers(x, weights, IntegerCandidates(*among), codes)

    found = chosen(targets, SCALE_AND_MIN_MOVES if affine else SCALE_MOVES)
    if affine or not brief:
        targets = _refit_targets(found, units, weight, affine)
        units = _refit_units(found, units, weight, groups, affine)
        found = chosen(targets, SCALE_AND_MIN_MOVES if affine and not brief else SCALE_MOVES)
    numbers = found[5:].to(torch.uint8 if affine else torch.int8)
    if affine:
        return {"d": units[0], "dmin": units[1], "scales": numbers[0], "mins": numbers[1]}
    return {"d": units[0], "scales": numbers[0]}


def _fit_unit(values: Tensor, weights: Tensor, groups: int, limits: CodeRange) -> Tensor:
    """Return the float16 unit of each block in which its ``values`` are nearly integers."""
    found = fit_groups(
        values.contiguous(), weights.contiguous(), groups, limits, UNIT_CANDIDATES[limits.high]
    )
    return round_to_float16(found[0])


def _multiply_units(unit: Tensor, numbers: Tensor) -> Tensor:
    """Multiply ``unit`` ``[panels, blocks, LANES]`` float16 with the ``numbers`` of its groups."""
    return (
        unit.float().unsqueeze(2) * split_groups(numbers, numbers.shape[1] // unit.shape[1])
    ).flatten(1, 2)


def _refit_targets(
    found: Tensor, units: list[Tensor], weight: Tensor, affine: bool
) -> tuple[Tensor, Tensor]:
    """Return the best step and offset of each group with its codes held."""
    _, squares, ones, products, residue, scales, mins = found
    step, offset = _multiply_units(units[0], scales), -_multiply_units(units[1], mins)
    if not affine:
        return step + torch.where(squares > 0, products / squares, 0.0), offset
    spread = squares - ones * ones / weight
    change = (products - ones * residue / weight) / spread
    moved = (residue - change * ones) / weight
    usable = (spread > MIN_VARIANCE_SHARE * squares) & (step + change > 0)
    usable &= offset + moved <= 0
    return torch.where(usable, step + change, step), torch.where(usable, offset + moved, offset)


def _refit_units(
    found: Tensor, units: list[Tensor], weight: Tensor, groups: int, affine: bool
) -> list[Tensor]:
    """Return the units that fit best, codes and integers held; as stored, hence not always better."""
    _, squares, ones, products, residue, up, down = found

    def total(terms: Tensor) -> Tensor:
        # One by one: what torch sums at once may depend on the number of threads.
        first, *others = split_groups(terms.double(), groups).unbind(2)
        for term in others:
            first = first + term
        return first

    square, pull = total(up * up * squares), total(up * products)
    if not affine:
        change = torch.where(square > 0, pull / square, 0.0)
        return [round_to_float16((units[0].double() + change).float()), units[1]]
    mixed, other = -total(up * down * ones), total(down * down * weight)
    lift = -total(down * residue)
    determinant = square * other - mixed * mixed
    changes = (
        (pull * other - lift * mixed) / determinant,
        (lift * square - pull * mixed) / determinant,
    )
    moved = [unit.double() + change for unit, change in zip(units, changes, strict=True)]
    usable = (determinant > 1e-9 * square * other) & (moved[0] > 0) & (moved[1] >= 0)
    return [
        round_to_float16(torch.where(usable, new, old.double()).float())
        for new, old in zip(moved, units, strict=True)
    ]


# The inner loops


class OffsetKind(Enum):
    """Offset of a group: none, never above zero, or any."""

    NONE = auto()
    BELOW_ZERO = auto()
    FREE = auto()


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of one group.

    Attributes:
        starts: without an offset ``(reach, 0)``: the code that the largest magnitude of the group goes to, before
            rounding; with one the shares of the range cut off at its low and at its high end.
        polish: how often the best is encoded and fitted again.
        offset: of the group.
    """

    starts: tuple[tuple[float, float], ...]
    polish: int
    offset: OffsetKind = OffsetKind.NONE


@dataclass(frozen=True, slots=True)
class IntegerCandidates:
    """Integers that step and offset of a group are chosen among, times the units of its block.

    Attributes:
        start: step and offset to look around, ``[2, panels, groups, rows]``.
        units: of steps and of lowered offsets (minus the offset), ``[2, panels, blocks, rows]``.
        limits: the least and the greatest integer.
        moves: what is added to the integers nearest to ``start``, for each candidate.
    """

    start: Tensor
    units: Tensor
    limits: tuple[int, int]
    moves: Sequence[tuple[int, int]]


def _use_compiled_loops(x: Tensor) -> bool:
    """Return whether the compiled loops compute with ``x``."""
    return x.device.type == "cpu"


def arrange_panels(rows: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` and ``importance * sqrt(x^2 + mean x^2)`` as panels ``[panels, columns, rows of a panel]``.

    ``rows`` is ``[rows, columns]``, ``importance`` ``[columns]``; the mean is over the row.
    """
    if _use_compiled_loops(rows):
        from quantforge.packers.ggml import search_loops

        panels = -(-len(rows) // LANES)
        x = torch.empty(panels, rows.shape[1], LANES)
        weights = torch.empty_like(x)
        arrays = (rows.contiguous(), importance.contiguous(), x, weights)
        search_loops.arrange_panels(*(part.numpy() for part in arrays))
        return x, weights
    x = rows.T.unsqueeze(0).contiguous()
    return x, (x * x + rows.square().mean(1)).sqrt_() * importance.view(1, -1, 1)


def fit_groups(
    x: Tensor, weights: Tensor, size: int, grid: CodeRange, trials: Candidates
) -> Tensor:
    """Find step and offset of groups of ``size`` columns of ``x``, ``weights`` ``[panels, columns, rows]``.

    Returns:
        ``[4, panels, groups, rows]``: step, offset, sums of ``w v^2`` and of ``w``. The step of an empty group is 0.
    """
    if _use_compiled_loops(x):
        from quantforge.packers.ggml import search_loops

        found = torch.empty(4, x.shape[0], x.shape[1] // size, x.shape[2])
        starts = numpy.array(trials.starts, numpy.float32)
        kind = trials.offset is not OffsetKind.NONE, trials.offset is OffsetKind.BELOW_ZERO
        numbers = (starts, trials.polish, *kind, *value_thresholds(grid))
        search_loops.fit_groups(x.numpy(), weights.numpy(), *numbers, found.numpy())
        return found
    weight = split_groups(weights, size).sum(2)
    groups = split_groups(x, size)
    low, high = groups.amin(2), groups.amax(2)
    extreme = torch.where(high > -low, high, low)
    if trials.offset is OffsetKind.BELOW_ZERO:
        low = low.clamp(max=0)
    none = torch.zeros_like(low)
    offset = none if trials.offset is OffsetKind.NONE else low
    best = torch.stack([torch.full_like(low, torch.inf), none, offset, none])
    for first, last in trials.starts:
        if trials.offset is OffsetKind.NONE:
            start = extreme / first, none
        else:
            start = (high - low) * (1 - first - last) / grid.high, low + (high - low) * first
        best = _improve_best(best, start, moments(x, weights, *start, grid), weight, trials.offset)
    for _ in range(trials.polish):
        sums = moments(x, weights, best[1], best[2], grid)
        best = _improve_best(best, (best[1], best[2]), sums, weight, trials.offset)
    return torch.cat([best[1:], weight.unsqueeze(0)])


def choose_integers(
    x: Tensor, weights: Tensor, among: IntegerCandidates, grid: CodeRange
) -> Tensor:
    """Choose step and offset of each group of ``x``, ``weights`` ``[panels, columns, rows]``.

    Returns:
        ``[7, panels, groups, rows]``: the `moments`, then the integers of step and lowered offset.
    """
    if _use_compiled_loops(x):
        from quantforge.packers.ggml import search_loops

        found = torch.empty(7, *among.start.shape[1:])
        moves = numpy.array((among.limits, *among.moves), numpy.float32)
        arrays = (part.numpy() for part in (x, weights, among.start, among.units))
        search_loops.choose_integers(*arrays, moves, *value_thresholds(grid), found.numpy())
        return found
    start, units, limits = among.start, among.units, among.limits
    share = start.shape[2] // units.shape[2]
    unit, lowering = units.repeat_interleave(share, 2)
    nearest_ones = [
        (start[0] / torch.where(unit == 0, 1.0, unit)).round().clamp(*limits),
        (-start[1] / torch.where(lowering == 0, 1.0, lowering)).round().clamp(*limits),
    ]
    best: Tensor | None = None
    for move in among.moves:
        scale, lowered = (
            (near + away).clamp(*limits) for near, away in zip(nearest_ones, move, strict=True)
        )
        sums = moments(x, weights, unit * scale, -(lowering * lowered), grid)
        tried = torch.cat([sums, scale.unsqueeze(0), lowered.unsqueeze(0)])
        best = tried if best is None else torch.where(tried[0] < best[0], tried, best)
    assert best is not None
    return best


def moments(x: Tensor, weights: Tensor, step: Tensor, offset: Tensor, grid: CodeRange) -> Tensor:
    """Return sums over groups of the error, ``w v^2``, ``w v``, ``w r v`` and ``w r``, each like ``step``.

    Args:
        x: ``[panels, columns, rows]``.
        weights: of the same shape.
        step: ``[panels, groups, rows]``.
        offset: of the same shape.
        grid: the values ``v``.
    """
    x, weights = (split_groups(part, part.shape[1] // step.shape[1]) for part in (x, weights))
    step, offset = step.unsqueeze(2), offset.unsqueeze(2)
    inverse = torch.where(step == 0, 0.0, step.reciprocal())
    values = decode_values(nearest_codes((x - offset) * inverse, grid), grid)
    rest = x - offset - step * values
    weighted, owed = weights * values, weights * rest
    sums = (owed * rest, weighted * values, weighted, owed * values, owed)
    return torch.stack([terms.sum(2) for terms in sums])


def _improve_best(
    best: Tensor, start: tuple[Tensor, Tensor], sums: Tensor, weight: Tensor, kind: OffsetKind
) -> Tensor:
    """Fit step and offset to the codes of the candidate ``start``; keep them where they are better."""
    (step, offset), (error, squares, ones, products, residue) = start, sums
    if kind is OffsetKind.NONE:
        change, moved, possible = products / squares, torch.zeros_like(step), squares > 0
        fallen = products * change
    else:
        spread, shared = squares - ones * ones / weight, products - ones * residue / weight
        change = shared / spread
        moved = (residue - change * ones) / weight
        fallen = shared * change + residue * residue / weight
        equal = ~(spread > MIN_VARIANCE_SHARE * squares)
        above = torch.zeros_like(equal)
        if kind is OffsetKind.BELOW_ZERO:
            above, at_zero = equal | (offset + moved > 0), products + offset * ones
            change = torch.where(above, at_zero / squares, change)
            moved = torch.where(above, -offset, moved)
            gained = at_zero * change - 2 * offset * residue - offset * offset * weight
            fallen = torch.where(above, gained, fallen)
        possible = (above | ~equal) & (step + change > 0)
    found = torch.stack([error - fallen, step + change, offset + moved, squares])
    return torch.where(possible & (found[0] < best[0]), found, best)


# The ranges that the search for the scale of a group begins with, for each type. Of a dense grid of ranges (61 of each
# sign without an offset, 17 x 17 with one) these were chosen one by one, each the one that lowered the error of the
# layers of a small llama most. What they leave above the dense grid is in docs/results/gguf-encoding.md.


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

# Scales of groups as integers: of 4, 6 and 8 bits.
UNIT_CANDIDATES: Mapping[int, Candidates] = {
    15: Candidates(_reach_starts(15, 15.4, 14.5, 14, 13.4, 12.7, 12), 1),
    63: Candidates(_reach_starts(63, 63.4, 62.5, 62, 61, 60, 58), 1),
    31: Candidates(_reach_starts(-32, -32.5, -31.5, -31, -30, -29, 31), 1),
    127: Candidates(_reach_starts(-128, -127, -126, 127), 1),
}
