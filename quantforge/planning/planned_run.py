"""Plan of a run: a recipe on an opened model, with what the settings say of memory and threads."""

from __future__ import annotations

from pathlib import Path

from quantforge.checkpoint.reader import Checkpoint
from quantforge.planning.known_importance import with_known_importance
from quantforge.planning.planner import Planned, make_plan
from quantforge.recipe import Recipe
from quantforge.settings import Settings, workers_of


def planned_of(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Planned:
    """Plan for an opened model, with what the settings say of memory, threads, and a file of importance.

    Raises:
        QuantForgeError: as `make_plan` and `with_known_importance`.
    """
    in_memory = settings.activations == "memory"
    planned = make_plan(
        recipe, checkpoint, out,
        in_memory=in_memory, workers=workers_of(settings), serving=settings.serving,
    )  # fmt: skip
    if settings.imatrix is None or recipe.calibration.importance_file is None:
        return planned
    return with_known_importance(planned, settings.imatrix)
