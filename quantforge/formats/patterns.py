"""Regular expressions that users type and that files hold: none may take for ever.

A repetition inside a repetition takes exponential time on the right name, and one of a great count takes memory when it
is compiled; both are refused as such. What is left can still take a power of the length of a name, so that every match
has a limit of time, which the library `regex` keeps.
"""

from __future__ import annotations

import re

from quantforge.errors import InputError

LONGEST = 1000  # characters
SECONDS = 0.2  # what is no attack takes microseconds
MOST = 1000  # times that something may be repeated by a count
_NESTED = re.compile(r"\([^()]*[+*{][^()]*\)[+*{]")
_COUNTS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


def matches(text: str, name: str, *, whole: bool) -> bool:
    """Return whether a regular expression matches a name: all of it, or else its start.

    Raises:
        InputError: it is none, too long, or takes too long.
    """
    import regex

    shown = repr(text if len(text) < 100 else f"{text[:100]}...")
    if len(text) > LONGEST:
        raise InputError(f"{shown}: {len(text)} characters", f"at most {LONGEST}")
    if _NESTED.search(text):
        raise InputError(f"{shown}: a repetition inside a repetition", "write it without nesting")
    if any(int(count or 0) > MOST for found in _COUNTS.findall(text) for count in found):
        raise InputError(f"{shown}: a repetition of a greater count", f"at most {MOST}, or * or +")
    try:
        expression = regex.compile(text)
        found = (expression.fullmatch if whole else expression.match)(name, timeout=SECONDS)
    except TimeoutError as error:
        raise InputError(
            f"{shown}: more than {SECONDS} s for {name}", "use fewer repetitions"
        ) from error
    except (regex.error, OverflowError, RecursionError) as error:
        hint = "see Python's re; names of layers hold dots, which stand for any sign"
        raise InputError(f"{shown} is no regular expression: {error}", hint) from error
    return found is not None
