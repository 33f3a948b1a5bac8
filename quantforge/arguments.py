"""Check arguments of verbs and fields of option classes: refuse unknown names and wrong types early.

Annotations are read as text, because some name classes that are imported only for type checking (their modules import
torch); such a class is recognized by its name. Contents of containers are checked where they are used.
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

from quantforge.errors import UsageError, nearest_hint

P = ParamSpec("P")
R = TypeVar("R")
_TYPE_WORDS: Mapping[object, str] = {
    str: "a text", bool: "True or False", int: "a whole number", float: "a number", NoneType: "None",
    Path: "a path", Mapping: "a mapping", Sequence: "a list", Callable: "a function", "dtype": "a type of torch",
}  # fmt: skip
_EXAMPLES = {
    "target": ', e.g. "4.5bpw"',
    "rules": ', e.g. ["down_proj=int8:g128:sym"]',
    "ignore": ', e.g. ["lm_head"]',
}


def check_names(requested: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown option names.

    Raises:
        UsageError: naming the first one, and the nearest known name.
    """
    names = {*known}
    for name in requested:
        if name not in names:
            raise UsageError(f"no option '{name}'", nearest_hint(name, names))


def check_types(kind: Any, arguments: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse values without the types declared by a function, dataclass or typed dictionary.

    Unknown names are ignored.

    Args:
        kind: the function or class with the annotations.
        arguments: the values by name.
        prefix: prefix of the names in messages, such as ``settings.``.

    Raises:
        UsageError: naming the first such value and the expected types.
    """
    scope = sys.modules[kind.__module__].__dict__
    for name, value in arguments.items():
        if (annotation := kind.__annotations__.get(name)) is None:
            continue
        expected = [*_allowed_types(getattr(annotation, "__forward_arg__", annotation), scope)]
        if not any(_is_instance(value, expected_type) for expected_type in expected):
            type_texts = (
                _TYPE_WORDS.get(expected_type, getattr(expected_type, "__name__", expected_type))
                for expected_type in expected
            )
            raise UsageError(
                f"{prefix}{name} = {value!a:.60}: {type(value).__name__} is the wrong type",
                f"give {' or '.join(map(str, dict.fromkeys(type_texts)))}{_EXAMPLES.get(name, '')}",
            )
        if is_dataclass(value) and (prefix or name == "settings"):
            fields = {field: getattr(value, field) for field in type(value).__annotations__}
            check_types(type(value), fields, f"{prefix}{name}.")


def check_arguments(*kinds: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes a verb refuse unknown names (`check_names`) and wrong types (`check_types`).

    Args:
        kinds: typed dictionaries of the options that it accepts in addition to its own parameters.
    """

    def decorate(verb: Callable[P, R]) -> Callable[P, R]:
        parameters = [
            name
            for name, parameter in signature(verb).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        known_options = {*parameters, *(name for kind in kinds for name in kind.__annotations__)}

        @wraps(verb)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            check_names(options, known_options)
            for kind in kinds:
                check_types(kind, options)
            check_types(verb, {**dict(zip(parameters, args, strict=False)), **options})
            return verb(*args, **options)

        return checked

    return decorate


def strict_fields(kind: type[R]) -> type[R]:
    """Class decorator that makes a dataclass refuse unknown field names, missing fields and superfluous values.

    Values are checked by the dataclass itself, or by the verb that takes it.
    """
    original_init: Any = kind.__init__
    fields_signature = signature(kind)

    @wraps(original_init)
    def checked(self: R, *args: Any, **kwargs: Any) -> None:
        check_names(kwargs, fields_signature.parameters)
        try:
            fields_signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"{kind.__name__}: {error}", f"its fields: {', '.join(fields_signature.parameters)}"
            ) from error
        original_init(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind


def as_list(values: str | Path | Iterable[str | Path]) -> Sequence[str | Path]:
    """Return paths or names as a list; a single value becomes a list of one."""
    return [values] if isinstance(values, str | Path) else [*values]


def _is_instance(value: object, expected: Any) -> bool:
    """Return whether a value has a type; an int is accepted as a float, a bool is neither."""
    if isinstance(expected, str):
        return expected in {base.__name__ for base in type(value).__mro__}
    if isinstance(value, bool):
        return expected in {bool, object}
    if expected is Sequence:
        return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return isinstance(value, {float: int | float, Path: os.PathLike}.get(expected, expected))


def _allowed_types(annotation: str, scope: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the types that an annotation allows; for a class that is not imported, its name."""
    while "[" in annotation:
        annotation = re.sub(r"\[[^][]*\]", "", annotation)
    for name in map(str.strip, annotation.split("|")):
        resolved = scope.get(name, vars(builtins).get(name, name.rpartition(".")[2]))
        for member in get_args(resolved) if isinstance(resolved, UnionType) else [resolved]:
            if member is Literal:
                yield object
            elif is_typeddict(member):
                yield Mapping
            else:
                yield NoneType if member is None else get_origin(member) or member
