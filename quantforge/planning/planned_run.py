"""Plan of a run: a recipe on an opened model, with what the settings say of memory, threads and text."""

from __future__ import annotations

from pathlib import Path

from quantforge.checkpoint.reader import Checkpoint
from quantforge.planning.calibration_rows import check_source
from quantforge.planning.known_importance import with_known_importance
from quantforge.planning.planner import Planned, make_plan
from quantforge.recipe import Recipe
from quantforge.settings import Settings, workers_of


def planned_of(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Planned:
    """Plan for an opened model, with what the settings say of memory, threads, calibration text and file of importance.

    Raises:
        QuantForgeError: as `make_plan` and `with_known_importance`, and of the text what the run would refuse.
    """
    in_memory = settings.activations == "memory"
    planned = make_plan(
        recipe, checkpoint, out,
        in_memory=in_memory, workers=workers_of(settings), serving=settings.serving,
    )  # fmt: skip
    if (
        settings.calibration
    ):  # a text that is named; without one a model is planned that has no tokenizer yet
        check_text(planned, checkpoint.path, settings)
    if settings.imatrix is None or recipe.calibration.importance_file is None:
        return planned
    return with_known_importance(planned, settings.imatrix)


def check_text(planned: Planned, model: Path, settings: Settings) -> None:
    """Refuse a calibration text that the run would refuse at its start, where it reads one.

    Raises:
        InputError: the source is missing, malformed or too short, or the model has no tokenizer.
    """
    if planned.plan.needs or planned.recipe.prune_experts is not None:
        check_source(planned.recipe.calibration, settings.calibration, model)
