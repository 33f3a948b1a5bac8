"""Fields of recipes: TOML read within limits into dataclasses that know every key, their values and ranges, and back.

An unknown key is an error that names the nearest one; so is a value of another type than its field has. Every table of
a recipe is checked when it is made, whether a file or a program says it (`check_fields`).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from quantforge.errors import InputError, nearest
from quantforge.grids import INTEGER_BITS
from quantforge_files.roles import RECIPE

# Reading a key takes the square of its parts; a line is what no string of it counts for.
MAX_PARTS, MAX_LINE = 32, 20_000
_SHOWN = 60  # characters of a value in a message
# Strings and comments of TOML. No alternative ever fails once it has begun, so that one pass is enough.
_STRING = re.compile(
    r'''"""(?:[^"\\]+|\\[\s\S]|"(?!""))*(?:"""|\Z|\\)'''
    r"""|'''(?:[^']+|'(?!''))*(?:'''|\Z)"""
    r"""|"(?:[^"\\\n]+|\\[^\n])*(?:"|\n|\Z|\\)"""
    r"""|'[^'\n]*(?:'|\n|\Z)|\#[^\n]*"""
)


def _bare(text: str) -> str:
    """Remove strings and comments from TOML; of a recipe, few dots and a few hundred characters in a line are left."""
    return _STRING.sub("", text)


_OF_PYTHON = re.compile(r"=\s*(True|False)\b")
_EXAMPLE_OF = {str: '"text"', int: "4", float: "0.5", bool: "true"}


def read_toml(
    text: str, origin: str, example: str = "see `quantforge recipes` for examples"
) -> dict[str, Any]:
    """Return the content of a recipe, unchecked.

    Raises:
        InputError: it is not TOML, which ``example`` helps with, or larger or deeper than any recipe.
    """
    if len(text) > RECIPE.limit or any(
        line.count(".") > MAX_PARTS or len(line) > MAX_LINE for line in _bare(text).splitlines()
    ):
        raise InputError(f"{origin}: no recipe is that large", example)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        if found := _OF_PYTHON.search(_bare(text)):
            example = f"TOML writes {found[1].lower()}, not {found[1]}"
        raise InputError(f"{origin}: not TOML: {error}", example) from error


def built(kind: type[Any], data: Mapping[str, Any], origin: str) -> Any:
    """Return an instance of a dataclass with the values of a table.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that is missing; ``origin`` says where.
    """
    hints = get_type_hints(kind)
    known = {item.name for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            names = {"rule" if name == "rules" else name for name in known}
            raise InputError(f"{origin}: unknown key '{key}'", nearest(key, names))
        values[key] = convert(hints[key], value, f"{origin}: {key}")
    for item in fields(kind):
        needed = item.default is MISSING and item.default_factory is MISSING
        if needed and item.name not in values:
            raise InputError(
                f"{origin}: '{item.name}' is missing", "a rule has `match` and `scheme`"
            )
    return kind(**values)


def convert(hint: Any, value: Any, origin: str) -> Any:
    """Return a value of a table as a field of that type holds it; errors as `built`."""
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InputError(f"{origin}: a table is expected", f"[{origin.rsplit(' ', 1)[-1]}]")
        return built(hint, value, origin)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise InputError(f"{origin}: a list is expected", 'e.g. ["lm_head"]')
        return tuple(convert(get_args(hint)[0], item, origin) for item in value)
    allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) not in allowed:
        names = " or ".join(item.__name__ for item in allowed if item is not type(None))
        example = next((text for kind, text in _EXAMPLE_OF.items() if kind in allowed), "")
        typed = f"e.g. {origin.rsplit(' ', 1)[-1]} = {example}"
        raise InputError(f"{origin} = {value!r}: {names} is expected", typed)
    return value


def differences(there: str, here: str) -> list[str]:
    """Return the keys in which two recipes differ, each with both values; ``recipe`` where one cannot be read."""
    try:
        found = [_flat(read_toml(text, "recipe"), "") for text in (there, here)]
    except InputError:
        return ["recipe"]
    told = []
    for key in dict.fromkeys(key for values in found for key in values):
        values = [values.get(key, "unset") for values in found]
        if values[0] != values[1]:
            told.append(key if key.endswith("sha256") else both(key, *values))
    return told


def both(key: str, there: str, here: str) -> str:
    """Return a line about a value that differs between what is there and what is asked for."""
    return f"{key}: {_short(there)} there, {_short(here)} here"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return the values of a table and its tables as they are read by people, by dotted keys."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = (value or '""') if isinstance(value, str) else json.dumps(value)
    return flat


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table; a key whose value is None is left out."""
    return [f"{key} = {_value(value)}" for key, value in data.items() if value is not None]


def _value(value: Any) -> str:
    """Write a value in TOML: a basic string is a JSON string, but for DEL, which JSON does not escape."""
    shown = list(value) if isinstance(value, tuple) else value
    return json.dumps(shown, ensure_ascii=False).replace("\x7f", "\\u007f")


# Least and most of numbers; more sweeps would only keep a machine busy.
LIMITS = {
    "bits": (min(INTEGER_BITS), max(INTEGER_BITS)),
    "guide": (0, 1024),
    "tune": (0, 1000),
    "gptq.shrinkage": (0, 1),
    "gptq.refine": (0, 1000),
    "gptq.runs": (0, 1000),
    "tensor_parallel": (1, 2**20),
    "awq.rows": (1, 2**40),
    "calibration.samples": (1, 2**32),
    "calibration.length": (2, 2**32),
    "calibration.random": (0, 1),
    "calibration.seed": (-(2**63), 2**63 - 1),
    "calibration.micro_batch": (1, 2**32),
    "calibration.min_expert_tokens": (0, 2**32),
    "max_shard_bytes": (1, 2**60),
}
# All values of what takes few; the first is not always the default.
VALUES = {
    "effort": ("low", "medium", "high"),
    "scales": ("absmax", "search", "reference"),
    "inputs": ("absmax", "percentile", "mse"),
    "kv_cache": ("none", "fp8", "fp8_head"),
    "mtp": ("keep", "quantize", "drop"),
    "calibration.precision": ("float32", "bfloat16"),
    "calibration.experts": ("routed", "all"),
}
# Words that mean something elsewhere, as `nearest` takes them: of a cache that a result is run with.
ELSEWHERE = {
    "kv_cache": {
        "int8 int4 16bit": "files hold scales of fp8 alone; --cache of generate, serve and eval takes other kinds",
    }
}


def hint_of(name: str, value: object) -> str:
    """Return what to type in place of a value that a field does not take."""
    known, elsewhere = VALUES[name], ELSEWHERE.get(name, {})
    text = str(value).lower()
    if elsewhere and "," in text:  # of keys, and of values
        return next(iter(elsewhere.values()))
    return nearest(text, known, elsewhere)


def check_fields(options: Any) -> None:
    """Refuse a table of a recipe that is being made with a value of another type, word or range.

    Args:
        options: the dataclass, called after its table: ``CalibrationOptions``; the recipe itself ``Recipe``.

    Raises:
        InputError: naming the field, and what it takes.
    """
    table = type(options).__name__.removesuffix("Options").lower()
    table, origin = ("", "recipe") if table == "recipe" else (table, f"recipe: {table}")
    _check_types(options, origin)
    for name, known in VALUES.items():
        inside, _, field = name.rpartition(".")
        if inside == table and (value := getattr(options, field)) not in known:
            raise InputError(f"recipe: {name} = {value!r}", hint_of(name, value))
    for name, (least, most) in LIMITS.items():
        inside, _, field = name.rpartition(".")
        value = getattr(options, field) if inside == table else None
        if value is not None and not least <= value <= most:
            said = f"recipe: {name} = {value} is too {'small' if value < least else 'large'}"
            raise InputError(said, f"from {least} to {most}")


@contextmanager
def named_after(origin: str) -> Iterator[None]:
    """Let what `check_fields` refuses name the file that says it, inside a ``with`` block."""
    try:
        yield
    except InputError as error:
        if not error.message.startswith("recipe: "):
            raise
        raise InputError(
            f"{origin}: {error.message.removeprefix('recipe: ')}", error.hint
        ) from None


def _check_types(value: Any, origin: str) -> None:
    """Refuse a dataclass of which a field holds something else than it is declared to.

    Raises:
        InputError: naming the field, as in TOML.
    """
    kind: Any = type(value)
    hints = _hints(kind)
    for item in fields(value):
        _check_type(hints[item.name], getattr(value, item.name), f"{origin}: {item.name}")


def write_small(value: Any, names: Iterable[str]) -> None:
    """Write some texts of a frozen dataclass that is being made in small letters, their one spelling."""
    for name in names:
        if isinstance(text := getattr(value, name), str):
            object.__setattr__(value, name, text.lower())


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _check_type(hint: Any, value: Any, origin: str) -> None:
    if is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]
            raise InputError(f"{origin} = {value!r}: {hint.__name__} is expected")  # type: ignore[union-attr]
    elif get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise InputError(f"{origin} = {value!r}: a tuple is expected")
        for item in value:
            _check_type(get_args(hint)[0], item, origin)
    else:
        convert(hint, value, origin)
