"""Types of lattices: what their codes stand for, one record for each; their blocks are in `quantforge.grids`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALWAYS, OFF_GRID, ALL_IF_ANY = range(3)  # which points are chosen once more with the scale found


@dataclass(frozen=True, slots=True)
class Lattice:
    """The points that codes of a type pick, and what goes with them.

    Attributes:
        points: in its table.
        width: weights of a point.
        values: which magnitudes a weight of a point can have, rising (of the ternary ones with their sign).
        unit: what the step of a group is multiplied with: it is ``d (2 scale + 1) unit``.
        signs: "even": 8 signs of which an even number is negative; "free": a sign for each weight; "" in the points.
        shift: what all values of a group (or of a point, `shifts_codes`) are raised or lowered by.
        vectors: points that share a code, because they share their signs.
        shifts_codes: whether a bit of each code chooses between the shifts, rather than a parameter of each group.
        every: of the scales that ggml tries for a group, one of so many is tried where a search begins.
        rounds: of that search.
    """

    points: int
    width: int
    values: tuple[int, ...]
    unit: float
    signs: str = ""
    shift: float = 0.0
    vectors: int = 1
    shifts_codes: bool = False
    every: int = 3
    rounds: int = 2

    @property
    def index_bits(self) -> int:
        """Return the bits of the place of a point in the table."""
        return (self.points - 1).bit_length()

    @property
    def sign_place(self) -> int:
        """Return the lowest bit of a code that is a sign (or chooses the shift)."""
        return self.index_bits * self.vectors

    @property
    def columns(self) -> int:
        """Return how many weights a code stands for."""
        return self.width * self.vectors


_TWO_BITS, _THREE_BITS = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
LATTICES: Mapping[str, Lattice] = {
    "iq1_s": Lattice(2048, 8, (-1, 0, 1), 1.0, shift=0.125),
    "iq1_m": Lattice(2048, 8, (-1, 0, 1), 1.0, shift=0.125, shifts_codes=True, rounds=1),
    "iq2_xxs": Lattice(256, 8, _TWO_BITS, 0.125, "even"),
    "iq2_xs": Lattice(512, 8, _TWO_BITS, 0.125, "even"),
    "iq2_s": Lattice(1024, 8, _TWO_BITS, 0.125, "free", every=8),
    "iq3_xxs": Lattice(256, 4, _THREE_BITS, 0.25, "even", vectors=2, every=5),
    "iq3_s": Lattice(512, 4, (1, 3, 5, 7, 9, 11, 13, 15), 1.0, "free", every=8),
}
