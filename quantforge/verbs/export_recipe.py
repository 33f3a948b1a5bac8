"""Recipe of an export: plain rounding, in the format that is asked for, that a name states, or that an engine loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from quantforge.checkpoint.hub import resolve
from quantforge.errors import UsageError
from quantforge.formats import GGUF
from quantforge.formats.format_choice import format_of_name, settled
from quantforge.formats.opening import open_model
from quantforge.planning.engine_format import format_for as chosen_format
from quantforge.planning.recipe_options import ExportOptions, build_recipe
from quantforge.quantizers import PLAIN
from quantforge.recipe import NO_DATA, Recipe


def export_recipe(
    model: str | Path, out: Path | None, *, offline: bool, **options: Unpack[ExportOptions]
) -> Recipe:
    """Return the recipe of an export into ``out``; a GGUF file is made without calibration unless it is asked for.

    Raises:
        UsageError: nothing says which format, a choice is none of an export, or choices contradict each other.
        RefusedError: the engine loads the numbers of the model in no format.
    """
    for name in sorted(options.keys() - ExportOptions.__annotations__.keys()):
        raise UsageError(
            f"export: no option '{name}'", "quantize the model itself, or give a recipe"
        )
    form = options.get("format") or format_of_name(out) or None
    engine, kind = options.get("engine"), options.get("type")
    stated = (form, engine, kind, options.get("pre"), options.get("scheme"))
    if all(value is None for value in stated):
        raise UsageError(
            "--format is missing, or --for, or a name that ends in .gguf",
            "`quantforge formats` lists them",
        )
    if form is None and engine is not None and kind is None:
        form = format_for(model, engine, options.get("tensor_parallel") or 1, offline=offline)
    recipe = build_recipe(None, **{**options, "method": PLAIN, "format": form})
    if settled(recipe, out)[0].format == GGUF and options.get("calibration") is None:
        return replace(recipe, calibration=replace(recipe.calibration, source=NO_DATA))
    return recipe


def format_for(
    model: str | Path, engine: str, parallel: int, *, offline: bool = False
) -> str | None:
    """Return the format in which an engine loads a quantized model; None for one that is not quantized.

    Raises:
        RefusedError: there is none.
    """
    checkpoint = open_model(resolve(str(model), offline))
    if not isinstance(checkpoint.config.get("quantization_config"), Mapping):
        return None
    return chosen_format(checkpoint, engine, parallel)
