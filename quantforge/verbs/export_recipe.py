"""Recipe of an export: plain rounding, in the format that is asked for, that a name states, or that an engine loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from quantforge.checkpoint.hub import resolve
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.formats import FORMATS, GGUF, Verdict, detect, targets
from quantforge.formats.format_choice import format_of_name, settled
from quantforge.formats.opening import open_model
from quantforge.planning.conversion import DECODED, plan_export
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
        form = loaded_format(model, engine, options.get("tensor_parallel") or 1, offline=offline)
    recipe = build_recipe(None, **{**options, "method": PLAIN, "format": form})
    if settled(recipe, out)[0].format == GGUF and options.get("calibration") is None:
        return replace(recipe, calibration=replace(recipe.calibration, source=NO_DATA))
    return recipe


def loaded_format(
    model: str | Path, engine: str, parallel: int, *, offline: bool = False
) -> str | None:
    """Return the format in which an engine loads a quantized model, None for one that is not quantized.

    That of the least change: its own comes first, then exact ones that headers settle, those that values decide, and
    inexact ones. ``parallel`` is the number of devices that the model is split over.

    Raises:
        RefusedError: there is none; every reason is given.
    """
    checkpoint = open_model(resolve(str(model), offline))
    if not isinstance(checkpoint.config.get("quantization_config"), Mapping):
        return None
    source = detect(checkpoint.config).KEY
    formats = dict.fromkeys((source, *targets.preferred_formats(engine), *FORMATS))
    found: list[tuple[int, str]] = []
    reasons = []
    for key in formats:
        if key == DECODED:
            continue
        try:
            plan = plan_export(
                checkpoint, Recipe(format=key, engine=engine, tensor_parallel=parallel)
            )
        except (RefusedError, InputError, UsageError) as error:
            reasons.append(f"{key}: {error.message}")
            continue
        fits = {layer.fit.verdict for layer in plan.layers.values()}
        rank = 2 if Verdict.INEXACT in fits else int(Verdict.READ in fits)
        found.append((0 if key == source else rank, key))
    if not found:
        raise RefusedError(
            f"{engine} loads these numbers in no format: {'; '.join(reasons)}",
            f"quantize the original model with --for {engine}",
        )
    return min(found, key=lambda item: item[0])[1]
