"""Ranges to cover with which the search for the scale of a group begins, for each type.

Of a dense grid of ranges (61 of each sign without an offset, 17 x 17 with one) these were taken one by one, each the
one that lowered the error of the layers of a small llama most. What they leave above the dense grid is in
docs/results/gguf-encoding.md; after them come `Trials.polish` rounds of fitting and encoding again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor


class Offset(Enum):
    """Offset of a group: none, never above zero, or any."""

    NONE = auto()
    BELOW_ZERO = auto()
    FREE = auto()


@dataclass(frozen=True, slots=True)
class Trials:
    """Candidates of one group.

    Attributes:
        starts: without an offset ``(reach, 0)``: the code that the largest magnitude of the group goes to, before
            rounding; with one the shares of the range cut off at its low and at its high end.
        polish: how often the best is encoded and fitted again.
        offset: of the group.
    """

    starts: tuple[tuple[float, float], ...]
    polish: int
    offset: Offset = Offset.NONE


@dataclass(frozen=True, slots=True)
class Integers:
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


def _reaches(*numbers: float) -> tuple[tuple[float, float], ...]:
    return tuple((number, 0.0) for number in numbers)


_FOUR_BITS = _reaches(-8.08, -7.12, -8.64, -7.76, -6.16, -9.2, -8.32, -6.8, -7.36, 8.56)
_FIVE_BITS = _reaches(-16, -15.04, -14.08, -16.48, -12.96, -15.68, -17.28, -12, -14.72, -15.36)
_TABLE = _reaches(
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

TRIALS: Mapping[str, Trials] = {
    "q4_0": Trials(_FOUR_BITS, 1),
    "q4_1": Trials(_FOUR_BIT_RANGES, 1, Offset.FREE),
    "q5_0": Trials(_FIVE_BITS, 1),
    "q5_1": Trials(_FIVE_BIT_RANGES, 1, Offset.FREE),
    "q8_0": Trials(_reaches(-128, -127, 127, -126.3), 0),
    "q2_k": Trials(
        (
            (0.085, 0.085), (0.01, 0.16), (0.135, 0.01), (-0.015, 0.035), (0.21, -0.015), (-0.015, 0.235),
            (0.11, 0.035), (0.06, 0.135), (0.21, 0.11), (0.01, -0.04), (-0.04, 0.085), (0.31, 0.035),
        ),
        1,
        Offset.BELOW_ZERO,
    ),
    "q3_k": Trials(_reaches(-4.12, -3.2, -4.6, -3.8, 4.36, -2.92, -4.32, 3.6, -2.24), 1),
    "q4_k": Trials(_FOUR_BIT_RANGES, 1, Offset.BELOW_ZERO),
    "q5_k": Trials(_FIVE_BIT_RANGES, 1, Offset.BELOW_ZERO),
    "q6_k": Trials(
        _reaches(-32, -31.04, -30.08, -29.12, -28.16, -26.88, -25.92, -32.64, -24.96, -24), 1
    ),
    "iq4_nl": Trials(_TABLE, 1),
    "iq4_xs": Trials(_TABLE, 1),
    "tq1_0": Trials(_reaches(0.8, 1, 1.25, 1.6, 2, 2.5), 2),
    "tq2_0": Trials(_reaches(0.8, 1, 1.25, 1.6, 2, 2.5), 2),
}  # fmt: skip

# Scales of groups as integers: of 4, 6 and 8 bits.
UNITS: Mapping[int, Trials] = {
    15: Trials(_reaches(15, 15.4, 14.5, 14, 13.4, 12.7, 12), 1),
    63: Trials(_reaches(63, 63.4, 62.5, 62, 61, 60, 58), 1),
    31: Trials(_reaches(-32, -32.5, -31.5, -31, -30, -29, 31), 1),
    127: Trials(_reaches(-128, -127, -126, 127), 1),
}
