"""Layout of hidden states: which of their axes count rows and tokens, and what one token consists of.

Most models hand ``[rows, length, hidden]`` from block to block. Hyper-connections carry several streams of a token,
``[rows, length, streams, hidden]``, and some models put the streams first. Rows pass blocks one by one and wait in
between in a store, packed as ``[rows, length, width]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from quantforge.errors import RefusedError


class StateLayout(NamedTuple):
    """Axes of hidden states.

    Attributes:
        axis: which counts rows; the next one counts tokens.
        inner: sizes of the other axes, in their order.
    """

    axis: int
    inner: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], rows: int, length: int) -> StateLayout:
        """Find the axes of so many rows and tokens.

        Raises:
            RefusedError: there are none.
        """
        sizes = tuple(shape)
        for axis in range(len(sizes) - 2):
            if sizes[axis : axis + 2] == (rows, length):
                return cls(axis, sizes[:axis] + sizes[axis + 2 :])
        raise RefusedError(f"hidden states of shape {list(sizes)} reach its blocks", "--method rtn")

    @property
    def width(self) -> int:
        """Return how many numbers one token has."""
        return prod(self.inner)

    def packed(self, states: Tensor) -> Tensor:
        """Return states as ``[rows, length, width]``."""
        if self.axis == 0 and len(self.inner) == 1:
            return states
        return states.movedim((self.axis, self.axis + 1), (0, 1)).flatten(2)

    def unpacked(self, states: Tensor) -> Tensor:
        """Return packed states as the blocks know them."""
        if self.axis == 0 and len(self.inner) == 1:
            return states
        whole = states.reshape(*states.shape[:2], *self.inner)
        return whole.movedim((0, 1), (self.axis, self.axis + 1))
