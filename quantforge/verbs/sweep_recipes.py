"""Sweep: all combinations of some choices, quantized and scored; the same call goes on with it.

Each combination is a result of its own, with the bytes of `quantize`; those that read the same calibration rows share
their pass as in a release. What a format, a method or the model does not allow is left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantforge.checkpoint.disk import folder, writing
from quantforge.checkpoint.hub import resolve
from quantforge.errors import RefusedError
from quantforge.execution.progress import followed, phase
from quantforge.formats import format_of
from quantforge.formats.opening import open_model
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.sweep_grid import combinations
from quantforge.results.source_files import files_of_source
from quantforge.settings import Settings
from quantforge.verbs.asked_result import Variant
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.evaluate_models import evaluate
from quantforge.verbs.given_options import checks_options
from quantforge.verbs.kept_variant import clear_run, kept
from quantforge.verbs.measurement_options import MeasurementOptions, check_measurement
from quantforge.verbs.plan import planned_for
from quantforge.verbs.quantize_variants import quantize_variants

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation


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
        UsageError: the grid, or choices that contradict each other.
        RefusedError: no combination can be made, or with a strict policy one cannot.
        QuantForgeError: as `quantize` and `evaluate`.
    """
    settings, place = settings or Settings(), Path(out).absolute()
    figures = _figures(measured or {})
    asked = combinations(over, options)
    wanted = {
        name: build_recipe(recipe, **{**options, **choices}) for name, choices in asked.items()
    }
    missing: list[Variant] = []
    results: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    with followed(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            files = files_of_source(open_model(resolve(str(model), settings.offline)))
            for name, made_by in wanted.items():
                try:
                    planned = planned_for(model, made_by, settings, None, {})
                    settings.policy.check(planned.plan.substitutions)
                except RefusedError as error:
                    left_out[name] = error.message
                    continue
                results[name] = place / f"{name}{format_of(planned.plan.format).ABOUT.suffix}"
                if kept(results[name], planned, files, settings):
                    clear_run(results[name])
                else:
                    missing.append(Variant(made_by, results[name]))
        if left_out and (settings.policy.strict or not results):
            said = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise RefusedError(
                f"{len(left_out)} of {len(asked)} combinations cannot be made: {said}",
                "vary what the format and the method take",
            )
        with writing(place, 0):
            folder(place)
        with phase("variants", 0.7):
            quantize_variants(model, missing, settings)
        found = evaluate(model, [*results.values()], settings, **figures)
    return Swept(place, results, left_out, found)


def _figures(measured: MeasurementOptions) -> MeasurementOptions:
    """Return how a sweep is measured, without speed unless it says so; errors as `check_measurement`."""
    check_measurement(measured)
    figures: MeasurementOptions = {"speed": False, **measured}
    check_measurement(figures)
    return figures
