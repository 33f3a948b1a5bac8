"""Fields of recipes: the values and ranges that they take, and a check of dataclasses that hold them.

Every table of a recipe is checked when it is made, whether a file or a program says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from quantforge.checkpoint.recipe_toml import convert
from quantforge.errors import InputError, nearest
from quantforge.grids import INTEGER_BITS

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
