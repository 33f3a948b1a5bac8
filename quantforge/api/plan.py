"""``plan`` and ``capacity``: what `quantize` would do, and the memory and speed of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

from quantforge.architectures.match import ModelLayout
from quantforge.arguments import check_arguments
from quantforge.errors import InputError
from quantforge.files.hub import resolve_model
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

_SERVING_OPTIONS = ("engine", "tensor_parallel")  # where a result is served; they do not change it


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

    With a target size nothing is measured: the plan is that of an estimated mixture of this size, and a note tells that
    `quantize` measures first.
    Errors as `make_plan`, and as `allocate` for a target size.
    """
    settings = settings or Settings()
    if target is None and like is None and not candidates:
        return plan_quantization(model, recipe, settings, out, options).plan
    request = size_request(target, like, candidates, recipe, options)
    return plan_search(model, request, settings, Path(out) if out else None).estimate_plan().plan


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
    """Return the plan, and the memory and speed of its result under a load; nothing is written.

    A quantized model is taken as it is if neither recipe nor options are given.

    Args:
        model: as `plan`.
        load: context length, batch size and devices to plan for.
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
        request = size_request(target, like, candidates, recipe, options)
        planned = plan_search(model, request, settings, Path(out) if out else None).estimate_plan()
        return planned.plan, of_plan(planned.plan, planned.model_layout, load or Load())
    option_values = (value for key, value in options.items() if key not in _SERVING_OPTIONS)
    has_recipe = recipe is not None or any(
        value not in {None, False, ()} for value in option_values
    )
    checkpoint = None if has_recipe else open_model(resolve_model(str(model), settings.offline))
    if checkpoint is not None and isinstance(checkpoint.config.get("quantization_config"), Mapping):
        engine, parallel = options.get("engine"), options.get("tensor_parallel")
        result_plan, model_layout = _plan_unchanged(
            checkpoint, engine, parallel or 1, settings.serving
        )
    else:
        if options.get("engine") is None:  # then the number of devices comes from the load
            options["tensor_parallel"] = None
        planned = plan_quantization(model, recipe, settings, out, options)
        result_plan, model_layout = planned.plan, planned.model_layout
    return result_plan, of_plan(result_plan, model_layout, load or Load())


def plan_quantization(
    model: str | Path,
    recipe: RecipeSource,
    settings: Settings,
    out: str | Path | None,
    options: RecipeOptions,
) -> Planned:
    """Return the plan of a quantization with its inputs; arguments and errors as `plan`."""
    requested, settings = strip_local_paths(build_recipe(recipe, **options), settings)
    out_path = Path(out) if out else None
    opened = open_model(resolve_model(str(model), settings.offline))
    source = planned_source(source_as_read(opened, requested, out_path, settings), requested)
    return make_plan(requested, source, out_path, settings)


def _plan_unchanged(
    checkpoint: Checkpoint, engine: str | None, parallel: int, serving: Serving
) -> tuple[Plan, ModelLayout]:
    """Return the plan of an export into the same format, for an engine if one is given, and the model layout."""
    try:
        format_module = detect_format(checkpoint.config)
    except InputError as error:
        hint_text = "--bits 4 or --format plain: what is to be made of it can be planned"
        raise InputError(error.message, hint_text) from error
    headers = checkpoint.stored_tensors()
    layouts = {item.module: item for item in format_module.find_layouts(checkpoint.config, headers)}
    unchanged = Recipe(format=format_module.KEY, engine=engine, tensor_parallel=parallel)
    result_plan = plan_export(checkpoint, unchanged, serving).plan
    return result_plan, match_quantized(checkpoint, layouts, headers)
