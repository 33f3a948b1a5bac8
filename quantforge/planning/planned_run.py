"""Plan of a run: a recipe on an opened model, with what the settings say of memory, threads and text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quantforge.architectures.positions import embedding_rows
from quantforge.checkpoint.reader import Checkpoint
from quantforge.planning.beside_towers import with_tower
from quantforge.planning.calibration_rows import (
    check_source,
    check_towers,
    named_image,
    with_images,
)
from quantforge.planning.known_importance import with_known_importance
from quantforge.planning.planner import Planned, make_plan
from quantforge.recipe import Recipe
from quantforge.settings import Settings, workers_of


def planned_of(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Planned:
    """Plan for an opened model, with what the settings say of memory, threads, calibration text and file of importance.

    Raises:
        QuantForgeError: as `make_plan`, `with_tower` and `with_known_importance`, and of the text what the run would
            refuse.
    """
    in_memory = settings.activations == "memory"
    planned = make_plan(
        recipe, checkpoint, out,
        in_memory=in_memory, workers=workers_of(settings), serving=settings.serving,
    )  # fmt: skip
    named = with_tower(planned.plan, checkpoint, wanted=settings.mmproj)
    planned = replace(planned, plan=named)
    if (
        settings.calibration
    ):  # a text that is named; without one a model is planned that has no tokenizer yet
        check_text(planned, checkpoint, settings)
        planned = _with_images(planned, settings)
    if settings.imatrix is None or recipe.calibration.importance_file is None:
        return planned
    return with_known_importance(planned, settings.imatrix)


def check_text(planned: Planned, checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuse a calibration text that the run would refuse at its start, where it reads one.

    Raises:
        InputError: the source is missing, malformed or too short, or the model has no tokenizer.
    """
    if planned.plan.needs or planned.recipe.prune_experts is not None:
        options, place = planned.recipe.calibration, settings.calibration
        check_towers(named_image(options, place), checkpoint.config)
        check_source(options, place, checkpoint.path, embedding_rows(checkpoint.config))


def _with_images(planned: Planned, settings: Settings) -> Planned:
    """Return a plan that says what rows with images take, where the text has any."""
    plan, options = planned.plan, planned.recipe.calibration
    if not plan.needs or named_image(options, settings.calibration) is None:
        return planned
    in_memory = settings.activations == "memory"
    peak, note = with_images(plan.peak_memory_bytes, planned.matched, options, in_memory=in_memory)
    return replace(planned, plan=replace(plan, peak_memory_bytes=peak, notes=(*plan.notes, note)))
