"""Values that a key of a configuration may have: the rules that tables of known keys are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quantforge.verification.beside.conditions_model import FLOATS
from quantforge.verification.beside.trees import plain, same, shown

Allowed = Callable[[Any], bool]


def free(_: Any) -> bool:
    """Return True: the key is a note, or the reader of the format checks it."""
    return True


def one(*values: Any) -> Allowed:
    """Return the rule of a key that has one of these values."""
    return lambda found: any(same(found, value) for value in values)


def text(found: Any) -> bool:
    """Return whether a value is a text, or None."""
    return found is None or isinstance(found, str)


def dtype(found: Any) -> bool:
    """Return whether a value is the name of a float type, or None."""
    return found is None or str(found).removeprefix("torch.") in FLOATS


def wrong(
    found: Mapping[str, Any], known: Mapping[str, Allowed], place: str, *, unknown: bool = True
) -> Iterator[str]:
    """Yield a text for every key at a ``place`` that is not ``known``, or has another value than it may have."""
    for key, value in found.items():
        if key not in known:
            if unknown and value is not None:  # a newer library's key that states nothing
                yield f"{place}.{plain(key)} = {shown(value)}: no such key is known"
        elif not known[key](value):
            yield f"{place}.{plain(key)} = {shown(value)}: the stored weights are not made so"
