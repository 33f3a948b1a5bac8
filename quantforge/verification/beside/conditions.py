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
    """The new value is one of a few, and the source has none, or a null."""

    def holds(change: Change, _: Pair) -> bool:
        return change.other in (ABSENT, None) and any(same(change.own, value) for value in values)

    return holds


def a_text(change: Change, _: Pair) -> bool:
    """Any text, or none."""
    return change.own is ABSENT or isinstance(change.own, str)


def a_flag(change: Change, _: Pair) -> bool:
    """True, false, or nothing."""
    return change.own is ABSENT or isinstance(change.own, bool)


def a_version(change: Change, _: Pair) -> bool:
    """The number of a version, or nothing."""
    return change.own is ABSENT or (
        isinstance(change.own, str) and bool(_VERSION.fullmatch(change.own))
    )


def idle(*values: Any) -> Holds:
    """The value does nothing in any engine, and the other side states none."""

    def holds(change: Change, _: Pair) -> bool:
        pair = (change.own, change.other)
        stated = [value for value in pair if value is not ABSENT]
        return len(stated) == 1 and any(same(stated[0], value) for value in values)

    return holds


def among(*values: Any) -> Holds:
    """Each side states one of a few values that mean the same, or none."""

    def holds(change: Change, _: Pair) -> bool:
        sides = [side for side in (change.own, change.other) if side is not ABSENT]
        return all(any(same(side, value) for value in values) for side in sides)

    return holds


def left_out(change: Change, _: Pair) -> bool:
    """The key is gone."""
    return change.own is ABSENT


def always(change: Change, pair: Pair) -> bool:
    """Whatever it is: another check looks at it."""
    del change, pair
    return True
