"""The inner loops of the search in torch, for devices other than a CPU: one candidate for all groups at a time.

The error of a group is ``sum w (x - step v - offset)^2``. For the codes that a candidate gives, the best step and
offset are a least-squares fit, stated as a correction of the candidate from moments of what it leaves,
``r = x - step v - offset``: sums of ``w r^2``, ``w v^2``, ``w v``, ``w r v`` and ``w r``. (From moments of ``x`` the
error would be a small difference of large numbers.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.packers.ggml.grid import CodeRange, grouped, nearest, values_of
from quantforge.packers.ggml.trials import Integers, Offset, Trials

LEAST_SHARE = 1e-5  # of the squares of the codes: less is a rounding error of equal codes


def arrange(rows: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` and ``importance * sqrt(x^2 + mean x^2)`` as panels ``[panels, columns, rows of a panel]``.

    ``rows`` is ``[rows, columns]``, ``importance`` ``[columns]``; the mean is over the row.
    """
    x = rows.T.unsqueeze(0).contiguous()
    return x, (x * x + rows.square().mean(1)).sqrt_() * importance.view(1, -1, 1)


def fit(x: Tensor, weights: Tensor, size: int, grid: CodeRange, trials: Trials) -> Tensor:
    """Find step and offset of groups of ``size`` columns of ``x``, ``weights`` ``[panels, columns, rows]``.

    Returns:
        ``[4, panels, groups, rows]``: step, offset, sums of ``w v^2`` and of ``w``. The step of an empty group is 0.
    """
    weight = grouped(weights, size).sum(2)
    groups = grouped(x, size)
    low, high = groups.amin(2), groups.amax(2)
    extreme = torch.where(high > -low, high, low)
    if trials.offset is Offset.BELOW_ZERO:
        low = low.clamp(max=0)
    none = torch.zeros_like(low)
    offset = none if trials.offset is Offset.NONE else low
    best = torch.stack([torch.full_like(low, torch.inf), none, offset, none])
    for first, last in trials.starts:
        if trials.offset is Offset.NONE:
            start = extreme / first, none
        else:
            start = (high - low) * (1 - first - last) / grid.high, low + (high - low) * first
        best = _improved(best, start, moments(x, weights, *start, grid), weight, trials.offset)
    for _ in range(trials.polish):
        sums = moments(x, weights, best[1], best[2], grid)
        best = _improved(best, (best[1], best[2]), sums, weight, trials.offset)
    return torch.cat([best[1:], weight.unsqueeze(0)])


def choose(x: Tensor, weights: Tensor, among: Integers, grid: CodeRange) -> Tensor:
    """Choose step and offset of each group of ``x``, ``weights`` ``[panels, columns, rows]``.

    Returns:
        ``[7, panels, groups, rows]``: the `moments`, then the integers of step and lowered offset.
    """
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
    x, weights = (grouped(part, part.shape[1] // step.shape[1]) for part in (x, weights))
    step, offset = step.unsqueeze(2), offset.unsqueeze(2)
    inverse = torch.where(step == 0, 0.0, step.reciprocal())
    values = values_of(nearest((x - offset) * inverse, grid), grid)
    rest = x - offset - step * values
    weighted, owed = weights * values, weights * rest
    sums = (owed * rest, weighted * values, weighted, owed * values, owed)
    return torch.stack([terms.sum(2) for terms in sums])


def _improved(
    best: Tensor, start: tuple[Tensor, Tensor], sums: Tensor, weight: Tensor, kind: Offset
) -> Tensor:
    """Fit step and offset to the codes of the candidate ``start``; keep them where they are better."""
    (step, offset), (error, squares, ones, products, residue) = start, sums
    if kind is Offset.NONE:
        change, moved, possible = products / squares, torch.zeros_like(step), squares > 0
        fallen = products * change
    else:
        spread, shared = squares - ones * ones / weight, products - ones * residue / weight
        change = shared / spread
        moved = (residue - change * ones) / weight
        fallen = shared * change + residue * residue / weight
        equal = ~(spread > LEAST_SHARE * squares)
        above = torch.zeros_like(equal)
        if kind is Offset.BELOW_ZERO:
            above, at_zero = equal | (offset + moved > 0), products + offset * ones
            change = torch.where(above, at_zero / squares, change)
            moved = torch.where(above, -offset, moved)
            gained = at_zero * change - 2 * offset * residue - offset * offset * weight
            fallen = torch.where(above, gained, fallen)
        possible = (above | ~equal) & (step + change > 0)
    found = torch.stack([error - fallen, step + change, offset + moved, squares])
    return torch.where(possible & (found[0] < best[0]), found, best)
