"""Two JSON trees, compared place by place: what differs, and how it is shown to people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

_SHOWN = 60  # characters of a value


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()


class Change(NamedTuple):
    """A place where the artifact's tree is not the source's.

    Attributes:
        path: the file, then the keys to the place.
        own: the artifact's value, `ABSENT` if it has nothing there.
        other: the source's value, likewise.
    """

    path: tuple[str, ...]
    own: Any
    other: Any

    @property
    def key(self) -> str:
        """Return the place as text: ``text_config.rope_parameters.factor``."""
        return ".".join(self.path[1:])

    @property
    def added(self) -> bool:
        """Return whether the source has nothing, or a null."""
        return self.other is ABSENT or self.other is None

    def __str__(self) -> str:
        return f"{shorten(self.key)} = {difference(self.own, self.other)}"


def changes(own: Any, other: Any, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every place that differs; a table or list that only one side has is one place.

    Values differ if their kinds do. Real numbers are compared in single precision.
    """
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for key in {**other, **own}:
            yield from changes(own.get(key, ABSENT), other.get(key, ABSENT), (*path, str(key)))
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        for number, (first, second) in enumerate(zip(own, other, strict=True)):
            yield from changes(first, second, (*path, str(number)))
    elif not _equal(own, other):
        yield Change(path, own, other)


def _equal(first: Any, second: Any) -> bool:
    kinds = {type(first), type(second)}
    if float in kinds and kinds <= {int, float}:
        try:
            return math.isclose(first, second, rel_tol=1.2e-7)
        except OverflowError:
            return False
    return len(kinds) == 1 and bool(first == second)


def same(first: Any, second: Any) -> bool:
    """Return whether two trees have no `changes`."""
    return next(changes(first, second), None) is None


def difference(own: Any, other: Any) -> str:
    """Return both values for people, shortened; of long texts the part that begins where they differ."""
    if isinstance(own, str) and isinstance(other, str) and max(len(own), len(other)) > _SHOWN:
        equal = (a == b for a, b in zip(own, other, strict=False))
        at = next((n for n, same in enumerate(equal) if not same), min(len(own), len(other)))
        own, other = own[at : at + _SHOWN], other[at : at + _SHOWN]
    return f"{shown(own)}, the source has {shown(other)}"


def shown(value: Any) -> str:
    """Return a value for people, shortened."""
    return shorten(repr(value))


def shorten(text: str) -> str:
    """Return the beginning of a text."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
