"""The lattice types of ggml, IQ1 to IQ3: a code picks the magnitudes of 4 or 8 weights at once.

A weight is ``step * v`` with ``step = d (2 scale + 1) step_factor``: ``d`` is the float16 unit of a block of 256,
``scale`` an integer of 3 or 4 bits for 16 or 32 columns (also called the level), and ``v`` a coordinate of the point
with its sign, which the code holds as well.

- *iq2_xxs*, *iq2_xs*, *iq2_s*: 256, 512 or 1024 points of 8 magnitudes 8, 25 or 43. The first two store 7 of 8 signs:
  an even number of them is negative.
- *iq3_xxs*, *iq3_s*: points of 4 out of eight magnitudes; two points of the first type share 7 signs.
- *iq1_s*, *iq1_m*: 2048 points of 8 numbers -1, 0 and 1, all raised or lowered by an eighth: a whole group, or a point.

A digit is the index of a magnitude (of a number, for IQ1) in `Lattice.magnitudes`, so that a point is a tuple of
digits. This module holds the table of types and imports no torch; `quantforge.packers.ggml.blocks` packs codes.

In this folder:

    magnitude_loops  ggml's search for IQ2 and IQ3, to the last bit, in loops compiled by numba
    nearest_loops    Find the nearest points of a lattice, and the scales that minimize the errors, compiled by numba
    packer           Fit, encode and decode the lattice types: the `VectorPacker` functions, and rows by `encode_rows`
    points           The points of each lattice, and tables in which nearest points are found
    ternary_loops    ggml's search for IQ1_S and IQ1_M, to the last bit, in loops compiled by numba
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lattice:
    """The points that the codes of a type can pick, and the layout of its codes.

    Attributes:
        num_points: number of points in the table.
        width: weights per point.
        magnitudes: magnitudes that a weight of a point can have, rising (for ternary types with their sign).
        step_factor: constant factor of the step of a group, ``d (2 scale + 1) step_factor``.
        signs: "even": 8 signs, an even number of them negative; "free": a sign for each weight; "": part of the points.
        shift_size: by how much the values of a group (or of a point, `shift_per_code`) are raised or lowered.
        points_per_code: points in a code, which share its signs.
        shift_per_code: whether a bit of each code, not a parameter of each group, selects raising or lowering.
        scale_stride: the search starts with one in this many of the scales that ggml tries.
        search_rounds: rounds of the search.
    """

    num_points: int
    width: int
    magnitudes: tuple[int, ...]
    step_factor: float
    signs: str = ""
    shift_size: float = 0.0
    points_per_code: int = 1
    shift_per_code: bool = False
    scale_stride: int = 3
    search_rounds: int = 2

    @property
    def index_bits(self) -> int:
        """Return the number of bits of a point's index in the table."""
        return (self.num_points - 1).bit_length()

    @property
    def sign_shift(self) -> int:
        """Return the lowest bit of a code that is a sign (or selects the shift)."""
        return self.index_bits * self.points_per_code

    @property
    def weights_per_code(self) -> int:
        """Return how many weights a code stands for."""
        return self.width * self.points_per_code


_TWO_BITS, _THREE_BITS = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
LATTICES: Mapping[str, Lattice] = {
    "iq1_s": Lattice(2048, 8, (-1, 0, 1), 1.0, shift_size=0.125),
    "iq1_m": Lattice(
        2048, 8, (-1, 0, 1), 1.0, shift_size=0.125, shift_per_code=True, search_rounds=1
    ),
    "iq2_xxs": Lattice(256, 8, _TWO_BITS, 0.125, "even"),
    "iq2_xs": Lattice(512, 8, _TWO_BITS, 0.125, "even"),
    "iq2_s": Lattice(1024, 8, _TWO_BITS, 0.125, "free", scale_stride=8),
    "iq3_xxs": Lattice(256, 4, _THREE_BITS, 0.25, "even", points_per_code=2, scale_stride=5),
    "iq3_s": Lattice(512, 4, (1, 3, 5, 7, 9, 11, 13, 15), 1.0, "free", scale_stride=8),
}
# llama-quantize refuses these types for a tensor of the blocks if there is no importance matrix.
NEED_IMPORTANCE = frozenset({"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs"})
