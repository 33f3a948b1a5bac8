"""Differences of two JSON documents, leaf by leaf and both ways, and how a value is shown to people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SHOWN = 60
_FLOAT32 = 1.2e-7  # relative distance of neighbours in single precision


class _Absent:
    """Mark of a place where a document has nothing."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A place where the artifact's document (``own``) is not the source's (``other``); `ABSENT`: it has nothing."""

    path: Path
    own: Any
    other: Any

    @property
    def key(self) -> str:
        """Return the place as text: ``text_config.rope_parameters.factor``."""
        return ".".join(self.path)

    def __str__(self) -> str:
        return f"{plain(self.key)} = {shown(self.own)}, the source has {shown(self.other)}"


def changes(own: Any, other: Any, path: Path = ()) -> Iterator[Change]:
    """Yield every place that differs; a table or list that only one side has is one place."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*other, *own)):
            yield from changes(own.get(key, ABSENT), other.get(key, ABSENT), (*path, key))
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        for number, (first, second) in enumerate(zip(own, other, strict=True)):
            yield from changes(first, second, (*path, str(number)))
    elif not same(own, other):
        yield Change(path, own, other)


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal in kind and value; real numbers are compared in single precision."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    if isinstance(first, int | float) and isinstance(second, int | float):
        try:
            return math.isclose(first, second, rel_tol=_FLOAT32)
        except OverflowError:
            return False
    return type(first) is type(second) and bool(first == second)


def at(document: Any, path: Sequence[str]) -> Any:
    """Return the value at a place, `ABSENT` where there is none."""
    for key in path:
        if isinstance(document, Mapping):
            document = document.get(key, ABSENT)
        elif isinstance(document, list) and key.isdecimal() and int(key) < len(document):
            document = document[int(key)]
        else:
            return ABSENT
    return document


def shown(value: Any) -> str:
    """Return a value for people: short, and without a character that a terminal obeys."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[: 4 * SHOWN]
    if isinstance(value, Mapping | list) and len(value) > SHOWN:
        return f"{len(value)} entries"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def plain(text: str) -> str:
    """Return a name from a foreign file, shortened, with whatever is not printable escaped."""
    text = text if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN - 3]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
