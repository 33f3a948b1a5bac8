"""Axes of charts: marks at round values, of which at least three can be read, whatever the range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from quantforge.evaluation.report_page.drawing import LINE

LEAST, MOST = 3, 8  # marks
_NARROW = 210  # pixels in which round values may be too close to each other for their labels
_DIGITS = ((1,), (1, 3), (1, 2, 5))  # of each power, the coarsest first
_LOOKS = {"labelOverlap": "greedy", "gridColor": LINE}


def log_domain(values: Sequence[float]) -> list[float]:
    """Return the ends of a logarithmic axis, with some room around the values, which are above 0."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = 0.04 * max(high - low, 0.1)
    return [10 ** (low - room), 10 ** (high + room)]


def log_axis(domain: Sequence[float]) -> dict[str, Any]:
    """Return scale and axis from the first value of a domain to the last: powers, or as few of their parts as do."""
    low, high = domain
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for digits in _DIGITS:
        marks = (digit * 10.0**power for power in powers for digit in digits)
        found = [mark for mark in marks if low <= mark <= high]
        if len(found) >= LEAST:
            break
    else:
        found = _round_values(low, high)
    found = found[:: math.ceil(len(found) / MOST)]
    return {
        "scale": {"type": "log", "nice": False, "domain": [low, high]},
        "axis": {"values": found, "format": ".6~r", **_LOOKS},
    }


def linear_axis(domain: Sequence[float], width: float) -> dict[str, Any]:
    """Return scale and axis from the first value of a domain to the last, on so many pixels."""
    low, high = domain
    if width < _NARROW:
        found = [float(f"{low + share * (high - low):.3g}") for share in (1 / 6, 1 / 2, 5 / 6)]
    else:
        found = _round_values(low, high)
    return {
        "scale": {"domain": [low, high], "nice": False, "zero": False},
        "axis": {"values": found, "format": ".6~r", **_LOOKS},
    }


def _round_values(low: float, high: float) -> list[float]:
    """Return multiples of the largest step (1, 2 or 5 of a power of ten) that has enough of them within a range."""
    for step in _steps(high - low):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first + 1 >= LEAST:
            return [number * step for number in range(first, last + 1)]
    raise AssertionError("steps become as small as it takes")


def _steps(most: float) -> Iterator[float]:
    """Yield steps of 5, 2 and 1 of the powers of ten, from about a range downwards."""
    power = math.ceil(math.log10(most))
    while True:
        yield from (digit * 10.0**power for digit in (5, 2, 1))
        power -= 1
