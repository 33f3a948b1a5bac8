"""Scales that minimise ``sum w (x - q)^2`` of every block, ``w = importance * sqrt(x^2 + mean x^2)``.

The square root favours large weights: the plain sum pulls them towards 0, and errors of one sign add up in the
output. (The factor is ggml's; ``mean`` is over the row here.)

1. `fit` finds step and offset of each group as real numbers, from a few ranges by least squares (`trials`).
2. The same search finds the unit of a block of 256, over its steps instead of its weights, and that of its offsets.
3. With the units as stored, each group takes the integers beside its step and offset that have the smallest error.
4. Units are fitted once more, in closed form with codes and integers held, and step 3 is repeated around them.

Where no importance is known the search is brief: it begins with fewer ranges, the integers of offsets stay in step 4,
and grids without offsets skip step 4.

The inner loops are in `lanes` (CPU) and `broadcast` (elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantforge.grids import E2M1_VALUES, SUPERBLOCKS, Zero
from quantforge.packers.ggml import broadcast, lanes, panels
from quantforge.packers.ggml.grid import GRIDS, LIMITS, CodeRange, grouped, power_of_two
from quantforge.packers.ggml.trials import TRIALS, UNITS, Integers, Trials
from quantforge.scheme import Scheme

CHUNK = 1 << 18  # weights at a time: they and their importance stay in a core's cache
BRIEF = 6  # ranges to begin with when the search is brief
LEAST = 2.0**-24  # the smallest float16 above 0
# What to add to the integers of step and offset.
ACROSS = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
ALONG = ((0, 0), (-1, 0), (1, 0))


def search(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> dict[str, Tensor]:
    """Return the parameters of ``weight`` ``[rows, in]`` float32, as stored; ``importance`` ``[in]``."""
    parts = [
        {key: value[: len(rows)] for key, value in _search(rows, scheme, importance).items()}
        for rows in _chunks(weight)
    ]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _chunks(weight: Tensor) -> Iterator[Tensor]:
    yield from torch.split(weight, panels.LANES * max(1, CHUNK // (panels.LANES * weight.shape[1])))


def _search(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> dict[str, Tensor]:
    panels = _Panels.of(weight, importance)
    if scheme.grid == "mxfp4":
        found = _powers(panels)
    elif scheme.grid in LIMITS:
        found = _superblocks(panels, scheme.grid, brief=importance is None)
    else:
        block = SUPERBLOCKS[scheme.grid]
        step, offset, *_ = panels.fit(block.group, GRIDS[scheme.grid], TRIALS[scheme.grid])
        found = {"scales": stored(step)}
        if block.zero is Zero.MIN:
            found["mins"] = stored(offset)
    return {key: value.transpose(1, 2).flatten(0, 1) for key, value in found.items()}


def stored(scales: Tensor) -> Tensor:
    """Round to float16; what is not 0 stays so."""
    rounded = scales.half()
    least = torch.copysign(torch.full_like(scales, LEAST), scales).half()
    return torch.where((rounded == 0) & (scales != 0), least, rounded)


@dataclass(frozen=True, slots=True)
class _Panels:
    """Rows side by side: ``x`` and ``weights`` ``[panels, columns, rows]``; the last panel may have rows of zeros."""

    x: Tensor
    weights: Tensor

    @classmethod
    def of(cls, weight: Tensor, importance: Tensor | None) -> _Panels:
        columns = weight.new_ones(weight.shape[1]) if importance is None else importance.to(weight)
        return cls(*_engine(weight).arrange(weight, columns))

    def fit(self, size: int, grid: CodeRange, trials: Trials) -> Tensor:
        found: Tensor = _engine(self.x).fit(self.x, self.weights, size, grid, trials)
        return found

    def choose(self, among: Integers, grid: CodeRange) -> Tensor:
        found: Tensor = _engine(self.x).choose(self.x, self.weights, among, grid)
        return found


def _engine(x: Tensor) -> ModuleType | Any:
    return lanes if x.device.type == "cpu" else broadcast


def _powers(panels: _Panels) -> dict[str, Tensor]:
    """Choose for each block the exponent that covers it, the one below or the one above."""
    largest = grouped(panels.x.abs(), 32).amax(2)
    # Half the step that covers the block; it is taken 1, 2 or 4 times. Codes stand for twice their value.
    exponents = torch.where(largest > 0, largest.frexp().exponent + 123, 0).clamp_(0, 252)
    units = power_of_two(exponents)
    none = torch.zeros_like(units)
    start, units = torch.stack([2 * units, none]), torch.stack([units, none])
    among = Integers(start, units, (1, 4), ((0, 0), (-1, 0), (2, 0)))
    found = panels.choose(among, CodeRange(0, 15, E2M1_VALUES))
    return {"exponents": (exponents + found[5].log2()).to(torch.uint8)}


def _superblocks(panels: _Panels, grid: str, *, brief: bool) -> dict[str, Tensor]:
    block, codes, limits, trials = SUPERBLOCKS[grid], GRIDS[grid], LIMITS[grid], TRIALS[grid]
    groups, affine = block.columns // block.group, block.zero is Zero.MIN
    trials = replace(trials, starts=trials.starts[:BRIEF]) if brief else trials
    step, offset, squares, weight = panels.fit(block.group, codes, trials)
    targets, units = (step, offset), [_unit(step, squares, groups, limits)]
    units.append(_unit(-offset, weight, groups, limits) if affine else torch.zeros_like(units[0]))

    def chosen(start: tuple[Tensor, Tensor], moves: Sequence[tuple[int, int]]) -> Tensor:
        among = (torch.stack(start), torch.stack(units).float(), (limits.low, limits.high), moves)
        return panels.choose(Integers(*among), codes)

    found = chosen(targets, ACROSS if affine else ALONG)
    if affine or not brief:
        targets = _targets(found, units, weight, affine)
        units = _refitted(found, units, weight, groups, affine)
        found = chosen(targets, ACROSS if affine and not brief else ALONG)
    numbers = found[5:].to(torch.uint8 if affine else torch.int8)
    if affine:
        return {"d": units[0], "dmin": units[1], "scales": numbers[0], "mins": numbers[1]}
    return {"d": units[0], "scales": numbers[0]}


def _unit(values: Tensor, weights: Tensor, groups: int, limits: CodeRange) -> Tensor:
    """Return the float16 unit of each block in which its ``values`` are nearly integers."""
    return stored(
        _Panels(values.contiguous(), weights.contiguous()).fit(groups, limits, UNITS[limits.high])[
            0
        ]
    )


def _times(unit: Tensor, numbers: Tensor) -> Tensor:
    """Multiply ``unit`` ``[panels, blocks, LANES]`` float16 with the ``numbers`` of its groups."""
    return (
        unit.float().unsqueeze(2) * grouped(numbers, numbers.shape[1] // unit.shape[1])
    ).flatten(1, 2)


def _targets(
    found: Tensor, units: list[Tensor], weight: Tensor, affine: bool
) -> tuple[Tensor, Tensor]:
    """Return the best step and offset of each group with its codes held."""
    _, squares, ones, products, residue, scales, mins = found
    step, offset = _times(units[0], scales), -_times(units[1], mins)
    if not affine:
        return step + torch.where(squares > 0, products / squares, 0.0), offset
    spread = squares - ones * ones / weight
    change = (products - ones * residue / weight) / spread
    moved = (residue - change * ones) / weight
    usable = (spread > broadcast.LEAST_SHARE * squares) & (step + change > 0)
    usable &= offset + moved <= 0
    return torch.where(usable, step + change, step), torch.where(usable, offset + moved, offset)


def _refitted(
    found: Tensor, units: list[Tensor], weight: Tensor, groups: int, affine: bool
) -> list[Tensor]:
    """Return the units that fit best, codes and integers held; as stored, hence not always better."""
    _, squares, ones, products, residue, up, down = found

    def total(terms: Tensor) -> Tensor:
        # One by one: what torch sums at once may depend on the number of threads.
        first, *others = grouped(terms.double(), groups).unbind(2)
        for term in others:
            first = first + term
        return first

    square, pull = total(up * up * squares), total(up * products)
    if not affine:
        change = torch.where(square > 0, pull / square, 0.0)
        return [stored((units[0].double() + change).float()), units[1]]
    mixed, other, lift = (
        -total(up * down * ones),
        total(down * down * weight),
        -total(down * residue),
    )
    determinant = square * other - mixed * mixed
    changes = (
        (pull * other - lift * mixed) / determinant,
        (lift * square - pull * mixed) / determinant,
    )
    moved = [unit.double() + change for unit, change in zip(units, changes, strict=True)]
    usable = (determinant > 1e-9 * square * other) & (moved[0] > 0) & (moved[1] >= 0)
    return [
        stored(torch.where(usable, new, old.double()).float())
        for new, old in zip(moved, units, strict=True)
    ]
