"""Compare two JSON trees value by value, and format the differences for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

_MAX_SHOWN_CHARS = 60  # characters of a value


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()


class Change(NamedTuple):
    """A place where the artifact's JSON tree differs from the source's.

    Attributes:
        path: the file name, then the keys to the place.
        value: the artifact's value, `ABSENT` if it has none.
        source_value: the source's value, `ABSENT` if it has none.
    """

    path: tuple[str, ...]
    value: Any
    source_value: Any

    @property
    def key(self) -> str:
        """Return the path without the file name: ``text_config.rope_parameters.factor``."""
        return ".".join(self.path[1:])

    @property
    def added(self) -> bool:
        """Return whether the source has no value, or null."""
        return self.source_value is ABSENT or self.source_value is None

    def __str__(self) -> str:
        return f"{shorten(self.key)} = {format_difference(self.value, self.source_value)}"


def iterate_changes(own: Any, other: Any, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every place where two trees differ; a table or list that only one side has is one place.

    Values of different types differ. Real numbers are compared in single precision.
    """
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for key in {**other, **own}:
            yield from iterate_changes(
                own.get(key, ABSENT), other.get(key, ABSENT), (*path, str(key))
            )
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        for number, (first, second) in enumerate(zip(own, other, strict=True)):
            yield from iterate_changes(first, second, (*path, str(number)))
    elif not _values_equal(own, other):
        yield Change(path, own, other)


def _values_equal(first: Any, second: Any) -> bool:
    kinds = {type(first), type(second)}
    if float in kinds and kinds <= {int, float}:
        try:
            return math.isclose(first, second, rel_tol=1.2e-7)
        except OverflowError:
            return False
    return len(kinds) == 1 and bool(first == second)


def trees_equal(first: Any, second: Any) -> bool:
    """Return whether two trees have no differences, see `iterate_changes`."""
    return next(iterate_changes(first, second), None) is None


def format_difference(own: Any, other: Any) -> str:
    """Format both values, shortened; for long texts, show the part that begins where they differ."""
    if (
        isinstance(own, str)
        and isinstance(other, str)
        and max(len(own), len(other)) > _MAX_SHOWN_CHARS
    ):
        equal = (a == b for a, b in zip(own, other, strict=False))
        at = next(
            (n for n, trees_equal in enumerate(equal) if not trees_equal), min(len(own), len(other))
        )
        own, other = own[at : at + _MAX_SHOWN_CHARS], other[at : at + _MAX_SHOWN_CHARS]
    return f"{format_value(own)}, the source has {format_value(other)}"


def format_value(value: Any) -> str:
    """Format a value, shortened."""
    return shorten(repr(value))


def shorten(text: str) -> str:
    """Return a text, truncated with an ellipsis if it is long."""
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."
