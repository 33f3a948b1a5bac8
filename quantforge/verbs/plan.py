"""Plan: what `quantize` would do, from headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.formats.format_choice import settled
from quantforge.formats.opening import as_read, open_model
from quantforge.planning.changed_source import changed, heads_as_asked
from quantforge.planning.cited_files import cited
from quantforge.planning.loader_form import as_loaded
from quantforge.planning.planner import Planned, make_plan
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.single_experts import single_experts
from quantforge.plans import Plan
from quantforge.recipe import Recipe
from quantforge.settings import Settings, workers_of


def plan(
    model: str | Path,
    recipe: RecipeSource = None,
    settings: Settings | None = None,
    out: str | Path | None = None,
    **options: Unpack[RecipeOptions],
) -> Plan:
    """Return what `quantize` would do with the same arguments; nothing is written. Errors as `make_plan`."""
    wanted, settings = cited(build_recipe(recipe, **options), settings or Settings())
    place = Path(out) if out else None
    opened = open_model(resolve(str(model), settings.offline))
    key = settled(wanted, place)[0].format
    opened = as_loaded(as_read(opened, settings.adapter), key, wanted.engine)
    opened = heads_as_asked(single_experts(opened, key, wanted.layers), wanted.mtp)
    opened = changed(opened, wanted.method, wanted.pruned_share, wanted.calibration)
    return planned_of(opened, wanted, place, settings).plan


def planned_of(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Planned:
    """Plan for an opened model, with what the settings say of memory and threads."""
    in_memory = settings.activations == "memory"
    return make_plan(recipe, checkpoint, out, in_memory=in_memory, workers=workers_of(settings))
