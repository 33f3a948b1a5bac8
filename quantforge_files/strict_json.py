"""Parse untrusted JSON in bounded time and memory, and reject documents that parsers could read differently.

The standard parser keeps the last of two equal keys, turns ``1e400`` into infinity, accepts ``NaN``
and lone surrogates, and fails on deep nesting with a traceback. A file that relies on any of these
is refused. Python's objects take up to a hundred bytes for three bytes of text, so a large document is first
scanned as bytes for its depth and its number of values. If these exceed its role, it is refused before
any object is built.
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
INFINITY_KEY = "__float__"
MAX_DIGITS = 64  # of a number where only its size is free: some write 10^30 for "no limit"
_SMALL_DOCUMENT = 1 << 20  # bytes that cannot take much memory, whatever they hold
_CHUNK = 1 << 20
_CONTAINERS = {dict, list}  # of which json makes no others
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Refuse = Callable[..., NoReturn]  # of what is wrong and, where there is more to say, a hint


def parse(
    data: bytes, values: int, refuse: Refuse, *, loose: bool = False, infinite: bool = False
) -> Any:
    """Parse one JSON document.

    Args:
        data: the whole document.
        values: how many values, keys and containers it may have.
        refuse: function that raises the error; called with a description of the problem.
        loose: parse as the standard parser does, except for numbers of more than `MAX_DIGITS` digits; for files from
            which only settings are read.
        infinite: accept the words ``Infinity`` and ``-Infinity``, which Python writes, as `INFINITY_KEY` says.

    Calls ``refuse``: not UTF-8, a byte order mark, not JSON, a duplicate key at any level, a number
    that is not finite or not of 64 bits, a lone surrogate, nesting deeper than `MAX_DEPTH`, or more than ``values``.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        refuse("begins with a byte order mark", "save it as UTF-8 without BOM")
    check(data, values, refuse)
    hooks: dict[str, Any] = {"parse_int": _integer_parser(refuse, loose=loose)}
    if not loose:
        hooks |= {
            "object_pairs_hook": lambda pairs: _build_object(pairs, refuse),
            "parse_constant": lambda constant: _parse_constant(constant, refuse, infinite=infinite),
            "parse_float": lambda text: _parse_float(text, refuse),
        }
    try:
        with gc_paused():
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
    if len(data) <= _SMALL_DOCUMENT:
        _check_depth(value, refuse)
    return value


def check(data: bytes, values: int, refuse: Refuse) -> None:
    """Refuse a large document that is nested too deep or has too many values, without building any object."""
    if len(data) <= _SMALL_DOCUMENT:
        return
    depth, count = measure(data)
    if depth > MAX_DEPTH:
        refuse(f"nested deeper than {MAX_DEPTH} levels")
    if count > values:
        refuse(f"{count} values, more than {values}")


def measure(data: bytes) -> tuple[int, int]:
    """Return the nesting depth of a document and its number of values, keys and containers.

    It takes one pass over the bytes. For a text that is not JSON both are at least those of the part before the first
    error.
    """
    import numpy as np

    byte_kinds = np.zeros(256, np.int8)  # 1 opens, -1 closes, 2 separates
    for characters, code in ((b"[{", 1), (b"]}", -1), (b",:", 2)):
        byte_kinds[list(characters)] = code
    in_string = escaping = False  # of a string; by an odd number of backslashes
    depth = max_depth = 0
    count = 1
    view = memoryview(data)
    for start in range(0, len(data), _CHUNK):
        chunk_bytes = np.frombuffer(view[start : start + _CHUNK], np.uint8)
        escaped, escaping = _find_escaped(chunk_bytes, first_is_escaped=escaping)
        quotes = (chunk_bytes == ord('"')) & ~escaped
        is_string = (np.cumsum(quotes, dtype=np.int32) & 1).astype(bool) ^ in_string
        in_string = bool(is_string[-1])
        structural = byte_kinds[chunk_bytes[~is_string]]
        count += int(np.count_nonzero(structural > 0))
        depth_changes = np.cumsum(np.where(structural == 2, 0, structural), dtype=np.int32)
        if len(depth_changes):
            max_depth = max(max_depth, depth + int(depth_changes.max()))
            depth += int(depth_changes[-1])
    return max_depth, count


def _find_escaped(chunk_bytes: Any, *, first_is_escaped: bool) -> tuple[Any, bool]:
    """Return which bytes follow an odd run of backslashes, and whether the next chunk's first byte does."""
    import numpy as np

    backslashes = chunk_bytes == ord("\\")
    escaped = np.zeros(len(chunk_bytes), bool)
    escaped[0] = first_is_escaped
    if not backslashes.any():
        return escaped, False
    positions = np.arange(len(chunk_bytes), dtype=np.int32)
    # The last byte that is none
    last_other = np.maximum.accumulate(np.where(backslashes, -1, positions))
    run_length = positions - last_other  # of backslashes that ends here
    run_length[last_other < 0] += int(first_is_escaped)
    is_odd = (run_length & 1).astype(bool)
    escaped[1:] = is_odd[:-1] & backslashes[:-1]
    return escaped, bool(is_odd[-1] and backslashes[-1])


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while many objects are built."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _build_object(pairs: list[tuple[str, Any]], refuse: Refuse) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen_keys: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen_keys or seen_keys.add(key))  # type: ignore[func-returns-value]
        refuse(f"the key {duplicate[:80]!r} occurs twice")
    return value


def _integer_parser(refuse: Refuse, *, loose: bool) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if len(text) < 19 and text != "-0":
            return int(text)
        if loose and len(text) <= MAX_DIGITS:
            return int(text)
        if len(text) > 20 or text == "-0" or not -(2**63) <= (value := int(text)) < 2**64:
            refuse(f"the number {text[:40]} is not a 64-bit integer")
        return value

    return integer


def _parse_constant(constant: str, refuse: Refuse, *, infinite: bool) -> dict[str, str]:
    if not infinite or constant == "NaN":
        refuse(f"{constant} is not a JSON number")
    return {INFINITY_KEY: constant}


def _parse_float(text: str, refuse: Refuse) -> float:
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
