"""``sweep``: quantize a model with all combinations of some choices, and score the results.

Each combination is a variant (`quantforge.api.variants`) with the same bytes as a separate `quantize`. Combinations
that a format, a method, an engine or the model does not support are left out and reported. The same call resumes an
interrupted sweep.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

from quantforge.api.evaluate import MeasurementOptions, check_measurement_options, evaluate
from quantforge.api.scored_text import check_text, find_reference_text
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
from quantforge.execution.units import check_new_output
from quantforge.files.disk import make_directory, write_errors
from quantforge.files.hub import resolve_model
from quantforge.files.stage import check_results_directory
from quantforge.planning.local_paths import shared_adapter_path
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe, place_of
from quantforge.progress import phase, report_to
from quantforge.recipe import LOWER_CASE_KEYS, Recipe
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation


@dataclass(frozen=True, slots=True)
class Swept:
    """Results of a sweep.

    Attributes:
        out: its directory.
        results: path of each result, by the name of its combination.
        left_out: combinations that cannot be made, with the reasons.
        evaluation: evaluation of the source and all results.
    """

    out: Path
    results: Mapping[str, Path]
    left_out: Mapping[str, str]
    evaluation: Evaluation

    def document(self) -> dict[str, Any]:
        """Return the results as plain data."""
        return {
            "path": str(self.out),
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
    """Quantize a model with all combinations of some choices, and compare the results with it.

    Args:
        model: as for `quantize`.
        over: values of the choices to vary, by the names of `RecipeOptions`.
        out: directory, new or from an earlier call; each result in it has the name of its combination.
        recipe: choices that all combinations share.
        settings: how to run.
        measured: options of the evaluation; speed is not measured by default.
        options: choices that override the recipe.

    Raises:
        InputError: the directory ``out`` cannot be made.
        UsageError: the grid is invalid, a method, format or engine is unknown, or choices contradict in all
            combinations.
        RefusedError: no combination can be made; with a strict policy, some cannot.
        QuantForgeError: as `quantize` and `evaluate`.
    """
    settings = settings or Settings()
    check_measurement_options(measured or {})
    measurement_options: MeasurementOptions = {"speed": False, **(measured or {})}
    with report_to(settings.progress):
        reference = resolve_model(str(model), settings.offline)
        text = measurement_options.get("text")
        source = find_reference_text(reference) if text is None else text
        check_text(reference, source, measurement_options.get("length"), offline=settings.offline)
        results, left_out, recipes = make_results(model, over, out, recipe, settings, options)
        adapter = shared_adapter_path(recipe_of_result.adapter for recipe_of_result in recipes)
        evaluation_settings = replace(settings, adapter=adapter)
        evaluation = evaluate(
            model, [*results.values()], evaluation_settings, **measurement_options
        )
    return Swept(Path(out).absolute(), results, left_out, evaluation)


@torch_defaults()
def make_results(
    model: str | Path,
    over: Mapping[str, Sequence[Any]],
    out: str | Path,
    recipe: RecipeSource,
    settings: Settings,
    options: Mapping[str, Any],
) -> tuple[dict[str, Path], dict[str, str], list[Recipe]]:
    """Make the results of a sweep; arguments and errors as for `sweep`.

    Returns:
        The paths of the results by name, the reasons why others are left out, and the recipes.
    """
    if settings.join:
        check_new_output(overwrite=settings.overwrite)
    directory = Path(out).absolute()
    grid = combinations(over, options)
    check_results_directory(directory)
    recipes: dict[str, Recipe] = {}
    left_out: dict[str, QuantForgeError] = {}
    with report_to(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            for name, choices in grid.items():
                try:
                    recipes[name] = build_recipe(recipe, **{**options, **choices})
                except (UsageError, InputError, RefusedError) as error:
                    left_out[name] = error
            variants, errors = plan_variants(
                model, recipes, lambda name, _: directory / name, settings
            )
        left_out = {
            name: reason for name in grid for reason in [(left_out | errors).get(name)] if reason
        }
        for refused in left_out.values():
            expected = isinstance(refused, UsageError | InputError | RefusedError)
            if not expected or isinstance(refused, UnknownNameError):
                raise refused
        if left_out and (settings.policy.strict or not variants.jobs):
            raise _refusal(left_out, len(grid))
        with write_errors(directory, 0):
            make_directory(directory)
        variants.make(directory / "sweep", 1 + len(variants.jobs))
    results = {name: job.out for name, job in variants.jobs.items()}
    made_recipes = [recipes[name] for name in results]
    return results, {name: error.message for name, error in left_out.items()}, made_recipes


def _refusal(left_out: Mapping[str, QuantForgeError], num_combinations: int) -> QuantForgeError:
    """Return the error of a sweep: the common error of all combinations, or one that lists all errors by name."""
    first = next(iter(left_out.values()))
    messages = {(type(error), error.message) for error in left_out.values()}
    if (
        len(left_out) == num_combinations
        and len(messages) == 1
        and not isinstance(first, RefusedError)
    ):
        return first
    reasons = "; ".join(f"{name}: {error.message}" for name, error in left_out.items())
    return RefusedError(
        f"{len(left_out)} of {num_combinations} combinations cannot be made: {reasons}",
        "vary what the format and the method take",
    )


def combinations(
    grid: Mapping[str, Sequence[Any]], fixed_options: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the choices of every combination by its name: ``{"gptq-bits3": {"method": "gptq", "bits": 3}}``.

    Args:
        grid: values by the names of choices; strings are parsed as on the command line.
        fixed_options: choices that all combinations share.

    Raises:
        UsageError: a name is unknown, its values are not a list, repeat a value, or are lists, or the choice is fixed
            too.
        InputError: a value is not a number where one is expected.
    """
    if not isinstance(grid, Mapping):
        raise UsageError(f"over = {grid!a:.60}: no choices", 'e.g. over={"bits": [3, 4]}')
    if not grid:
        raise UsageError("nothing is varied", "--over bits=3,4")
    for name in grid:
        if (fixed_options or {}).get(name) is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--over {name}: --{option} is given too", "leave one of them out")
    rows = [
        [(name, value) for value in _checked_values(name, values)] for name, values in grid.items()
    ]
    choices: dict[str, dict[str, Any]] = {}
    for row in itertools.product(*rows):
        name = "-".join(_value_name(*choice) for choice in row)
        if name in choices:
            raise UsageError(
                f"two combinations are called {name}", "vary one choice by texts that differ more"
            )
        choices[name] = dict(row)
    return choices


def _checked_values(name: str, values: Sequence[Any]) -> list[Any]:
    """Return the values of a choice, converted to its type; errors as `combinations`."""
    value_type = place_of(name)[1]
    accepted_types = {value_type, *get_args(value_type)}
    if any("tuple" in str(item).lower() for item in accepted_types):
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
    texts = str in accepted_types
    return [
        _parse_value(name, item, accepted_types) if isinstance(item, str) and not texts else item
        for item in values
    ]


def _parse_value(name: str, text: str, kinds: Set[Any]) -> Any:
    """Return a string converted to one of the accepted types."""
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
    """Return a value as part of a result's name; a number is preceded by the name of its choice."""
    text = re.sub(r"[^\w.+]+", "-", str(value))
    if not isinstance(value, str):
        return f"{name}{text}"
    return text.strip("-.") or name
