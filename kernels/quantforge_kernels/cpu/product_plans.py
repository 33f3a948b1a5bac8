"""Plan of the products of one problem: sizes of its layout, its programs, and the words with which they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantforge_kernels.problem import Packed

if TYPE_CHECKING:
    from quantforge_kernels.cpu.compiler import Program

Addresses = tuple[int, int, int, int, int]  # of x, its codes, scales and sums, and of the result
STRIP = 32  # rows of which all tiles are computed at a time: rounded, they stay in the second-level cache
# In the order of the words from `integer_form.CODES` on.
_PLACES = ("codes0", "codes1", "codes2", "scales", "zeros", "mins", "d", "dmin")


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """Sizes of the layout and programs that all products of a problem have in common."""

    unit: int
    columns: int  # filled up to whole units
    lanes: int
    tiles: int
    groups: int
    blocks: int
    most: int  # rows that are multiplied from packed weights where torch may multiply as well
    input_bytes: int  # of a rounded activation
    multiply: Callable[[int], Program]  # by rows that are multiplied together
    decode: Callable[[], Program]
    grouped: Callable[[], Program]

    def words(
        self, packed: Packed, work: tuple[int, int], rows: int, addresses: Addresses, tiles: int
    ) -> list[int]:
        """Return the argument of a program, see `integer_form`; ``tiles`` are those of a row of the result."""
        counts = (self.columns, self.columns // self.unit, self.groups, tiles, STRIP)
        weights = [packed[name].data_ptr() if name in packed else 0 for name in _PLACES]
        return [*work, torch.get_num_threads(), rows, *addresses, *counts, *weights]
