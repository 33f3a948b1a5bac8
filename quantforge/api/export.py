"""Export: a model in another format, as a proven re-layout or a refusal; what is not quantized is rounded plainly.

From top to bottom: `export` decides what is done; `export_recipe` is what is wanted where options alone say it;
`_quantize_again` rounds a quantized model anew, from its source or from its decoded weights; `_move` moves codes as
they are: it plans the conversion, carries it out and publishes it. An interrupted move starts anew, as it only copies;
whatever rounds is resumed. `docs/design.md` lists the functions from a command to the bytes of a GGUF file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from quantforge.api.imatrix import with_importance
from quantforge.api.job import Outcome
from quantforge.api.output import placed_in, side_bytes, stage_for
from quantforge.api.quantize import decoded_source, quantize_opened
from quantforge.api.torch_defaults import torch_defaults
from quantforge.architectures.draft_heads import is_draft
from quantforge.arguments import check_arguments
from quantforge.artifacts import manifest
from quantforge.artifacts.manifest import check_same_source, digest_small_files
from quantforge.artifacts.publish import digest_source, publish, stage_side_files
from quantforge.engines import preferred_formats
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.execution.progress import phase, report_to
from quantforge.execution.run_conversion import (
    CheckedValues,
    check_values,
    lossless_dtype,
    round_unquantized,
    write_tensors,
)
from quantforge.files.hub import resolve
from quantforge.files.reader import Checkpoint
from quantforge.files.stage import Stage
from quantforge.files.writer import WeightsWriter
from quantforge.formats import FORMATS, GGUF, PLAIN, Verdict, detect_format
from quantforge.formats.match_quantized import drop_tied_copy
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.low_precision import decode_if_low_precision, decode_if_unsupported
from quantforge.planning.conversion import ExportPlan, plan_export
from quantforge.planning.coverage import Coverage
from quantforge.planning.format_choice import choose_format, format_from_filename
from quantforge.planning.local_paths import (
    check_adapter_given,
    check_calibration_given,
    strip_local_paths,
)
from quantforge.planning.recipe_options import (
    ExportOptions,
    RecipeOptions,
    RecipeSource,
    build_recipe,
)
from quantforge.quantizers import RTN
from quantforge.recipe import NO_DATA, Recipe, from_toml
from quantforge.settings import Settings, check_device, rounding_workers

_SMALLER = "--type F16 or --type BF16 rounds them, in half the bytes"


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export that moved codes.

    Attributes:
        out: the directory or file.
        source_format, format: keys of the formats.
        layers: how many quantized layers were moved.
        verdict: how exactly.
        output_bytes: of the weight files.
        coverage: share of the weights in blocks that is quantized; None where nothing stays so.
        events: degradations.
        notes: what a person should know.
        name: that the plan gives it.
    """

    out: Path
    source_format: str
    format: str
    layers: int
    verdict: str
    output_bytes: int
    coverage: Coverage | None
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    name: str = ""

    def document(self) -> dict[str, object]:
        """Return the result as plain data."""
        found = asdict(self)
        del found["coverage"], found["name"]
        return {
            **found,
            "out": str(self.out),
            "block_share_quantized": self.coverage.share if self.coverage else 0.0,
            "kept_in_blocks": dict(self.coverage.kept) if self.coverage else {},
            "events": [event.to_json() for event in self.events],
        }


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
    with report_to(settings.progress):
        wanted = _wanted(model, recipe, place, offline=settings.offline, **options)
        if imatrix is not None:
            wanted, settings = with_importance(model, wanted, settings, imatrix)
        wanted, settings = strip_local_paths(wanted, settings)
        chosen, notes = choose_format(wanted, place)
        checkpoint = open_model(resolve(str(model), settings.offline))
        mixture = chosen.type is not None and source is None
        if _begins_a_run(checkpoint, chosen.format, mixture=mixture):
            _refuse_type_of_decoded(checkpoint, chosen)
            with _resumable():
                return quantize_opened(checkpoint, wanted, place, settings)
        if settings.adapter is not None and source is None and not requantize:
            raise UsageError(
                f"--adapter: {checkpoint.path} would only be moved, and nothing is merged into codes",
                "quantforge quantize MODEL --adapter DIR rounds the merged weights",
            )
        typed = chosen.type is not None and chosen.format != PLAIN
        if _is_quantized(checkpoint) and (source is not None or requantize or typed):
            with _resumable():
                return _quantize_again(
                    checkpoint, chosen, place, settings, source, requantize=requantize
                )
        return _move(checkpoint, chosen, notes, place, settings, allow_inexact=allow_inexact)


def _wanted(
    model: str | Path,
    recipe: RecipeSource,
    out: Path | None,
    *,
    offline: bool,
    **options: Unpack[ExportOptions],
) -> Recipe:
    """Return what is asked for: the given recipe with the options in it, else the options alone."""
    if recipe is None:
        return export_recipe(model, out, offline=offline, **options)
    wanted = build_recipe(recipe, **options)
    return replace(wanted, method=wanted.method or RTN)


def _is_quantized(checkpoint: Checkpoint) -> bool:
    """Return whether a model holds codes, published in low precision or not."""
    return isinstance(checkpoint.config.get("quantization_config"), Mapping)


def _begins_a_run(checkpoint: Checkpoint, key: str, *, mixture: bool) -> bool:
    """Return whether a model is what a run begins with, not a result to be moved into the format ``key``.

    ``mixture``: its weights get the types of one, and nothing better is given that they were made from.
    """
    if key == PLAIN:  # a source in a layout that no format has
        return (
            not is_draft(checkpoint.config) and decode_if_unsupported(checkpoint) is not checkpoint
        )
    if not _is_quantized(checkpoint):
        return True
    return mixture and decode_if_low_precision(checkpoint) is not checkpoint


def _refuse_type_of_decoded(checkpoint: Checkpoint, wanted: Recipe) -> None:
    """Refuse a type of numbers for a source in low precision, which is decoded into its own type."""
    if wanted.format == PLAIN and wanted.type is not None:
        first = f"quantforge export {shlex.quote(str(checkpoint.path))} --format plain -o DIR"
        raise RefusedError(
            f"--type {wanted.type}: {checkpoint.path} is decoded into its own type first",
            f"`{first}`, then --type on DIR",
        )


@contextmanager
def _resumable() -> Iterator[None]:
    """Note on what stops a run that rounds, other than one that only moves codes, that it can be resumed."""
    try:
        yield
    except BaseException as stop:
        if not isinstance(stop, Exception):
            stop.add_note("the same command again goes on behind what it had finished")
        raise


def export_recipe(
    model: str | Path, out: Path | None, *, offline: bool, **options: Unpack[ExportOptions]
) -> Recipe:
    """Return the recipe of an export into ``out``: plain rounding, in the format that is asked for.

    A name or an engine may say which format that is. A GGUF file is made without calibration unless it is asked for.

    Raises:
        UsageError: nothing says which format, a choice is none of an export, or choices contradict each other.
        RefusedError: the engine loads the numbers of the model in no format.
    """
    for name in sorted(options.keys() - ExportOptions.__annotations__.keys()):
        raise UsageError(
            f"export: no option '{name}'", "quantize the model itself, or give a recipe"
        )
    form = options.get("format") or format_from_filename(out) or None
    engine, kind = options.get("engine"), options.get("type")
    stated = (form, engine, kind, options.get("pre"), options.get("scheme"))
    if all(value is None for value in stated):
        raise UsageError(
            "--format is missing, or --for, or a name that ends in .gguf",
            "`quantforge formats` lists them",
        )
    if form is None and engine is not None and kind is None:
        form = loaded_format(model, engine, options.get("tensor_parallel") or 1, offline=offline)
    recipe = build_recipe(None, **{**options, "method": RTN, "format": form})
    if choose_format(recipe, out)[0].format == GGUF and options.get("calibration") is None:
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
    if not _is_quantized(checkpoint):
        return None
    source = detect_format(checkpoint.config).KEY
    formats = dict.fromkeys((source, *preferred_formats(engine), *FORMATS))
    found: list[tuple[int, str]] = []
    reasons = []
    for key in formats:
        if key == PLAIN:
            continue
        try:
            plan = plan_export(
                checkpoint, Recipe(format=key, engine=engine, tensor_parallel=parallel)
            )
        except (RefusedError, InputError, UsageError) as error:
            reasons.append(f"{key}: {error.message}")
            continue
        fits = {layer.fit.verdict for layer in plan.layers.values()}
        rank = 2 if Verdict.INEXACT in fits else int(Verdict.DEPENDS_ON_VALUES in fits)
        found.append((0 if key == source else rank, key))
    if not found:
        raise RefusedError(
            f"{engine} loads these numbers in no format: {'; '.join(reasons)}",
            f"quantize the original model with --for {engine}",
        )
    return min(found, key=lambda item: item[0])[1]


def _quantize_again(
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
        QuantForgeError: as `_recorded` and `quantize`.
    """
    if source is not None:
        original = open_model(resolve(str(source), settings.offline))
        if wanted.rules or wanted.ignore or wanted.scales == "reference":
            raise UsageError(
                f"--source: {checkpoint.path} is quantized again by the recipe that it was made with",
                "drop --scales, --rule and --ignore, or quantize the source itself: quantforge quantize SOURCE",
            )
        again = replace(
            _recorded(checkpoint, original),
            format=wanted.format,
            type=wanted.type,
            pre=wanted.pre,
            bits=None,
            scheme=None,
            rules=(),
            head="keep",
            embedding=wanted.embedding,
            kv_cache="none",
            max_shard_bytes=wanted.max_shard_bytes,
        )
        check_calibration_given(again.calibration, settings)
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


def _recorded(quantized: Checkpoint, original: Checkpoint) -> Recipe:
    """Return the recipe by which a model was made, out of its manifest.

    Raises:
        InputError: the manifest is missing or holds no recipe.
        IntegrityError: ``original`` is not the model that it was made from.
    """
    document = manifest.read_with_recipe(
        quantized.path, "quantize the source itself: quantforge quantize SOURCE --format ..."
    )
    check_same_source(document.get("source", {}).get("files", {}), original)
    return from_toml(document["recipe"], str(manifest.manifest_path(quantized.path)))


def _move(
    checkpoint: Checkpoint,
    wanted: Recipe,
    notes: tuple[str, ...],
    out: Path | None,
    settings: Settings,
    *,
    allow_inexact: bool,
) -> Exported:
    """Move the codes of a quantized model into another format, and publish the result.

    Args:
        checkpoint: the model.
        wanted: the format, and what else applies.
        notes: on the choice of the format.
        out: the result; where `naming` says when left out.
        settings: how to run.
        allow_inexact: accept rounding.
    """
    if wanted.format == GGUF and checkpoint.path.is_file():
        raise RefusedError(
            f"{checkpoint.path}: is a file of that format already, with the types that it has",
            "use it as it is; to round it again:"
            f" `quantforge export {shlex.quote(str(checkpoint.path))} --type Q4_K_M --requantize`",
        )
    check_device(settings.device)  # though codes are moved on the processor
    before = digest_small_files(checkpoint)
    planned = partial(plan_export, checkpoint, serving=settings.serving, mmproj=settings.mmproj)
    conversion = planned(wanted, notes_before=notes)
    if wanted.format == PLAIN and wanted.type is None and not allow_inexact:
        kind, reason = lossless_dtype(conversion)  # by values, which headers do not tell
        if kind is not None:
            lossless = f"numbers are stored as {kind}, which loses nothing ({reason}); {_SMALLER}"
            conversion = planned(replace(wanted, type=kind), notes_before=(*notes, lossless))
    plan = conversion.plan
    stage = stage_for(plan, conversion.files, out, settings, checkpoint)
    stage.check()
    settings.announce(plan, stage.named)
    with stage:
        stage.clear()
        stage.check_space(plan.output_bytes + side_bytes(checkpoint, settings))
        try:
            checked = _carry_out(conversion, stage, before, settings, allow_inexact=allow_inexact)
        except BaseException:
            stage.discard()
            raise
    return Exported(
        out=stage.out,
        source_format=conversion.source_format,
        format=plan.format,
        layers=len(conversion.layers),
        verdict=checked.verdict,
        output_bytes=plan.output_bytes,
        coverage=conversion.coverage,
        events=checked.events,
        notes=(*plan.notes, *plan.left_behind),
        name=plan.name,
    )


def _carry_out(
    conversion: ExportPlan,
    stage: Stage,
    before: Mapping[str, Any],
    settings: Settings,
    *,
    allow_inexact: bool,
) -> CheckedValues:
    """Check a conversion by its values, write its files into the stage, and publish them.

    ``before`` are the digests of the source's small files when it was opened.

    Returns:
        What the values tell, with the events of what was rounded.
    """
    checkpoint, plan = conversion.checkpoint, conversion.plan
    digested, origin = digest_source(checkpoint, before, settings)
    conversion = replace(conversion, checkpoint=digested)
    with phase("reading", 0.4):
        if conversion.model_layout.tied_twice:
            drop_tied_copy(conversion.model_layout, digested)  # refuses two that differ
        checked = check_values(conversion, allow_inexact=allow_inexact)
        rounded = round_unquantized(conversion, rounding_workers(settings))
    checked = replace(checked, events=(*checked.events, *rounded.events))
    settings.policy.check(checked.events)
    stage_side_files(stage, checkpoint, plan, origin, settings)
    with (
        phase("writing", 0.9),
        WeightsWriter(stage.path, placed_in(stage, conversion.files)) as writer,
    ):
        write_tensors(conversion, rounded.tensors, writer, allow_inexact=allow_inexact)
    # What the manifest of the source, as it was opened, says of its origin is passed on as it is.
    document = {
        **manifest.build_manifest(plan, "", origin, None, [], rounded.figures),
        "lineage": manifest.lineage_fields(checkpoint.path),
        **manifest.event_fields(checked.events),
    }
    with phase("publishing", 1.0):
        publish(stage, checkpoint, plan, conversion.files, document, settings=settings)
    return checked
