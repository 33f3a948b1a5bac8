"""Regular expressions that users type and that files hold, for names of modules: none may run forever.

A repetition inside a repetition takes exponential time on the right name, and one of a great count takes memory when it
is compiled; both are refused as such. What is left can still take a power of the length of a name, so that every match
has a limit of time, which the library `regex` keeps; and so have all slow matches together, because files hold
thousands of patterns for thousands of names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from quantforge.errors import InputError

LONGEST = 1000  # characters
SECONDS = 0.2  # what is no attack takes microseconds
SLOW = 0.001  # seconds, from which on a match counts
TOGETHER = 2.0  # seconds that slow matches may take
REGAINED = 0.1  # of them for every second of the processor, so that nobody is refused for what was long ago
MOST = 1000  # times that something may be repeated by a count
_NESTED = re.compile(r"\([^()]*[+*{][^()]*\)[+*{]")
_COUNTS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


class _Patience:
    """Account of what slow matches have taken lately, in seconds of the processor."""

    def __init__(self) -> None:
        self._taken, self._at = 0.0, 0.0

    def last(self, seconds: float) -> bool:
        """Count a match; return whether slow ones have taken too long together."""
        if seconds < SLOW:
            return False
        now = time.process_time()
        self._taken = max(0.0, self._taken - REGAINED * (now - self._at)) + seconds
        self._at = now
        return self._taken > TOGETHER


_PATIENCE = _Patience()


@lru_cache(maxsize=1 << 12)
def _compiled(text: str) -> Any:
    import regex

    return regex.compile(text)


def matches(text: str, name: str, *, whole: bool) -> bool:
    """Return whether a regular expression matches a name: all of it, or else its start.

    Raises:
        InputError: it is no regular expression, too long, nests repetitions, or takes too long.
    """
    import regex

    shown = repr(text if len(text) <= 100 else f"{text[:100]}...")
    if len(text) > LONGEST:
        raise InputError(f"{shown}: {len(text)} characters", f"at most {LONGEST}")
    if _NESTED.search(text):
        raise InputError(f"{shown}: a repetition inside a repetition", "write it without nesting")
    if any(int(count or 0) > MOST for found in _COUNTS.findall(text) for count in found):
        raise InputError(f"{shown}: a repetition of a greater count", f"at most {MOST}, or * or +")
    try:
        expression = _compiled(text)
        start = time.thread_time()
        found = (expression.fullmatch if whole else expression.match)(name, timeout=SECONDS)
        late = _PATIENCE.last(time.thread_time() - start)
    except TimeoutError:
        found, late = None, True
    except (regex.error, OverflowError, RecursionError) as error:
        hint = "see Python's re; names of layers hold dots, which stand for any sign"
        raise InputError(f"{shown} is no regular expression: {error}", hint) from error
    if late:
        raise InputError(f"{shown}: takes too long for {name[:100]}", "use fewer repetitions")
    return found is not None


def matches_module(pattern: str, module: str) -> bool:
    """Return whether a regular expression of ``config.json`` matches the start of a module name."""
    try:
        return matches(pattern, module, whole=False)
    except InputError as error:
        raise InputError(f"config.json: {error.message}") from error


class ModulePatterns:
    """Names of modules, and patterns after ``re:``, as a configuration lists them."""

    def __init__(self, entries: Iterable[str]) -> None:
        entries = list(entries)
        self._patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
        self._names = frozenset(entries)

    def rank(self, module: str) -> int | None:
        """Return 0 for a module that is named, 1 for one that a pattern matches, None for any other."""
        if module in self._names:
            return 0
        return 1 if any(matches_module(pattern, module) for pattern in self._patterns) else None
