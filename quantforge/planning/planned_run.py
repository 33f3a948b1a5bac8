"""Plan of a run: a recipe on an opened model, with what the settings say of memory and threads."""

from __future__ import annotations

from pathlib import Path

from quantforge.checkpoint.reader import Checkpoint
from quantforge.planning.planner import Planned, make_plan
from quantforge.recipe import Recipe
from quantforge.settings import Settings, workers_of


def planned_of(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Planned:
    """Plan for an opened model, with what the settings say of memory and threads."""
    in_memory = settings.activations == "memory"
    return make_plan(
        recipe, checkpoint, out,
        in_memory=in_memory, workers=workers_of(settings), serving=settings.serving,
    )  # fmt: skip
