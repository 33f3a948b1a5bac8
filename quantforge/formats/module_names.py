"""Names of modules as a configuration lists them: plain, or as patterns."""

from __future__ import annotations

from collections.abc import Iterable

from quantforge.errors import InputError
from quantforge.formats import patterns


def matches(pattern: str, module: str) -> bool:
    """Return whether a regular expression of ``config.json`` matches the start of a module name."""
    try:
        return patterns.matches(pattern, module, whole=False)
    except InputError as error:
        raise InputError(f"config.json: {error.message}") from error


class Names:
    """Names of modules, and patterns after ``re:``, as a configuration lists them."""

    def __init__(self, entries: Iterable[str]) -> None:
        entries = list(entries)
        self._patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
        self._names = frozenset(entries)

    def rank(self, module: str) -> int | None:
        """Return 0 for a module that is named, 1 for one that a pattern matches, None for any other."""
        if module in self._names:
            return 0
        return 1 if any(matches(pattern, module) for pattern in self._patterns) else None
