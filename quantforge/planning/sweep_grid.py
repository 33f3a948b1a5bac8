"""Grid of a sweep: values of some choices of a recipe, all combinations of them, each under a name for files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from quantforge.errors import InputError, UsageError
from quantforge.planning.recipe_options import place_of
from quantforge.recipe import WORDS


def combinations(
    grid: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the choices of every combination by its name: ``{"gptq-bits3": {"method": "gptq", "bits": 3}}``.

    Args:
        grid: values by the names of choices; texts are taken as on the command line.
        fixed: choices that all combinations have in common.

    Raises:
        UsageError: no choice has that name, one has no list of values or the same twice, takes a list, or is fixed too.
        InputError: a value is no number where one is expected.
    """
    if not isinstance(grid, Mapping):
        raise UsageError(f"over = {grid!a:.60}: no choices", 'e.g. over={"bits": [3, 4]}')
    if not grid:
        raise UsageError("nothing is varied", "--over bits=3,4")
    for name in grid:
        if (fixed or {}).get(name) is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--over {name}: --{option} is given too", "leave one of them out")
    rows = [
        [(name, _typed(name, value)) for value in _checked(name, values)]
        for name, values in grid.items()
    ]
    found: dict[str, dict[str, Any]] = {}
    for row in itertools.product(*rows):
        name = "-".join(_word(*one) for one in row)
        if name in found:
            raise UsageError(
                f"two combinations are called {name}", "vary one choice by texts that differ more"
            )
        found[name] = dict(row)
    return found


def _checked(name: str, values: Sequence[Any]) -> Sequence[Any]:
    kind = place_of(name)[1]
    if any("tuple" in str(one).lower() for one in (kind, *get_args(kind))):
        raise UsageError(f"--over {name}: takes a list", "vary it by recipes of their own")
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UsageError(
            f"over: {name} = {values!a:.60}: a list of values is expected",
            f'e.g. {{"{name}": [A, B]}}',
        )
    if name in WORDS:
        values = [value.lower() if isinstance(value, str) else value for value in values]
    if not values or "" in values:
        raise UsageError(f"--over {name}: no values", f"write --over {name}=A,B")
    if len(set(map(str, values))) < len(values):
        raise UsageError(f"--over {name}: a value twice", "name each once")
    return values


def _typed(name: str, value: Any) -> Any:
    """Return a value in the type of its choice."""
    kinds = {kind for one in [place_of(name)[1]] for kind in (one, *get_args(one))}
    if not isinstance(value, str) or str in kinds:
        return value
    if bool in kinds:
        if value in {"true", "false"}:
            return value == "true"
        raise InputError(f"--over {name}={value}: not understood", "write true or false")
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError as error:
                raise InputError(
                    f"--over {name}={value}: not a number", f"write --over {name}=2,4"
                ) from error
    return value


def _word(name: str, value: Any) -> str:
    """Return a value as a part of a name: a text is itself, of a number the choice is said too."""
    text = re.sub(r"[^\w.+]+", "-", str(value))
    if not isinstance(value, str):
        return f"{name}{text}"
    return text.strip("-.") or name
