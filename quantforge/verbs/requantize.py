"""Quantizing a quantized model again: from the source that its manifest names, or from its decoded weights."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import CONFIG, Checkpoint
from quantforge.errors import IntegrityError, RefusedError, UsageError
from quantforge.formats.opening import open_model
from quantforge.planning.cited_files import check_adapter_given, check_given
from quantforge.recipe import Recipe, from_toml
from quantforge.results import manifest
from quantforge.results.manifest import files_of_source
from quantforge.settings import Settings
from quantforge.verbs.job import Outcome
from quantforge.verbs.quantize import decoded_source, quantize_opened


def quantize_again(
    checkpoint: Checkpoint,
    wanted: Recipe,
    out: Path | None,
    settings: Settings,
    source: str | Path | None,
    *,
    requantize: bool,
) -> Outcome:
    """Quantize a quantized model again: from its source by the recorded recipe, or from its decoded weights.

    Raises:
        RefusedError: neither a source is named nor ``requantize`` said.
        UsageError: something that the recorded recipe says is asked for otherwise.
        QuantForgeError: as `recorded` and `quantize`.
    """
    if source is not None:
        original = open_model(resolve(str(source), settings.offline))
        if wanted.rules or wanted.ignore or wanted.scales == "reference":
            raise UsageError(
                f"--source: {checkpoint.path} is quantized again by the recipe that it was made with",
                "drop --scales, --rule and --ignore, or quantize the source itself: quantforge quantize SOURCE",
            )
        again = replace(
            recorded(checkpoint, original), format=wanted.format, type=wanted.type, pre=wanted.pre,
            bits=None, scheme=None, rules=(), head="keep", embedding=wanted.embedding, kv_cache="none",
            max_shard_bytes=wanted.max_shard_bytes,
        )  # fmt: skip
        check_given(again.calibration, settings)
        check_adapter_given(again.adapter, settings.adapter)
        return quantize_opened(original, again, out, settings)
    if not requantize:
        place = shlex.quote(str(checkpoint.path))
        raise RefusedError(
            f"{checkpoint.path}: already quantized; --type {wanted.type} would be a second quantization",
            f"`quantforge export {place} --type {wanted.type} --requantize` accepts the loss;"
            " --source MODEL, the model that it was made from, has none",
        )
    checkpoint, *events = decoded_source(checkpoint)
    return quantize_opened(checkpoint, wanted, out, settings, *events)


def recorded(quantized: Checkpoint, original: Checkpoint) -> Recipe:
    """Return the recipe by which a model was made, out of its manifest.

    Raises:
        InputError: the manifest is missing or holds no recipe.
        IntegrityError: ``original`` is not the model that it was made from.
    """
    document = manifest.with_recipe(
        quantized.path, "quantize the source itself: quantforge quantize SOURCE --format ..."
    )
    check_same(document.get("source", {}).get("files", {}), original)
    return from_toml(document["recipe"], str(manifest.place_of(quantized.path)))


def check_same(stated: dict[str, Any], original: Checkpoint) -> None:
    """Refuse a model whose configuration or weights are not those that a manifest states.

    Of a source that is a GGUF file, the manifest states nothing else, and its name does not matter.

    Raises:
        IntegrityError: naming the files.
    """
    found = files_of_source(original)
    weights = [name for name in stated if name.endswith(".safetensors") or name == CONFIG]
    weights = weights or list(stated)
    if original.path.is_file():
        differ = sorted(name for name in weights if stated[name] not in found.values())
    else:
        differ = sorted(name for name in weights if found.get(name) != stated[name])
    if differ or not weights:
        raise IntegrityError(
            f"{original.path}: not the model that this one was made from: {', '.join(differ) or 'no files recorded'}",
            "give the right --source, or quantize it anew: quantforge quantize SOURCE --format ...",
        )
