"""Types of the arguments that a program hands over, held against the annotations of a verb.

Annotations are read as text: some name classes that are imported for a type checker alone, because their modules import
torch. Such a class is known by its name.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, is_typeddict

from quantforge.errors import UsageError
from quantforge.settings import Settings

_WORDS: Mapping[object, str] = {
    str: "a text", bytes: "bytes", bool: "True or False", int: "a whole number", float: "a number", NoneType: "None",
    Path: "a path", Mapping: "a mapping", Sequence: "a list", Callable: "a function", "dtype": "a type of torch",
}  # fmt: skip
_EXAMPLES = {
    "target": ', e.g. "4.5bpw"', "rules": ', e.g. ["down_proj=int8:g128:sym"]', "ignore": ', e.g. ["lm_head"]',
}  # fmt: skip


def check_arguments(verb: Callable[..., object], given: Mapping[str, object]) -> None:
    """Refuse arguments of other types than a verb's own parameters state, and such fields of its settings.

    Raises:
        UsageError: naming the first one, its value and what is expected.
    """
    expected = _parameters(verb)
    for name, value in given.items():
        if name in expected:
            _check(name, value, expected[name])
        if isinstance(value, Settings):
            _check_fields(name, value)


def _check_fields(name: str, value: Any) -> None:
    """Refuse a dataclass of settings, and those that it holds, as `check_arguments`."""
    for field, types in _fields(value.__class__).items():
        held = getattr(value, field)
        _check(f"{name}.{field}", held, types)
        if is_dataclass(held):
            _check_fields(f"{name}.{field}", held)


def check_choices(kind: type, given: Mapping[str, object]) -> None:
    """Refuse values of other types than a typed dictionary states; names that it has not are passed over.

    Raises:
        UsageError: as `check_arguments`.
    """
    for name, types in _fields(kind).items():
        if name in given:
            _check(name, given[name], types)


def _check(name: str, value: object, expected: Sequence[object]) -> None:
    if any(_fits(value, one) for one in expected):
        return
    words = dict.fromkeys(_WORDS.get(one, getattr(one, "__name__", str(one))) for one in expected)
    raise UsageError(
        f"{name} = {value!a:.60}: {type(value).__name__} is no type for it",
        f"give {' or '.join(words)}{_EXAMPLES.get(name, '')}",
    )  # fmt: skip


def _fits(value: object, expected: Any) -> bool:
    """Return whether a value is of a type; numbers are as they were written, a path is whatever stands for one."""
    if isinstance(expected, str):
        return expected in {one.__name__ for one in type(value).__mro__}
    if isinstance(value, bool):
        return expected in {bool, object}
    if expected is float:
        return isinstance(value, int | float)
    if expected is Path:
        return isinstance(value, os.PathLike)
    if expected is Sequence:
        return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return isinstance(value, expected)


@cache
def _parameters(verb: Callable[..., object]) -> Mapping[str, Sequence[object]]:
    found = inspect.signature(verb).parameters.values()
    scope = sys.modules[verb.__module__].__dict__
    return {
        one.name: _types(str(one.annotation), scope)
        for one in found
        if one.kind is not one.VAR_KEYWORD
    }


@cache
def _fields(kind: Any) -> Mapping[str, Sequence[object]]:
    """Return the types of the fields of a dataclass or a typed dictionary."""
    scope = sys.modules[kind.__module__].__dict__
    if not is_typeddict(kind):
        return {one.name: _types(str(one.type), scope) for one in fields(kind)}
    stated = kind.__annotations__.items()
    return {name: _types(one.__forward_arg__, scope) for name, one in stated}


def _types(annotation: str, scope: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(_alternatives(ast.parse(annotation, mode="eval").body, scope))


def _alternatives(node: ast.expr, scope: Mapping[str, Any]) -> Iterator[object]:
    """Yield the types that an annotation allows, without those of what they hold; a name where it is not imported."""
    match node:
        case ast.BinOp(left=left, right=right):
            yield from _alternatives(left, scope)
            yield from _alternatives(right, scope)
        case ast.Subscript(value=value):
            yield from _alternatives(value, scope)
        case ast.Name(id=name):
            yield from _expanded(scope.get(name, getattr(builtins, name, name)))
        case ast.Attribute(attr=name):
            yield name
        case _:
            yield NoneType


def _expanded(found: Any) -> Iterator[object]:
    """Yield the types behind an alias."""
    if isinstance(found, UnionType):
        for one in get_args(found):
            yield from _expanded(one)
    elif found is Any or found is Literal:  # its values are checked where they are used
        yield object
    elif is_typeddict(found):
        yield Mapping
    else:
        yield get_origin(found) or found
