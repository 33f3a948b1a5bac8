"""Arguments that a program hands over: names that there are not, other types, and lists where one value was meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from quantforge.errors import UsageError, check_options
from quantforge.verbs.argument_types import check_arguments, check_choices

P = ParamSpec("P")
R = TypeVar("R")


def checks_options(*kinds: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that lets a verb refuse what it does not take: as `check_options`, then `check_arguments`.

    Args:
        kinds: the typed dictionaries of the choices that it takes beside its own parameters.
    """

    def decorate(verb: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(verb).parameters.values()
        own = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
        known = {*own, *(name for kind in kinds for name in kind.__annotations__)}

        @wraps(verb)
        def checked(*given: P.args, **options: P.kwargs) -> R:
            check_options(options, known)
            for kind in kinds:
                check_choices(kind, options)
            check_arguments(verb, {**dict(zip(own, given, strict=False)), **options})
            return verb(*given, **options)

        return checked

    return decorate


def listed(
    values: str | Path | Iterable[str | Path], name: str, example: str
) -> Sequence[str | Path]:
    """Return a list of paths or names; a single one is a list of one.

    Raises:
        UsageError: it is neither; ``name`` is that of the argument, ``example`` what to write.
    """
    if isinstance(values, str | Path):
        return [values]
    if not isinstance(values, Iterable):
        raise UsageError(f"{name} = {values!a:.60}: a list is expected", f"e.g. {example}")
    return [*values]
