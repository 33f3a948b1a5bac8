"""Budgets: which scheme each group of linears gets, so that the whole loses least within so many bytes.

Every group of linears has some options, each with its bytes and its loss (nats that its error costs at the output of
the model, which add up). Options that a mixture of two others beats in both are dropped, and the rest is a
multiple-choice knapsack: it is solved exactly, by dynamic programming over bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantforge.errors import RefusedError

STEPS = (
    1 << 15
)  # of the bytes that options differ by: what is rounded up of each is less than a STEPS-th of these


@dataclass(frozen=True, slots=True)
class Option:
    """Scheme for a group of linears: the bytes that it counts, and what its error costs in nats per token."""

    scheme: str
    nbytes: int
    nats: float


@dataclass(frozen=True, slots=True)
class Point:
    """Choice of an option for every group, with its nats."""

    nats: float
    chosen: tuple[Option, ...]


def solved(groups: Sequence[Sequence[Option]], room: int) -> Point:
    """Return the options of all groups with the least sum of nats whose bytes are at most ``room``.

    Of equal sums the one with fewer bytes wins, then the earlier options of earlier groups.

    Raises:
        RefusedError: even the smallest options take more.
    """
    import numpy as np

    hulls = [_hull(options) for options in groups]
    least = sum(options[0].nbytes for options in hulls)
    if least > room:
        raise RefusedError(
            f"the smallest options take {least:,} bytes of {room:,}", "a larger target"
        )
    spread = sum(options[-1].nbytes for options in hulls) - least
    unit = max(1, -(-min(room - least, spread) // STEPS))
    width = min(room - least, spread) // unit + 1
    best = np.zeros(width)
    picks = np.zeros((len(hulls), width), dtype=np.int8)
    for number, options in enumerate(hulls):
        sums = np.full((len(options), width), np.inf)
        for place, option in enumerate(options):
            more = -(-(option.nbytes - options[0].nbytes) // unit)
            if more < width:
                sums[place, more:] = best[: width - more] + option.nats
        picks[number] = sums.argmin(0)
        best = sums.min(0)
    left = int(best.argmin())
    chosen: list[Option] = []
    for options, row in zip(reversed(hulls), picks[::-1], strict=True):
        option = options[int(row[left])]
        left -= -(-(option.nbytes - options[0].nbytes) // unit)
        chosen.append(option)
    return point_of(chosen[::-1])


def point_of(chosen: Sequence[Option]) -> Point:
    """Return a choice with its sum of nats."""
    return Point(math.fsum(option.nats for option in chosen), tuple(chosen))


CURVE_POINTS = 33


def curve(groups: Sequence[Sequence[Option]]) -> list[Point]:
    """Return the best choices from the least size to the most; each loses less than the one before."""
    least, most = (
        sum(pick(one.nbytes for one in options) for options in groups) for pick in (min, max)
    )
    found: list[Point] = []
    for number in range(CURVE_POINTS):
        one = solved(groups, least + (most - least) * number // (CURVE_POINTS - 1))
        if not found or one.nats < found[-1].nats:
            found.append(one)
    return found


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options that no mixture of two others beats, by growing bytes."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (one.nbytes, one.nats)):
        if kept and option.nats >= kept[-1].nats:
            continue
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) >= _slope(kept[-2], option):
            kept.pop()
        kept.append(option)
    return kept


def _slope(first: Option, second: Option) -> float:
    return (second.nats - first.nats) / max(1, second.nbytes - first.nbytes)


def patterns_of(
    schemes: Mapping[str, str], places: Mapping[str, tuple[str, str, str]]
) -> list[tuple[str, str]]:
    """Return rules ``(pattern, scheme)`` that give linears their schemes: one for each kind of linear and scheme.

    Args:
        schemes: of linears, by canonical name.
        places: of each, a pattern for what stands before the number of its block, this number, and one for the rest.
    """
    together: dict[tuple[str, str, str], dict[str, None]] = {}
    for name, scheme in schemes.items():
        before, number, behind = places[name]
        together.setdefault((before, behind, scheme), {})[number] = None
    return [
        (f"re:{before}({'|'.join(numbers)}){behind}", scheme)
        for (before, behind, scheme), numbers in together.items()
    ]
