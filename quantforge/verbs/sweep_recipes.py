"""Sweep: all combinations of some choices, quantized and scored; the same call goes on with it.

Each combination is a result of its own, with the bytes of `quantize`; those that read the same calibration rows share
their pass as in a release. What a format, a method, an engine or the model does
not allow is left out and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantforge.checkpoint.disk import folder, writing
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.stage import check_apart, check_folder
from quantforge.errors import (
    InputError,
    QuantForgeError,
    RefusedError,
    UnknownNameError,
    UsageError,
)
from quantforge.execution.progress import followed, phase
from quantforge.execution.units import check_new_output
from quantforge.formats import format_of
from quantforge.formats.opening import open_model
from quantforge.planning.cited_files import common_adapter
from quantforge.planning.decisions import decisions_of
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.sweep_grid import combinations
from quantforge.results.source_files import files_of_source
from quantforge.settings import Settings
from quantforge.verbs.asked_result import Variant
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.evaluate_models import evaluate
from quantforge.verbs.given_options import checks_options
from quantforge.verbs.kept_variant import check_whole_file, clear_run, kept
from quantforge.verbs.make_variants import make_variants, share_of
from quantforge.verbs.measurement_options import MeasurementOptions, check_measurement
from quantforge.verbs.plan import planned_for
from quantforge.verbs.scored_text import check_text, own_text

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation
    from quantforge.planning.planner import Planned
    from quantforge.plans import Plan


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


@checks_options(RecipeOptions)
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
    figures = _figures(measured or {})
    with followed(settings.progress):
        reference = resolve(str(model), settings.offline)
        text = figures.get("text")
        source = own_text(reference) if text is None else text
        check_text(reference, source, figures.get("length"), offline=settings.offline)
        results, left_out = make_results(model, over, out, recipe, settings, options)
        asked = combinations(over, options)
        recipes = (build_recipe(recipe, **{**options, **asked[name]}) for name in results)
        merged = common_adapter(one.adapter for one in recipes)
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
) -> tuple[dict[str, Path], dict[str, str]]:
    """Make what a sweep measures; arguments and errors as of `sweep`.

    Returns:
        Where each combination lies, by its name, and why others are left out.
    """
    if settings.join:
        check_new_output(overwrite=settings.overwrite)
    place = Path(out).absolute()
    asked = combinations(over, options)
    _check_values(asked.values())
    check_folder(place)
    missing: list[tuple[Variant, Planned]] = []
    undone: dict[str, Plan] = {}
    results: dict[str, Path] = {}
    left_out: dict[str, QuantForgeError] = {}
    with followed(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            source = open_model(resolve(str(model), settings.offline))
            files = files_of_source(source)
            for name, choices in asked.items():
                try:
                    made_by = build_recipe(recipe, **{**options, **choices})
                    planned = planned_for(model, made_by, settings, None, {})
                    _check(planned, settings)
                except UnknownNameError:
                    raise
                except (UsageError, InputError, RefusedError) as error:
                    left_out[name] = error
                    continue
                results[name] = place / f"{name}{format_of(planned.plan.format).ABOUT.suffix}"
                check_apart(results[name], source.path)
                if not kept(results[name], planned, files, settings):
                    missing.append((Variant(made_by, results[name]), planned))
                    undone[name] = planned.plan
        if left_out and (settings.policy.strict or not results):
            raise _refusal(left_out, len(asked))
        for said in decisions_of(undone):
            settings.note(said)
        _prepare(place, {*results.values()} - {one.out for one, _ in missing})
        with phase("variants", share_of(len(missing), 1 + len(results))):
            _make(model, missing, place, files, settings)
    return results, {name: error.message for name, error in left_out.items()}


def _make(
    model: str | Path,
    missing: Sequence[tuple[Variant, Planned]],
    place: Path,
    files: Mapping[str, Any],
    settings: Settings,
) -> None:
    """Make results that are not there, with other processes where they take part."""

    def is_there(number: int) -> bool:
        variant, planned = missing[number]
        assert variant.out is not None
        return kept(variant.out, planned, files, settings)

    wanted = [variant for variant, _ in missing]
    make_variants(model, wanted, is_there, place / "sweep", settings)


def _check(planned: Planned, settings: Settings) -> None:
    """Refuse what the policy does not allow, and what a sweep cannot hold."""
    settings.policy.check(planned.plan.substitutions)
    check_whole_file(planned)


def _prepare(place: Path, there: Iterable[Path]) -> None:
    """Make the directory, and remove what runs of results that are kept have left."""
    with writing(place, 0):
        folder(place)
    for result in there:
        clear_run(result)


def _check_values(asked: Iterable[Mapping[str, Any]]) -> None:
    """Refuse values that no recipe may have, whatever else is asked for."""
    for name, value in (one for choices in asked for one in choices.items()):
        with suppress(UsageError):  # of what else a recipe needs then
            build_recipe(None, **{name: value})


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


def _figures(measured: MeasurementOptions) -> MeasurementOptions:
    """Return how a sweep is measured, without speed unless it says so; errors as `check_measurement`."""
    check_measurement(measured)
    figures: MeasurementOptions = {"speed": False, **measured}
    check_measurement(figures)
    return figures
