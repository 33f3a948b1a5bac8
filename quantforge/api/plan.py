"""Plan: what `quantize` would do, from headers alone, and what its result, or a model as it is, needs in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

from quantforge.architectures.match import ModelLayout
from quantforge.arguments import check_arguments
from quantforge.errors import InputError
from quantforge.files.hub import resolve
from quantforge.files.reader import Checkpoint
from quantforge.formats import detect_format
from quantforge.formats.match_quantized import match_quantized
from quantforge.formats.open_model import open_model
from quantforge.planning.allocation import plan_search
from quantforge.planning.capacity import Capacity, Load
from quantforge.planning.capacity import capacity as of_plan
from quantforge.planning.conversion import plan_export
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.planner import Planned, make_plan
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.size_target import size_request
from quantforge.planning.source_views import planned_source, source_as_read
from quantforge.plans import Plan, Serving
from quantforge.recipe import Recipe
from quantforge.settings import Settings

_SERVED = ("engine", "tensor_parallel")  # choices of where a result is served, not of what it is


@check_arguments(RecipeOptions)
def plan(
    model: str | Path,
    recipe: RecipeSource = None,
    settings: Settings | None = None,
    out: str | Path | None = None,
    *,
    target: str | None = None,
    like: str | Path | None = None,
    candidates: str | Sequence[str] = (),
    **options: Unpack[RecipeOptions],
) -> Plan:
    """Return what `quantize` would do with the same arguments; nothing is written.

    With a size nothing is measured: the plan is that of a mixture of that size, and a note says what is measured first.
    Errors as `make_plan`, with a size those of `allocate` that headers tell.
    """
    settings = settings or Settings()
    if target is None and like is None and not candidates:
        return planned_for(model, recipe, settings, out, options).plan
    asked = size_request(target, like, candidates, recipe, options)
    return plan_search(model, asked, settings, Path(out) if out else None).estimate_plan().plan


@check_arguments(RecipeOptions)
def capacity(
    model: str | Path,
    load: Load | None = None,
    recipe: RecipeSource = None,
    settings: Settings | None = None,
    out: str | Path | None = None,
    *,
    target: str | None = None,
    like: str | Path | None = None,
    candidates: str | Sequence[str] = (),
    **options: Unpack[RecipeOptions],
) -> tuple[Plan, Capacity]:
    """Return the plan, and what its result needs under a load; nothing is written.

    A quantized model is looked at as it is where no recipe and no option asks for anything.

    Args:
        model: as `plan`.
        load: what is planned for.
        recipe: as `plan`.
        settings: as `plan`.
        out: as `plan`.
        target: as `plan`.
        like: as `plan`.
        candidates: as `plan`.
        options: as `plan`.

    Raises:
        QuantForgeError: as `plan` and `quantforge.planning.capacity.capacity`.
    """
    settings = settings or Settings()
    if target is not None or like is not None or candidates:
        size = size_request(target, like, candidates, recipe, options)
        planned = plan_search(model, size, settings, Path(out) if out else None).estimate_plan()
        return planned.plan, of_plan(planned.plan, planned.model_layout, load or Load())
    chosen = (value for key, value in options.items() if key not in _SERVED)
    asked = recipe is not None or any(value not in {None, False, ()} for value in chosen)
    opened = None if asked else open_model(resolve(str(model), settings.offline))
    if opened is not None and isinstance(opened.config.get("quantization_config"), Mapping):
        engine, parallel = options.get("engine"), options.get("tensor_parallel")
        made, model_layout = _as_it_is(opened, engine, parallel or 1, settings.serving)
    else:
        if options.get("engine") is None:  # the devices are those of the load then
            options["tensor_parallel"] = None
        planned = planned_for(model, recipe, settings, out, options)
        made, model_layout = planned.plan, planned.model_layout
    return made, of_plan(made, model_layout, load or Load())


def planned_for(
    model: str | Path,
    recipe: RecipeSource,
    settings: Settings,
    out: str | Path | None,
    options: RecipeOptions,
) -> Planned:
    """Return the plan of a model with what it was made from; arguments and errors as `plan`."""
    wanted, settings = strip_local_paths(build_recipe(recipe, **options), settings)
    place = Path(out) if out else None
    opened = open_model(resolve(str(model), settings.offline))
    source = planned_source(source_as_read(opened, wanted, place, settings), wanted)
    return make_plan(wanted, source, place, settings)


def _as_it_is(
    checkpoint: Checkpoint, engine: str | None, parallel: int, serving: Serving
) -> tuple[Plan, ModelLayout]:
    """Return the plan of an export that changes nothing, for an engine if one is named, and the model."""
    try:
        form = detect_format(checkpoint.config)
    except InputError as unread:
        wanted = "--bits 4 or --format plain: what is to be made of it can be planned"
        raise InputError(unread.message, wanted) from unread
    headers = checkpoint.headers()
    layouts = {item.module: item for item in form.find_layouts(checkpoint.config, headers)}
    same = Recipe(format=form.KEY, engine=engine, tensor_parallel=parallel)
    made = plan_export(checkpoint, same, serving).plan
    return made, match_quantized(checkpoint, layouts, headers)
