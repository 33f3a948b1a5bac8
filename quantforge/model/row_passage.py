"""Interface of how rows reach a block, and the passage for which nothing but their shape counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quantforge.model.standins import Call
from quantforge.model.state_layout import StateLayout


class Reached(NamedTuple):
    """Arguments of a block for the rows from ``start`` on.

    ``before``: the content of mappings among them, by argument.
    """

    start: int
    rows: int
    states: Tensor
    call: Call
    before: Mapping[str, Mapping[Any, Any]] = {}  # of a named tuple, and never written to


class Passage(Protocol):
    """Interface of how rows reach a block."""

    @property
    def layout(self) -> StateLayout:
        """Return the layout of the hidden states."""

    @property
    def alone(self) -> bool:
        """Return whether each row has to be reached by itself."""

    def reach(self, start: int, states: Tensor) -> Reached:
        """Return what reaches the block, given packed states of the rows from ``start`` on; safe on several threads."""

    def left(self, reached: Reached, returned: Any) -> None:
        """Note what the block returned; what it returned last counts."""


class ShapeCalls(NamedTuple):
    """Passage that depends on nothing but the number of rows."""

    layout: StateLayout
    calls: Mapping[int, Call]
    alone: bool = False

    def reach(self, start: int, states: Tensor) -> Reached:
        """Return the states, and what was recorded for as many rows."""
        rows = len(states)
        return Reached(start, rows, self.layout.unpacked(states), self.calls[rows])

    def left(self, reached: Reached, returned: Any) -> None:
        """Note nothing."""
