"""Plan: what `quantize` would do, from headers alone."""

from __future__ import annotations

from pathlib import Path

from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.formats.opening import open_model
from quantforge.planning.cited_files import cited
from quantforge.planning.planner import Planned, make_plan
from quantforge.plans import Plan
from quantforge.recipe import Recipe
from quantforge.settings import Settings, workers_of


def plan(
    model: str, recipe: Recipe, settings: Settings | None = None, out: Path | None = None
) -> Plan:
    """Return what `quantize` would do; nothing is written. Errors as `make_plan`."""
    recipe, settings = cited(recipe, settings or Settings())
    return planned_of(open_model(resolve(model, settings.offline)), recipe, out, settings).plan


def planned_of(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Planned:
    """Plan for an opened model, with what the settings say of memory and threads."""
    in_memory = settings.activations == "memory"
    return make_plan(recipe, checkpoint, out, in_memory=in_memory, workers=workers_of(settings))
