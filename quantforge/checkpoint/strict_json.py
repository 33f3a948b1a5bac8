"""JSON of a model, read so that no two readers can understand it differently.

The standard parser keeps the last of two equal keys, turns ``1e400`` into infinity, accepts ``NaN``
and lone surrogates, and fails on deep nesting with a traceback. A config or header that relies on
any of these is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError
from quantforge_files import Role

MAX_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """Parse one JSON object, the whole content of ``path``.

    Raises:
        InputError: not UTF-8, a byte order mark, not JSON or no object, a duplicate key at any
            level, a number that is not finite or not of 64 bits, a lone surrogate, or nesting
            deeper than `MAX_DEPTH`.
    """
    refuse = _refuse(path)
    if data.startswith(b"\xef\xbb\xbf"):
        refuse("begins with a byte order mark", "save it as UTF-8 without BOM")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=lambda pairs: _object(pairs, refuse),
            parse_constant=lambda word: refuse(f"{word} is not a JSON number"),
            parse_float=lambda text: _float(text, refuse),
            parse_int=lambda text: _int(text, refuse),
        )
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
    if not isinstance(value, dict):
        refuse("not a JSON object", "it has to begin with {")
    _check_depth(value, refuse)
    return value


def read_object(path: Path, role: Role, inside: Path | None) -> dict[str, Any]:
    """Read a JSON file whose top level is an object; errors as `Opener.read` and `parse_object`."""
    return parse_object(FILES.read(path, role, inside), path)


def _refuse(path: Path) -> Callable[..., NoReturn]:
    def refuse(what: str, hint: str = "the file is damaged: fetch or export it again") -> NoReturn:
        raise InputError(f"{path}: {what}", hint, file=str(path))

    return refuse


def _object(pairs: list[tuple[str, Any]], refuse: Callable[..., NoReturn]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        refuse(f"the key {twice[:80]!r} occurs twice")
    return value


def _int(text: str, refuse: Callable[..., NoReturn]) -> int:
    if len(text) > 20 or text == "-0" or not -(2**63) <= (value := int(text)) < 2**64:
        refuse(f"the number {text[:40]} is not a 64-bit integer")
    return value


def _float(text: str, refuse: Callable[..., NoReturn]) -> float:
    value = float(text)
    if not math.isfinite(value):
        refuse(f"the number {text[:40]} is too large")
    return value


def _check_depth(value: object, refuse: Callable[..., NoReturn]) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    refuse(f"nested deeper than {MAX_DEPTH} levels")


def _children(value: object) -> list[object]:
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return [child for child in children if isinstance(child, dict | list)]
