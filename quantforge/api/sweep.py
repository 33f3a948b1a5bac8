"""Sweep: all combinations of some choices, quantized and scored; the same call resumes it.

Each combination is a variant (`quantforge.api.variants`) with the bytes of its own `quantize`. What a format, a
method, an engine or the model does not allow is left out and named.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

from quantforge.api.evaluate import MeasurementOptions, check_measurement, evaluate
from quantforge.api.scored_text import check_text, own_text
from quantforge.api.torch_defaults import torch_defaults
from quantforge.api.variants import plan_variants
from quantforge.arguments import check_arguments
from quantforge.errors import (
    InputError,
    QuantForgeError,
    RefusedError,
    UnknownNameError,
    UsageError,
)
from quantforge.execution.progress import phase, report_to
from quantforge.execution.units import check_new_output
from quantforge.files.disk import make_folder, writing
from quantforge.files.hub import resolve
from quantforge.files.stage import check_folder
from quantforge.planning.local_paths import shared_adapter_path
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe, place_of
from quantforge.recipe import LOWER_CASE_KEYS, Recipe
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep.

    Attributes:
        out: its directory.
        results: where each combination lies, by its name.
        left_out: combinations that cannot be made, and why.
        evaluation: of the source and all results.
    """

    out: Path
    results: Mapping[str, Path]
    left_out: Mapping[str, str]
    evaluation: Evaluation

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "out": str(self.out),
            "results": {name: str(path) for name, path in self.results.items()},
            "left_out": dict(self.left_out),
            "evaluation": self.evaluation.to_json(),
        }


@check_arguments(RecipeOptions)
@torch_defaults()
def sweep(
    model: str | Path,
    over: Mapping[str, Sequence[Any]],
    out: str | Path,
    recipe: RecipeSource = None,
    settings: Settings | None = None,
    measured: MeasurementOptions | None = None,
    **options: Unpack[RecipeOptions],
) -> Swept:
    """Quantize a model by all combinations of some choices, and measure them against it.

    Args:
        model: as of `quantize`.
        over: values of the choices that are varied, by the names of `RecipeOptions`.
        out: a directory, new or of an earlier call; every result lies in it under the name of its combination.
        recipe: what all have in common.
        settings: how it runs.
        measured: how it is measured; without speed unless it says so.
        options: choices that override the recipe.

    Raises:
        InputError: no directory can be made at ``out``.
        UsageError: the grid, an unknown method, format or engine, or choices that contradict each other in all.
        RefusedError: no combination can be made, or with a strict policy one cannot.
        QuantForgeError: as `quantize` and `evaluate`.
    """
    settings = settings or Settings()
    check_measurement(measured or {})
    figures: MeasurementOptions = {"speed": False, **(measured or {})}
    with report_to(settings.progress):
        reference = resolve(str(model), settings.offline)
        text = figures.get("text")
        source = own_text(reference) if text is None else text
        check_text(reference, source, figures.get("length"), offline=settings.offline)
        results, left_out, recipes = make_results(model, over, out, recipe, settings, options)
        merged = shared_adapter_path(one.adapter for one in recipes)
        own = replace(settings, adapter=merged)
        found = evaluate(model, [*results.values()], own, **figures)
    return Swept(Path(out).absolute(), results, left_out, found)


@torch_defaults()
def make_results(
    model: str | Path,
    over: Mapping[str, Sequence[Any]],
    out: str | Path,
    recipe: RecipeSource,
    settings: Settings,
    options: Mapping[str, Any],
) -> tuple[dict[str, Path], dict[str, str], list[Recipe]]:
    """Make what a sweep measures; arguments and errors as of `sweep`.

    Returns:
        Where each combination lies, by its name, why others are left out, and the recipes.
    """
    if settings.join:
        check_new_output(overwrite=settings.overwrite)
    place = Path(out).absolute()
    asked = combinations(over, options)
    check_folder(place)
    recipes: dict[str, Recipe] = {}
    left_out: dict[str, QuantForgeError] = {}
    with report_to(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            for name, choices in asked.items():
                try:
                    recipes[name] = build_recipe(recipe, **{**options, **choices})
                except (UsageError, InputError, RefusedError) as error:
                    left_out[name] = error
            variants, errors = plan_variants(model, recipes, lambda name, _: place / name, settings)
        left_out = {name: one for name in asked for one in [(left_out | errors).get(name)] if one}
        for refused in left_out.values():
            expected = isinstance(refused, UsageError | InputError | RefusedError)
            if not expected or isinstance(refused, UnknownNameError):
                raise refused
        if left_out and (settings.policy.strict or not variants.jobs):
            raise _refusal(left_out, len(asked))
        with writing(place, 0):
            make_folder(place)
        variants.make(place / "sweep", 1 + len(variants.jobs))
    results = {name: job.out for name, job in variants.jobs.items()}
    made = [recipes[name] for name in results]
    return results, {name: error.message for name, error in left_out.items()}, made


def _refusal(left_out: Mapping[str, QuantForgeError], asked: int) -> QuantForgeError:
    """Return the refusal of a sweep: the error of all combinations if they have one, else all errors by name."""
    first = next(iter(left_out.values()))
    same = {(type(error), error.message) for error in left_out.values()}
    if len(left_out) == asked and len(same) == 1 and not isinstance(first, RefusedError):
        return first
    said = "; ".join(f"{name}: {error.message}" for name, error in left_out.items())
    return RefusedError(
        f"{len(left_out)} of {asked} combinations cannot be made: {said}",
        "vary what the format and the method take",
    )


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
        [(name, value) for value in _checked_values(name, values)] for name, values in grid.items()
    ]
    found: dict[str, dict[str, Any]] = {}
    for row in itertools.product(*rows):
        name = "-".join(_value_name(*one) for one in row)
        if name in found:
            raise UsageError(
                f"two combinations are called {name}", "vary one choice by texts that differ more"
            )
        found[name] = dict(row)
    return found


def _checked_values(name: str, values: Sequence[Any]) -> list[Any]:
    """Return the values of a choice, in its type; errors as `combinations`."""
    kind = place_of(name)[1]
    kinds = {kind, *get_args(kind)}
    if any("tuple" in str(one).lower() for one in kinds):
        raise UsageError(f"--over {name}: takes a list", "vary it by recipes of their own")
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UsageError(
            f"over: {name} = {values!a:.60}: a list of values is expected",
            f'e.g. {{"{name}": [A, B]}}',
        )
    if name in LOWER_CASE_KEYS:
        values = [value.lower() if isinstance(value, str) else value for value in values]
    if not values or "" in values:
        raise UsageError(f"--over {name}: no values", f"write --over {name}=A,B")
    if len(set(map(str, values))) < len(values):
        raise UsageError(f"--over {name}: a value twice", "name each once")
    texts = str in kinds
    return [
        _typed(name, one, kinds) if isinstance(one, str) and not texts else one for one in values
    ]


def _typed(name: str, text: str, kinds: Set[Any]) -> Any:
    """Return a text as a value of one of some types."""
    if bool in kinds:
        if text not in {"true", "false"}:
            raise InputError(f"--over {name}={text}: not understood", "write true or false")
        return text == "true"
    try:
        return int(text) if int in kinds else float(text)
    except ValueError as error:
        hint = f"write --over {name}=2,4"
        raise InputError(f"--over {name}={text}: not a number", hint) from error


def _value_name(name: str, value: Any) -> str:
    """Return a value as a part of a name: a text is itself, of a number the choice is said too."""
    text = re.sub(r"[^\w.+]+", "-", str(value))
    if not isinstance(value, str):
        return f"{name}{text}"
    return text.strip("-.") or name
