"""``export``: convert a model into another format, exactly or not at all; round one that is not quantized.

`export` decides what is done. `export_recipe` builds the recipe if only options are given. `_quantize_again` rounds a
quantized model again, from its source or from its decoded weights. `_move_codes` repacks the codes unchanged: it plans
the conversion, writes it and publishes it. An interrupted conversion starts again, since it only copies; a run that
rounds is resumed. `docs/design.md` lists the functions from a command to the bytes of a GGUF file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from quantforge.api.imatrix import add_importance_file
from quantforge.api.job import Outcome
from quantforge.api.output import files_in_stage, side_file_bytes, stage_for
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
from quantforge.execution.run_conversion import (
    CheckedValues,
    check_values,
    lossless_dtype,
    round_unquantized,
    write_tensors,
)
from quantforge.files.hub import resolve_model
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
from quantforge.progress import phase, report_to
from quantforge.quantizers import RTN
from quantforge.recipe import NO_DATA, Recipe, from_toml
from quantforge.settings import Settings, check_device, rounding_workers

_HALF_SIZE_HINT = "--type F16 or --type BF16 rounds them, in half the bytes"


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export that converted a quantized model.

    Attributes:
        out: the directory or file.
        source_format, format: keys of the two formats.
        layers: number of quantized layers that were converted.
        verdict: how exact the conversion is.
        output_bytes: size of the weight files.
        coverage: fraction of the weights in blocks that is quantized; None if the result is not quantized.
        events: degradations.
        notes: remarks for the user.
        name: name of the result according to the plan.
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
        fields = asdict(self)
        del fields["coverage"], fields["name"], fields["out"]
        return {
            **fields,
            "path": str(self.out),
            "quantized_share_in_blocks": self.coverage.share if self.coverage else 0.0,
            "unquantized_in_blocks": dict(self.coverage.kept) if self.coverage else {},
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
    """Convert a quantized model into another format (`Exported`), or round an unquantized one into it (`Outcome`).

    Args:
        model: a directory, a GGUF file, or ``org/name[@revision]``.
        recipe: the format and all other choices; built by `export_recipe` when left out.
        out: path of the result; the default of `naming` when left out.
        settings: how to run.
        allow_inexact: accept rounding.
        source: the model that a quantized one was made from, to quantize it again with the recorded recipe.
        requantize: quantize the decoded weights again, which is recorded as an event.
        imatrix: importance matrix file; it is made first if it is missing.
        options: choices of a recipe, see `ExportOptions`.

    Raises:
        QuantForgeError: as `quantize`; in particular if the format cannot represent the numbers (exactly).
    """
    settings, out_path = settings or Settings(), Path(out) if out else None
    with report_to(settings.progress):
        requested = _requested_recipe(model, recipe, out_path, offline=settings.offline, **options)
        if imatrix is not None:
            requested, settings = add_importance_file(model, requested, settings, imatrix)
        requested, settings = strip_local_paths(requested, settings)
        format_recipe, notes = choose_format(requested, out_path)
        checkpoint = open_model(resolve_model(str(model), settings.offline))
        mixture = format_recipe.type is not None and source is None
        if _needs_quantization_run(checkpoint, format_recipe.format, typed=mixture):
            _refuse_type_of_decoded(checkpoint, format_recipe)
            with _note_resumable():
                return quantize_opened(checkpoint, requested, out_path, settings)
        if settings.adapter is not None and source is None and not requantize:
            raise UsageError(
                f"--adapter: {checkpoint.path} would only be moved, and nothing is merged into codes",
                "quantforge quantize MODEL --adapter DIR rounds the merged weights",
            )
        has_type = format_recipe.type is not None and format_recipe.format != PLAIN
        if _is_quantized(checkpoint) and (source is not None or requantize or has_type):
            with _note_resumable():
                return _quantize_again(
                    checkpoint, format_recipe, out_path, settings, source, requantize=requantize
                )
        return _move_codes(
            checkpoint, format_recipe, notes, out_path, settings, allow_inexact=allow_inexact
        )


def _requested_recipe(
    model: str | Path,
    recipe: RecipeSource,
    out: Path | None,
    *,
    offline: bool,
    **options: Unpack[ExportOptions],
) -> Recipe:
    """Return the requested recipe: ``recipe`` overridden by the options, or a new one from the options alone."""
    if recipe is None:
        return export_recipe(model, out, offline=offline, **options)
    requested = build_recipe(recipe, **options)
    return replace(requested, method=requested.method or RTN)


def _is_quantized(checkpoint: Checkpoint) -> bool:
    """Return whether a model is stored quantized, including models published in low precision."""
    return isinstance(checkpoint.config.get("quantization_config"), Mapping)


def _needs_quantization_run(checkpoint: Checkpoint, target_format: str, *, typed: bool) -> bool:
    """Return whether a model has to be quantized for ``target_format``, rather than only converted.

    ``typed``: a type (such as ``Q4_K_M``) is requested, and no source of the model is given.
    """
    if target_format == PLAIN:  # a source in a layout that no output format has
        return (
            not is_draft(checkpoint.config) and decode_if_unsupported(checkpoint) is not checkpoint
        )
    if not _is_quantized(checkpoint):
        return True
    return typed and decode_if_low_precision(checkpoint) is not checkpoint


def _refuse_type_of_decoded(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Raise `RefusedError` for a number type with a source in low precision, which is decoded to its own type."""
    if recipe.format == PLAIN and recipe.type is not None:
        first = f"quantforge export {shlex.quote(str(checkpoint.path))} --format plain -o DIR"
        raise RefusedError(
            f"--type {recipe.type}: {checkpoint.path} is decoded into its own type first",
            f"`{first}`, then --type on DIR",
        )


@contextmanager
def _note_resumable() -> Iterator[None]:
    """Add a note to a signal that interrupts the body: the same command resumes the run."""
    try:
        yield
    except BaseException as stop:
        if not isinstance(stop, Exception):
            stop.add_note("the same command again goes on behind what it had finished")
        raise


def export_recipe(
    model: str | Path, out: Path | None, *, offline: bool, **options: Unpack[ExportOptions]
) -> Recipe:
    """Return the recipe of an export into ``out``: round-to-nearest in the requested format.

    The file name or the engine may imply the format. GGUF files are made without calibration unless it is requested.

    Raises:
        UsageError: the format is not given or implied, an option does not apply to exports, or options contradict.
        RefusedError: the engine cannot load the numbers of the model in any format.
    """
    for name in sorted(options.keys() - ExportOptions.__annotations__.keys()):
        raise UsageError(
            f"export: no option '{name}'", "quantize the model itself, or give a recipe"
        )
    format_key = options.get("format") or format_from_filename(out) or None
    engine, type_name = options.get("engine"), options.get("type")
    choices = (format_key, engine, type_name, options.get("pre_tokenizer"), options.get("scheme"))
    if all(value is None for value in choices):
        raise UsageError(
            "--format is missing, or --for, or a name that ends in .gguf",
            "`quantforge formats` lists them",
        )
    if format_key is None and engine is not None and type_name is None:
        format_key = find_loadable_format(
            model, engine, options.get("tensor_parallel") or 1, offline=offline
        )
    recipe = build_recipe(None, **{**options, "method": RTN, "format": format_key})
    if choose_format(recipe, out)[0].format == GGUF and options.get("calibration") is None:
        return replace(recipe, calibration=replace(recipe.calibration, source=NO_DATA))
    return recipe


def find_loadable_format(
    model: str | Path, engine: str, parallel: int, *, offline: bool = False
) -> str | None:
    """Return the best format in which an engine loads a quantized model; None for an unquantized one.

    The model's own format comes first, then exact ones, then those whose exactness depends on the values, then inexact
    ones. ``parallel`` is the number of devices that the model is split over.

    Raises:
        RefusedError: there is none; the message gives all reasons.
    """
    checkpoint = open_model(resolve_model(str(model), offline))
    if not _is_quantized(checkpoint):
        return None
    source = detect_format(checkpoint.config).KEY
    formats = dict.fromkeys((source, *preferred_formats(engine), *FORMATS))
    ranked_formats: list[tuple[int, str]] = []
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
        verdicts = {layer.fit.verdict for layer in plan.layers.values()}
        rank = 2 if Verdict.INEXACT in verdicts else int(Verdict.DEPENDS_ON_VALUES in verdicts)
        ranked_formats.append((0 if key == source else rank, key))
    if not ranked_formats:
        raise RefusedError(
            f"{engine} loads these numbers in no format: {'; '.join(reasons)}",
            f"quantize the original model with --for {engine}",
        )
    return min(ranked_formats, key=lambda item: item[0])[1]


def _quantize_again(
    checkpoint: Checkpoint,
    recipe: Recipe,
    out: Path | None,
    settings: Settings,
    source: str | Path | None,
    *,
    requantize: bool,
) -> Outcome:
    """Quantize a quantized model again: from its source by the recorded recipe, or from its decoded weights.

    Raises:
        RefusedError: there is neither a source nor ``requantize``.
        UsageError: a choice contradicts the recorded recipe.
        QuantForgeError: as `_recorded_recipe` and `quantize`.
    """
    if source is not None:
        original = open_model(resolve_model(str(source), settings.offline))
        if recipe.rules or recipe.ignore or recipe.scales == "reference":
            raise UsageError(
                f"--source: {checkpoint.path} is quantized again by the recipe that it was made with",
                "drop --scales, --rule and --ignore, or quantize the source itself: quantforge quantize SOURCE",
            )
        recorded = replace(
            _recorded_recipe(checkpoint, original),
            format=recipe.format,
            type=recipe.type,
            pre_tokenizer=recipe.pre_tokenizer,
            bits=None,
            scheme=None,
            rules=(),
            lm_head="keep",
            embedding=recipe.embedding,
            kv_cache="none",
            max_shard_bytes=recipe.max_shard_bytes,
        )
        check_calibration_given(recorded.calibration, settings)
        check_adapter_given(recorded.adapter, settings.adapter)
        return quantize_opened(original, recorded, out, settings)
    if not requantize:
        quoted_path = shlex.quote(str(checkpoint.path))
        raise RefusedError(
            f"{checkpoint.path}: already quantized; --type {recipe.type} would be a second quantization",
            f"`quantforge export {quoted_path} --type {recipe.type} --requantize` accepts the loss;"
            " --source MODEL, the model that it was made from, has none",
        )
    checkpoint, *events = decoded_source(checkpoint)
    return quantize_opened(checkpoint, recipe, out, settings, *events)


def _recorded_recipe(quantized: Checkpoint, original: Checkpoint) -> Recipe:
    """Return the recipe that a model was made with, from its manifest.

    Raises:
        InputError: the manifest is missing or holds no recipe.
        IntegrityError: ``original`` is not the model that it was made from.
    """
    document = manifest.read_with_recipe(
        quantized.path, "quantize the source itself: quantforge quantize SOURCE --format ..."
    )
    check_same_source(document.get("source", {}).get("files", {}), original)
    return from_toml(document["recipe"], str(manifest.manifest_path(quantized.path)))


def _move_codes(
    checkpoint: Checkpoint,
    recipe: Recipe,
    notes: tuple[str, ...],
    out: Path | None,
    settings: Settings,
    *,
    allow_inexact: bool,
) -> Exported:
    """Move the codes of a quantized model into another format, and publish the result.

    Args:
        checkpoint: the model.
        recipe: the format and all other choices.
        notes: remarks on the choice of the format.
        out: path of the result; the default of `naming` when None.
        settings: how to run.
        allow_inexact: accept rounding.
    """
    if recipe.format == GGUF and checkpoint.path.is_file():
        raise RefusedError(
            f"{checkpoint.path}: is a file of that format already, with the types that it has",
            "use it as it is; to round it again:"
            f" `quantforge export {shlex.quote(str(checkpoint.path))} --type Q4_K_M --requantize`",
        )
    check_device(settings.device)  # checked although codes are converted on the CPU
    small_file_digests = digest_small_files(checkpoint)
    plan_conversion = partial(
        plan_export, checkpoint, serving=settings.serving, mmproj=settings.mmproj
    )
    conversion = plan_conversion(recipe, notes_before=notes)
    if recipe.format == PLAIN and recipe.type is None and not allow_inexact:
        dtype, reason = lossless_dtype(conversion)  # decided from values, not headers
        if dtype is not None:
            lossless_note = (
                f"numbers are stored as {dtype}, which loses nothing ({reason}); {_HALF_SIZE_HINT}"
            )
            conversion = plan_conversion(
                replace(recipe, type=dtype), notes_before=(*notes, lossless_note)
            )
    plan = conversion.plan
    stage = stage_for(plan, conversion.files, out, settings, checkpoint)
    stage.check()
    settings.announce(plan, stage.output_argument)
    with stage:
        stage.clear()
        stage.check_space(plan.output_bytes + side_file_bytes(checkpoint, settings))
        try:
            checked_values = _write_conversion(
                conversion, stage, small_file_digests, settings, allow_inexact=allow_inexact
            )
        except BaseException:
            stage.discard()
            raise
    return Exported(
        out=stage.out,
        source_format=conversion.source_format,
        format=plan.format,
        layers=len(conversion.layers),
        verdict=checked_values.verdict,
        output_bytes=plan.output_bytes,
        coverage=conversion.coverage,
        events=checked_values.events,
        notes=(*plan.notes, *plan.not_copied),
        name=plan.name,
    )


def _write_conversion(
    conversion: ExportPlan,
    stage: Stage,
    small_file_digests: Mapping[str, Any],
    settings: Settings,
    *,
    allow_inexact: bool,
) -> CheckedValues:
    """Check the values of a conversion, write its files into the stage, and publish them.

    ``small_file_digests`` are those of the source's small files when it was opened.

    Returns:
        The checked values, with events for tensors that were rounded.
    """
    checkpoint, plan = conversion.checkpoint, conversion.plan
    digested_source, origin = digest_source(checkpoint, small_file_digests, settings)
    conversion = replace(conversion, checkpoint=digested_source)
    with phase("reading", 0.4):
        if conversion.model_layout.stores_tied_head:
            drop_tied_copy(conversion.model_layout, digested_source)  # refuses two that differ
        checked_values = check_values(conversion, allow_inexact=allow_inexact)
        rounded_tensors = round_unquantized(conversion, rounding_workers(settings))
    checked_values = replace(
        checked_values, events=(*checked_values.events, *rounded_tensors.events)
    )
    settings.policy.check(checked_values.events)
    stage_side_files(stage, checkpoint, plan, origin, settings)
    with (
        phase("writing", 0.9),
        WeightsWriter(stage.path, files_in_stage(stage, conversion.files)) as writer,
    ):
        write_tensors(conversion, rounded_tensors.tensors, writer, allow_inexact=allow_inexact)
    # The lineage in the manifest of the source, as it was opened, is copied unchanged.
    document = {
        **manifest.build_manifest(plan, "", origin, None, [], rounded_tensors.figures),
        "lineage": manifest.lineage_fields(checkpoint.path),
        **manifest.event_fields(checked_values.events),
    }
    with phase("publishing", 1.0):
        publish(stage, checkpoint, plan, conversion.files, document, settings=settings)
    return checked_values
