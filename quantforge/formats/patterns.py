"""Match regular expressions from users and configuration files against module names, with limits on time.

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

MAX_PATTERN_LENGTH = 1000  # characters
MATCH_TIMEOUT = 0.2  # what is no attack takes microseconds
SLOW_MATCH = 0.001  # seconds, from which on a match counts
SLOW_MATCH_BUDGET = 2.0  # seconds that slow matches may take
BUDGET_RECOVERY_RATE = 0.1  # of them for every second of the processor, so that nobody is refused for what was long ago
MAX_REPEAT_COUNT = 1000  # times that something may be repeated by a count
_NESTED_REPETITION = re.compile(r"\([^()]*[+*{][^()]*\)[+*{]")
_REPEAT_COUNTS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


class _SlowMatchBudget:
    """Budget of CPU seconds for slow matches, which refills over time."""

    def __init__(self) -> None:
        self._used, self._updated_at = 0.0, 0.0

    def is_exceeded_by(self, seconds: float) -> bool:
        """Subtract a match from the budget; return whether the budget is exceeded."""
        if seconds < SLOW_MATCH:
            return False
        now = time.process_time()
        self._used = (
            max(0.0, self._used - BUDGET_RECOVERY_RATE * (now - self._updated_at)) + seconds
        )
        self._updated_at = now
        return self._used > SLOW_MATCH_BUDGET


_BUDGET = _SlowMatchBudget()


@lru_cache(maxsize=1 << 12)
def _compile(pattern: str) -> Any:
    import regex

    return regex.compile(pattern)


def matches_pattern(pattern: str, name: str, *, full_match: bool) -> bool:
    """Return whether a regular expression matches a name: all of it (``full_match``), or its beginning.

    Raises:
        InputError: it is no regular expression, too long, nests repetitions, or takes too long.
    """
    import regex

    shown_pattern = repr(pattern if len(pattern) <= 100 else f"{pattern[:100]}...")
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise InputError(
            f"{shown_pattern}: {len(pattern)} characters", f"at most {MAX_PATTERN_LENGTH}"
        )
    if _NESTED_REPETITION.search(pattern):
        raise InputError(
            f"{shown_pattern}: a repetition inside a repetition", "write it without nesting"
        )
    if any(
        int(count or 0) > MAX_REPEAT_COUNT
        for match in _REPEAT_COUNTS.findall(pattern)
        for count in match
    ):
        raise InputError(
            f"{shown_pattern}: a repetition of a greater count",
            f"at most {MAX_REPEAT_COUNT}, or * or +",
        )
    try:
        expression = _compile(pattern)
        start = time.thread_time()
        match = (expression.fullmatch if full_match else expression.match)(
            name, timeout=MATCH_TIMEOUT
        )
        timed_out = _BUDGET.is_exceeded_by(time.thread_time() - start)
    except TimeoutError:
        match, timed_out = None, True
    except (regex.error, OverflowError, RecursionError) as error:
        hint = "see Python's re; names of layers hold dots, which stand for any sign"
        raise InputError(f"{shown_pattern} is no regular expression: {error}", hint) from error
    if timed_out:
        raise InputError(
            f"{shown_pattern}: takes too long for {name[:100]}", "use fewer repetitions"
        )
    return match is not None


def config_pattern_matches(pattern: str, module: str) -> bool:
    """Return whether a regular expression in ``config.json`` matches the beginning of a module name."""
    try:
        return matches_pattern(pattern, module, full_match=False)
    except InputError as error:
        raise InputError(f"{error.message}", subject="config.json") from error


class ModulePatterns:
    """Module names, and regular expressions after ``re:``, as a configuration lists them."""

    def __init__(self, entries: Iterable[str]) -> None:
        entries = list(entries)
        self._patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
        self._names = frozenset(entries)

    def match_rank(self, module: str) -> int | None:
        """Return 0 if a module is listed by name, 1 if a pattern matches it, else None."""
        if module in self._names:
            return 0
        return (
            1
            if any(config_pattern_matches(pattern, module) for pattern in self._patterns)
            else None
        )
