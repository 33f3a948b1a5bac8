"""Plan of a run: a recipe on an opened model, with what the settings say of memory, threads and text.

Three views of a model follow one another: as it was opened, as a result's files will hold it (`source_of`), and as the
recipe changes all of it (`changed`); the last is planned and quantized.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quantforge.architectures.configuration import embedding_rows
from quantforge.checkpoint.reader import Checkpoint
from quantforge.formats.format_choice import settled
from quantforge.formats.opening import as_read
from quantforge.planning.beside_towers import with_tower
from quantforge.planning.calibration_rows import (
    check_source,
    check_towers,
    named_image,
    with_images,
)
from quantforge.planning.changed_source import changed, heads_as_asked
from quantforge.planning.known_importance import with_known_importance
from quantforge.planning.loader_form import as_loaded
from quantforge.planning.planner import Planned, make_plan
from quantforge.planning.single_experts import single_experts
from quantforge.recipe import Recipe
from quantforge.settings import Settings, workers_of


def source_of(
    opened: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Checkpoint:
    """Return a model with its adapter merged, in the form that the engine loads, with experts as files hold them."""
    key = settled(recipe, out)[0].format
    loaded = as_loaded(as_read(opened, settings.adapter), key, recipe.engine)
    return single_experts(loaded, key, recipe)


def planned_source(source: Checkpoint, recipe: Recipe) -> Checkpoint:
    """Return a source (`source_of`) as the recipe changes all of it; errors as `changed`."""
    source = heads_as_asked(source, recipe.mtp)
    return changed(source, recipe.method, recipe.prune_experts, recipe.calibration)


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
