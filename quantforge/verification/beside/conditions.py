"""Conditions that a changed value has to meet, of use to every table of `reasons`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from quantforge.verification.beside.facts import Pair
from quantforge.verification.beside.trees import ABSENT, Change, same

Holds = Callable[[Change, Pair], bool]
_VERSION = re.compile(r"\d{1,4}(\.\d{1,5}){1,3}(\.?(dev|rc|a|b|post)\d*)?")


def one_of(*values: Any) -> Holds:
    """Return a condition: the new value is one of ``values``, and the source has none, or a null."""

    def holds(change: Change, _: Pair) -> bool:
        return change.other in (ABSENT, None) and any(same(change.own, value) for value in values)

    return holds


def a_text(change: Change, _: Pair) -> bool:
    """Return whether the new value is a text or absent."""
    return change.own is ABSENT or isinstance(change.own, str)


def a_flag(change: Change, _: Pair) -> bool:
    """Return whether the new value is true, false or absent."""
    return change.own is ABSENT or isinstance(change.own, bool)


def a_version(change: Change, _: Pair) -> bool:
    """Return whether the new value is the number of a version or absent."""
    return change.own is ABSENT or (
        isinstance(change.own, str) and bool(_VERSION.fullmatch(change.own))
    )


def idle(*values: Any) -> Holds:
    """Return a condition: one side alone states the value, and it does nothing in any engine."""

    def holds(change: Change, _: Pair) -> bool:
        pair = (change.own, change.other)
        stated = [value for value in pair if value is not ABSENT]
        return len(stated) == 1 and any(same(stated[0], value) for value in values)

    return holds


def among(*values: Any) -> Holds:
    """Return a condition: each side states one of ``values``, which all mean the same, or none."""

    def holds(change: Change, _: Pair) -> bool:
        sides = [side for side in (change.own, change.other) if side is not ABSENT]
        return all(any(same(side, value) for value in values) for side in sides)

    return holds


def left_out(change: Change, _: Pair) -> bool:
    """Return whether the key is absent in the artifact."""
    return change.own is ABSENT


def always(change: Change, pair: Pair) -> bool:
    """Return True: another check looks at the value."""
    del change, pair
    return True
