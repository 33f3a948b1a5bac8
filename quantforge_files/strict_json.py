"""JSON of others, read in bounded time and memory, and so that no two readers can understand it differently.

The standard parser keeps the last of two equal keys, turns ``1e400`` into infinity, accepts ``NaN``
and lone surrogates, and fails on deep nesting with a traceback. A file that relies on any of these
is refused. Python's objects take up to a hundred bytes for three of text, so a large document is looked
over first, as bytes: how deep it is, and of how many values. What exceeds its role is refused before
anything is built.
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

MAX_DEPTH = 64
# The only key of an object that stands for an infinite number, its word under it: so transformers 5 writes one. Older
# versions wrote the bare word, which configurations of hybrid models still hold (`time_step_limit`).
INFINITE = "__float__"
MAX_DIGITS = 64  # of a number where only its size is free: some write 10^30 for "no limit"
_SMALL = 1 << 20  # bytes that cannot take much memory, whatever they hold
_CHUNK = 1 << 20
_CONTAINERS = {dict, list}  # of which json makes no others
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Refuse = Callable[..., NoReturn]  # of what is wrong and, where there is more to say, a hint


def parse(
    data: bytes, values: int, refuse: Refuse, *, loose: bool = False, infinite: bool = False
) -> Any:
    """Parse one JSON document.

    Args:
        data: the whole of it.
        values: how many values, keys and containers it may have.
        refuse: raises; called with what is wrong.
        loose: as the standard parser reads it, but for numbers of more than `MAX_DIGITS` digits: for files that
            nothing but settings are taken from.
        infinite: read the words ``Infinity`` and ``-Infinity``, which Python writes, as `INFINITE` says.

    Calls ``refuse``: not UTF-8, a byte order mark, not JSON, a duplicate key at any level, a number
    that is not finite or not of 64 bits, a lone surrogate, nesting deeper than `MAX_DEPTH`, or more than ``values``.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        refuse("begins with a byte order mark", "save it as UTF-8 without BOM")
    check(data, values, refuse)
    hooks: dict[str, Any] = {"parse_int": _integers(refuse, loose=loose)}
    if not loose:
        hooks |= {
            "object_pairs_hook": lambda pairs: _object(pairs, refuse),
            "parse_constant": lambda word: _constant(word, refuse, infinite=infinite),
            "parse_float": lambda text: _float(text, refuse),
        }
    try:
        with uncollected():
            value = json.loads(data.decode("utf-8"), **hooks)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        refuse(f"nested deeper than {MAX_DEPTH} levels")
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 at byte {error.start}")
    except UnicodeEncodeError:
        refuse("a string holds half of a surrogate pair")
    except json.JSONDecodeError as error:
        refuse(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}")
    if len(data) <= _SMALL:
        _check_depth(value, refuse)
    return value


def check(data: bytes, values: int, refuse: Refuse) -> None:
    """Refuse a large document that is too deep or has too many values, without building any of it."""
    if len(data) <= _SMALL:
        return
    depth, count = measured(data)
    if depth > MAX_DEPTH:
        refuse(f"nested deeper than {MAX_DEPTH} levels")
    if count > values:
        refuse(f"{count} values, more than {values}")


def measured(data: bytes) -> tuple[int, int]:
    """Return how deep a document is nested and how many values, keys and containers it has.

    One pass over the bytes. Of a text that is not JSON both are what the part before the first mistake has, or more.
    """
    import numpy as np

    kinds = np.zeros(256, np.int8)  # 1 opens, -1 closes, 2 separates
    for characters, kind in ((b"[{", 1), (b"]}", -1), (b",:", 2)):
        kinds[list(characters)] = kind
    inside = escaping = False  # of a string; by an odd number of backslashes
    depth = deepest = 0
    count = 1
    view = memoryview(data)
    for start in range(0, len(data), _CHUNK):
        octets = np.frombuffer(view[start : start + _CHUNK], np.uint8)
        escaped, escaping = _escaped(octets, before=escaping)
        quotes = (octets == ord('"')) & ~escaped
        within = (np.cumsum(quotes, dtype=np.int32) & 1).astype(bool) ^ inside
        inside = bool(within[-1])
        found = kinds[octets[~within]]
        count += int(np.count_nonzero(found > 0))
        steps = np.cumsum(np.where(found == 2, 0, found), dtype=np.int32)
        if len(steps):
            deepest = max(deepest, depth + int(steps.max()))
            depth += int(steps[-1])
    return deepest, count


def _escaped(octets: Any, *, before: bool) -> tuple[Any, bool]:
    """Return which bytes follow an odd run of backslashes, and whether the next one does."""
    import numpy as np

    strokes = octets == ord("\\")
    escaped = np.zeros(len(octets), bool)
    escaped[0] = before
    if not strokes.any():
        return escaped, False
    places = np.arange(len(octets), dtype=np.int32)
    other = np.maximum.accumulate(np.where(strokes, -1, places))  # the last byte that is none
    run = places - other  # of backslashes that ends here
    run[other < 0] += int(before)
    odd = (run & 1).astype(bool)
    escaped[1:] = odd[:-1] & strokes[:-1]
    return escaped, bool(odd[-1] and strokes[-1])


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector while many objects are built."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _object(pairs: list[tuple[str, Any]], refuse: Refuse) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        refuse(f"the key {twice[:80]!r} occurs twice")
    return value


def _integers(refuse: Refuse, *, loose: bool) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if len(text) < 19 and text != "-0":
            return int(text)
        if loose and len(text) <= MAX_DIGITS:
            return int(text)
        if len(text) > 20 or text == "-0" or not -(2**63) <= (value := int(text)) < 2**64:
            refuse(f"the number {text[:40]} is not a 64-bit integer")
        return value

    return integer


def _constant(word: str, refuse: Refuse, *, infinite: bool) -> dict[str, str]:
    if not infinite or word == "NaN":
        refuse(f"{word} is not a JSON number")
    return {INFINITE: word}


def _float(text: str, refuse: Refuse) -> float:
    value = float(text)
    if not math.isfinite(value):
        refuse(f"the number {text[:40]} is too large")
    return value


def _check_depth(value: object, refuse: Refuse) -> None:
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for item in level
            for child in (item.values() if type(item) is dict else item)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return
    refuse(f"nested deeper than {MAX_DEPTH} levels")
