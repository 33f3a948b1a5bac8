"""Export: a model in another format, as a proven re-layout or a refusal; what is not quantized is rounded plainly."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from quantforge.architectures.draft_kinds import is_draft
from quantforge.arguments import check_arguments
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import RefusedError, UsageError
from quantforge.execution.progress import followed
from quantforge.execution.relayout import lossless_type
from quantforge.formats import GGUF
from quantforge.formats.format_choice import settled
from quantforge.formats.opening import open_model
from quantforge.formats.sources.low_precision import plain_source, readable
from quantforge.planning.cited_files import cited
from quantforge.planning.conversion import DECODED, plan_export
from quantforge.planning.recipe_options import (
    ExportOptions,
    RecipeOptions,
    RecipeSource,
    build_recipe,
)
from quantforge.quantizers import PLAIN
from quantforge.results.manifest import small_files
from quantforge.settings import Settings, check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.export_recipe import export_recipe
from quantforge.verbs.imatrix import with_importance
from quantforge.verbs.job import Outcome
from quantforge.verbs.move_codes import Exported, move
from quantforge.verbs.quantize import quantize_opened
from quantforge.verbs.requantize import quantize_again

_SMALLER = "--type F16 or --type BF16 rounds them, in half the bytes"


@check_arguments(RecipeOptions)
@torch_defaults()
def export(
    model: str | Path,
    recipe: RecipeSource = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    allow_inexact: bool = False,
    source: str | Path | None = None,
    requantize: bool = False,
    imatrix: str | Path | None = None,
    **options: Unpack[ExportOptions],
) -> Outcome | Exported:
    """Move a model into another format (`Exported`), or round one that is not quantized plainly into it (`Outcome`).

    Args:
        model: a directory, a GGUF file, or ``org/name[@revision]``.
        recipe: its format, and what else applies; by `export_recipe` when left out.
        out: the result; where `naming` says when left out.
        settings: how to run.
        allow_inexact: accept rounding.
        source: the model that a quantized one was made from, to be quantized again by the recorded recipe.
        requantize: quantize the decoded weights again, as an event.
        imatrix: importance of columns, made there first where it is missing.
        options: choices of a recipe, see `ExportOptions`.

    Raises:
        QuantForgeError: as `quantize`; in particular the target cannot hold the numbers (exactly).
    """
    settings, place = settings or Settings(), Path(out) if out else None
    with followed(settings.progress):
        if recipe is None:
            wanted = export_recipe(model, place, offline=settings.offline, **options)
        else:
            wanted = build_recipe(recipe, **options)
            wanted = replace(wanted, method=wanted.method or PLAIN)
        wanted, settings = cited(*with_importance(model, wanted, settings, imatrix))
        chosen, said = settled(wanted, place)
        checkpoint = open_model(resolve(str(model), settings.offline))
        quantized = isinstance(checkpoint.config.get("quantization_config"), Mapping)
        mixture = chosen.type is not None and source is None
        if _as_source(checkpoint, chosen.format, quantized=quantized, mixture=mixture):
            if chosen.format == DECODED and chosen.type is not None:
                first = (
                    f"quantforge export {shlex.quote(str(checkpoint.path))} --format plain -o DIR"
                )
                raise RefusedError(
                    f"--type {chosen.type}: {checkpoint.path} is decoded into its own type first",
                    f"`{first}`, then --type on DIR",
                )
            with _goes_on():
                return quantize_opened(checkpoint, wanted, place, settings)
        if settings.adapter is not None and source is None and not requantize:
            raise UsageError(
                f"--adapter: {checkpoint.path} would only be moved, and nothing is merged into codes",
                "quantforge quantize MODEL --adapter DIR rounds the merged weights",
            )
        again = chosen.type is not None and chosen.format != DECODED
        if quantized and (source is not None or requantize or again):
            with _goes_on():
                return quantize_again(
                    checkpoint, chosen, place, settings, source, requantize=requantize
                )
        _check_moves(checkpoint, chosen.format)
        check_device(settings.device)  # though codes are moved on the processor
        before = small_files(checkpoint)
        planned = partial(plan_export, checkpoint, serving=settings.serving, mmproj=settings.mmproj)
        conversion = planned(chosen, first=said)
        if chosen.format == DECODED and chosen.type is None and not allow_inexact:
            kind, reason = lossless_type(conversion)  # by values, which headers do not tell
            if kind is not None:
                note = f"numbers are stored as {kind}, which loses nothing ({reason}); {_SMALLER}"
                conversion = planned(replace(chosen, type=kind), first=(*said, note))
        return move(conversion, before, place, settings, allow_inexact=allow_inexact)


def _check_moves(checkpoint: Checkpoint, key: str) -> None:
    """Refuse to copy a file into its own format: its name and its type would be told anew."""
    if key == GGUF and not checkpoint.path.is_dir():
        raise RefusedError(
            f"{checkpoint.path}: is a file of that format already, with the types that it has",
            "use it as it is; to round it again:"
            f" `quantforge export {shlex.quote(str(checkpoint.path))} --type Q4_K_M --requantize`",
        )


@contextmanager
def _goes_on() -> Iterator[None]:
    """Note on what stops a run that rounds, other than one that only moves codes, that it is gone on with."""
    try:
        yield
    except BaseException as stop:
        if not isinstance(stop, Exception):
            stop.add_note("the same command again goes on behind what it had finished")
        raise


def _as_source(checkpoint: Checkpoint, key: str, *, quantized: bool, mixture: bool) -> bool:
    """Return whether a model is what a run begins with, not a result to be moved into the format ``key``.

    ``mixture``: its weights get the types of one, and nothing better is given that they were made from.
    """
    if key == DECODED:
        return (
            not is_draft(checkpoint.config) and readable(checkpoint) is not checkpoint
        )  # no format has its layout
    return not quantized or (mixture and plain_source(checkpoint) is not checkpoint)
