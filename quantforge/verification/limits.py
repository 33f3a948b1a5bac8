"""Limits on what an artifact may lose, in units of plain rounding: one row for each width of codes.

The limits are ratios to what `yardstick` computes for the very matrix, so that they say nothing about outliers, groups
or families. They hold what every method of this program and the artifacts of other tools have been seen to reach, with
a margin; docs/results/verify.md has the extremes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.grids import ScaleType
from quantforge.scheme import Scheme
from quantforge.verification.deviation import Deviation

SPREADS = 6.0  # robust standard deviations of the gains of all rows
CHANCES = (
    5.0  # times the gain that the error of a row has by chance, which counts in rows of few columns
)
UNSEEN = (
    5.0  # times more where no inputs were seen, so that GPTQ's errors cannot be told from others
)
LEARNED = 0.08  # of the gain: by so much learned scales may be off together
ROUGH = 3.0  # times the gain of a row where scales are rounded too: those of small rows are far off


@dataclass(frozen=True, slots=True)
class Limits:
    """Most that is in order: error of the whole and of a row, share of a column, gain of the whole and of a row."""

    whole: float
    row: float
    column: float
    gain: float
    row_gain: float


BY_BITS: dict[int, Limits] = {
    1: Limits(4.0, 16.0, 0.5, 0.35, 0.7),
    2: Limits(4.0, 16.0, 0.5, 0.25, 0.5),
    3: Limits(3.0, 12.0, 0.4, 0.06, 0.2),
    4: Limits(2.5, 12.0, 0.25, 0.025, 0.04),
    5: Limits(2.5, 12.0, 0.25, 0.02, 0.04),
    6: Limits(2.5, 12.0, 0.25, 0.02, 0.03),
    7: Limits(2.5, 12.0, 0.25, 0.02, 0.03),
    8: Limits(
        2.5, 64.0, 0.75, 0.01, 0.02
    ),  # a search may clip a weight whose column was small in its text
}


@dataclass(frozen=True, slots=True)
class Excess:
    """One thing that is out of its limit: ``whole`` of a tensor, or a row or column of it."""

    whole: bool
    text: str


def excesses(
    found: Deviation, scheme: Scheme, *, wanders: bool, tuned: bool = False
) -> Iterator[Excess]:
    """Yield what is beyond the limits.

    Args:
        found: what was compared.
        scheme: of the tensor.
        wanders: errors may be GPTQ's, and no inputs were seen.
        tuned: scales were learned.
    """
    limits = BY_BITS[scheme.weight_bits]
    if tuned:
        gain, row_gain = limits.gain + LEARNED, limits.row_gain + LEARNED
        limits = replace(limits, gain=gain, row_gain=row_gain)
    more = UNSEEN if wanders else 1.0
    if found.whole > limits.whole * more:
        yield Excess(True, f"{found.whole:.2f} times the error of plain rounding, at most "
                           f"{limits.whole * more:g} is in order for {scheme}")  # fmt: skip
    if abs(found.gain) > limits.gain:
        yield Excess(True, f"gain {1 + found.gain:.4f}: all weights are scaled")
    yield from _rows(found, limits, more, ROUGH if scheme.scale is ScaleType.DOUBLE else 1.0)
    share, place = found.columns.max(0)
    if float(share) > limits.column * more:
        others = int((found.columns > limits.column * more).sum()) - 1
        text = (f"column {int(place)}: its error alone is {float(share):.2f} times what rounding "
                f"costs the whole matrix{_more(others)}")  # fmt: skip
        yield Excess(False, text)


def _rows(found: Deviation, limits: Limits, more: float, rough: float) -> Iterator[Excess]:
    worst, place = found.rows.max(0)
    if float(worst) > limits.row * more:
        others = int((found.rows > limits.row * more).sum()) - 1
        text = f"row {int(place)}: {float(worst):.2f} times the error of plain rounding"
        yield Excess(False, f"{text}{_more(others)}")
    scaled = _scaled(found, limits.row_gain * rough)
    if bool(scaled.any()):
        place = (found.gains.abs() * scaled).argmax()
        text = f"row {int(place)}: gain {1 + float(found.gains[place]):.4f}"
        yield Excess(False, f"{text}{_more(int(scaled.sum()) - 1)}")


def _scaled(found: Deviation, limit: float) -> Tensor:
    """Mark rows whose gain is far from the median, both by `Deviation.gains` and by `Deviation.own_gains`."""
    beyond = torch.ones(len(found.gains), dtype=torch.bool)
    for gains in (found.gains, found.own_gains):
        middle = gains.median()
        distance = (gains - middle).abs()
        least = max(limit, SPREADS * 1.4826 * float(distance.median()))
        beyond &= distance > (CHANCES * found.chance).clamp(min=least)
    return beyond


def _more(count: int) -> str:
    return f", and {count} more" if count > 0 else ""


def correlation(both: Tensor, weights: Tensor) -> float:
    """Return the correlation of two rows; columns count by their weights."""
    weights = weights / weights.sum()
    apart = both - (both * weights).sum(1, keepdim=True)
    products = (apart * weights) @ apart.T
    return float(products[0, 1] / (products[0, 0] * products[1, 1]).sqrt().clamp(min=1e-30))
