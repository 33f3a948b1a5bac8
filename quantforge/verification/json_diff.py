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


def iterate_changes(value: Any, source_value: Any, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every place where two trees differ; a table or list that only one side has is one place.

    Values of different types differ. Real numbers are compared in single precision.
    """
    if isinstance(value, Mapping) and isinstance(source_value, Mapping):
        for key in {**source_value, **value}:
            yield from iterate_changes(
                value.get(key, ABSENT), source_value.get(key, ABSENT), (*path, str(key))
            )
    elif (
        isinstance(value, list)
        and isinstance(source_value, list)
        and len(value) == len(source_value)
    ):
        for index, (first, second) in enumerate(zip(value, source_value, strict=True)):
            yield from iterate_changes(first, second, (*path, str(index)))
    elif not _values_equal(value, source_value):
        yield Change(path, value, source_value)


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


def format_difference(value: Any, source_value: Any) -> str:
    """Format both values, shortened; for long texts, show the part that begins where they differ."""
    if (
        isinstance(value, str)
        and isinstance(source_value, str)
        and max(len(value), len(source_value)) > _MAX_SHOWN_CHARS
    ):
        equal = (a == b for a, b in zip(value, source_value, strict=False))
        start = next(
            (n for n, trees_equal in enumerate(equal) if not trees_equal),
            min(len(value), len(source_value)),
        )
        value, source_value = (
            value[start : start + _MAX_SHOWN_CHARS],
            source_value[start : start + _MAX_SHOWN_CHARS],
        )
    return f"{format_value(value)}, the source has {format_value(source_value)}"


def format_value(value: Any) -> str:
    """Format a value, shortened."""
    return shorten(repr(value))


def shorten(text: str) -> str:
    """Return a text, truncated with an ellipsis if it is long."""
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."
