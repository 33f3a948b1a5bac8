"""Arguments of verbs and fields of options: unknown names and values of other types are refused before any work.

Annotations are read as text: some name classes that are imported for a type checker alone, because their modules import
torch; such a class is known by its name. What a container holds is checked where it is used.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, is_typeddict

from quantforge.errors import UsageError, nearest

P = ParamSpec("P")
R = TypeVar("R")
_WORDS: Mapping[object, str] = {
    str: "a text", bool: "True or False", int: "a whole number", float: "a number", NoneType: "None",
    Path: "a path", Mapping: "a mapping", Sequence: "a list", Callable: "a function", "dtype": "a type of torch",
}  # fmt: skip
_EXAMPLES = {
    "target": ', e.g. "4.5bpw"',
    "rules": ', e.g. ["down_proj=int8:g128:sym"]',
    "ignore": ', e.g. ["lm_head"]',
}


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown names of options.

    Raises:
        UsageError: naming the first one, and the nearest known one.
    """
    names = {*known}
    for name in given:
        if name not in names:
            raise UsageError(f"no option '{name}'", nearest(name, names))


def check_types(kind: Any, given: Mapping[str, Any], where: str = "") -> None:
    """Refuse values of other types than a function, dataclass or typed dictionary declares; ignore unknown names.

    Raises:
        UsageError: naming the first one, its value and what is expected; a field of settings as ``settings.NAME``.
    """
    scope = sys.modules[kind.__module__].__dict__
    for name, value in given.items():
        if (annotation := kind.__annotations__.get(name)) is None:
            continue
        expected = [*_types(getattr(annotation, "__forward_arg__", annotation), scope)]
        if not any(_fits(value, one) for one in expected):
            words = (_WORDS.get(one, getattr(one, "__name__", one)) for one in expected)
            raise UsageError(
                f"{where}{name} = {value!a:.60}: {type(value).__name__} is the wrong type",
                f"give {' or '.join(map(str, dict.fromkeys(words)))}{_EXAMPLES.get(name, '')}",
            )
        if is_dataclass(value) and (where or name == "settings"):
            fields = {field: getattr(value, field) for field in type(value).__annotations__}
            check_types(type(value), fields, f"{where}{name}.")


def check_arguments(*kinds: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that lets a verb refuse unknown names (`check_names`) and other types (`check_types`).

    Args:
        kinds: the typed dictionaries of the choices that it takes besides its own parameters.
    """

    def decorate(verb: Callable[P, R]) -> Callable[P, R]:
        own = [
            name
            for name, one in signature(verb).parameters.items()
            if one.kind is not one.VAR_KEYWORD
        ]
        known = {*own, *(name for kind in kinds for name in kind.__annotations__)}

        @wraps(verb)
        def checked(*given: P.args, **options: P.kwargs) -> R:
            check_names(options, known)
            for kind in kinds:
                check_types(kind, options)
            check_types(verb, {**dict(zip(own, given, strict=False)), **options})
            return verb(*given, **options)

        return checked

    return decorate


def strict_fields(kind: type[R]) -> type[R]:
    """Let a dataclass refuse unknown names of fields (`check_names`), missing fields and further values.

    A decorator. Values are checked by the dataclass itself, or by the verb that takes it.
    """
    made: Any = kind.__init__
    taken = signature(kind)

    @wraps(made)
    def checked(self: R, *given: Any, **named: Any) -> None:
        check_names(named, taken.parameters)
        try:
            taken.bind(*given, **named)
        except TypeError as error:
            raise UsageError(
                f"{kind.__name__}: {error}", f"its fields: {', '.join(taken.parameters)}"
            ) from error
        made(self, *given, **named)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind


def as_list(values: str | Path | Iterable[str | Path]) -> Sequence[str | Path]:
    """Return paths or names as a list; a single one is a list of one."""
    return [values] if isinstance(values, str | Path) else [*values]


def _fits(value: object, expected: Any) -> bool:
    """Return whether a value is of a type; a whole number is a number, and True is neither."""
    if isinstance(expected, str):
        return expected in {one.__name__ for one in type(value).__mro__}
    if isinstance(value, bool):
        return expected in {bool, object}
    if expected is Sequence:
        return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return isinstance(value, {float: int | float, Path: os.PathLike}.get(expected, expected))


def _types(annotation: str, scope: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the types that an annotation allows; a name for a class that is not imported."""
    while "[" in annotation:
        annotation = re.sub(r"\[[^][]*\]", "", annotation)
    for name in map(str.strip, annotation.split("|")):
        found = scope.get(name, vars(builtins).get(name, name.rpartition(".")[2]))
        for one in get_args(found) if isinstance(found, UnionType) else [found]:
            if one is Literal:
                yield object
            elif is_typeddict(one):
                yield Mapping
            else:
                yield NoneType if one is None else get_origin(one) or one
