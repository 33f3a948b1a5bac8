"""The verbs: what the command line calls, and what a program may call instead.

Everything that can be refused is refused before torch is imported and before a byte is written; whatever fails later
leaves the output as it was, and beside it either a run that the same command goes on with, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.files import changed
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.publish import Stage
from quantforge.checkpoint.publish_file import FileStage
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.execution.resumption import done_tensors, fingerprint_of, workspace_of
from quantforge.formats.choice import settled
from quantforge.formats.decoded import decoded
from quantforge.formats.matching import settle_tied
from quantforge.formats.opening import open_model
from quantforge.formats.storage import storage_of
from quantforge.numerics.allocator import return_freed_memory
from quantforge.planning import naming
from quantforge.planning.citation import check_given, cited
from quantforge.planning.planner import Planned, make_plan
from quantforge.plans import FilePlan, Plan
from quantforge.recipe import Recipe, to_toml
from quantforge.results import manifest
from quantforge.results.publish import names_of, publish, source_of, stage_side_files, taken
from quantforge.results.signing import check_key
from quantforge.results.source_files import small_files
from quantforge.settings import Settings, check_device, workers_of
from quantforge.verbs.exporting import DECODED, Conversion, Exported, plan_export
from quantforge.verbs.exporting import format_for as chosen_format
from quantforge.verbs.requantize import recorded

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.execution.calibration import Calibrated

SPARE_BYTES = 1 << 20  # for configuration, card, manifest and journal, beside weights and copies


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run made."""

    out: Path
    plan: Plan
    events: tuple[Event, ...]
    resumed: bool


def plan(
    model: str, recipe: Recipe, settings: Settings | None = None, out: Path | None = None
) -> Plan:
    """What `quantize` would do; nothing is written. Errors as `make_plan`."""
    recipe, settings = cited(recipe, settings or Settings())
    return _planned(open_model(resolve(model, settings.offline)), recipe, out, settings).plan


def _planned(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Planned:
    in_memory = settings.activations == "memory"
    return make_plan(recipe, checkpoint, out, in_memory=in_memory, workers=workers_of(settings))


def quantize(model: str, recipe: Recipe, out: Path | None, settings: Settings) -> Outcome:
    """Quantize a model into ``out``, or where `naming` says; run again after any interruption, it goes on.

    Raises:
        QuantForgeError: bad input, a refusal, a busy output, no space: ``out`` is then what it was before.
    """
    return _quantize(open_model(resolve(model, settings.offline)), recipe, out, settings)


def _quantize(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings, *events: Event
) -> Outcome:
    recipe, settings = cited(recipe, settings)
    before = small_files(checkpoint)
    planned = _planned(checkpoint, recipe, out, settings)
    recipe = planned.recipe
    known = (*events, *planned.plan.substitutions)
    planned = replace(planned, plan=replace(planned.plan, substitutions=known))
    settings.policy.check(known)
    stage = _stage(planned.plan, planned.files, out, settings, checkpoint.path)
    try:
        with stage:
            stage.check_space(_space(checkpoint, planned, recipe, settings))
            return _run(checkpoint, before, planned, recipe, stage, settings)
    except RefusedError:
        finished = _finished(checkpoint, planned, recipe, stage, settings)
        if finished is None:
            raise
        return finished


def format_for(model: str, engine: str, parallel: int, *, offline: bool = False) -> str | None:
    """The format in which an engine loads a quantized model; None for one that is not quantized.

    Raises:
        RefusedError: there is none.
    """
    checkpoint = open_model(resolve(model, offline))
    if not isinstance(checkpoint.config.get("quantization_config"), Mapping):
        return None
    return chosen_format(checkpoint, engine, parallel)


def export(
    model: str,
    recipe: Recipe,
    out: Path | None,
    settings: Settings,
    *,
    allow_inexact: bool = False,
    source: str | None = None,
    requantize: bool = False,
) -> Outcome | Exported:
    """Move a model into another format; one that is not quantized is rounded plainly into its grid.

    Args:
        model: what is exported.
        recipe: its format, and what else applies.
        out: the result; where `naming` says when left out.
        settings: how to run.
        allow_inexact: accept rounding.
        source: the model that a quantized one was made from, to be quantized again by the recorded recipe.
        requantize: quantize the decoded weights again, as an event.

    Raises:
        QuantForgeError: as `quantize`; in particular the target cannot hold the numbers (exactly).
    """
    recipe, settings = cited(recipe, settings)
    chosen, said = settled(recipe, out)
    checkpoint = open_model(resolve(model, settings.offline))
    quantized = isinstance(checkpoint.config.get("quantization_config"), Mapping)
    if not quantized and chosen.format != DECODED:
        return _quantize(checkpoint, recipe, out, settings)
    recipe = chosen
    if quantized and (source is not None or requantize or recipe.type is not None):
        return _again(checkpoint, recipe, out, settings, source, requantize=requantize)
    before = small_files(checkpoint)
    conversion = plan_export(checkpoint, recipe)
    plan = replace(conversion.plan, notes=(*said, *conversion.plan.notes))
    with _stage(plan, conversion.files, out, settings, checkpoint.path) as stage:
        stage.clear()
        stage.check_space(plan.output_bytes + _side_bytes(checkpoint))
        try:
            conversion.checkpoint, origin = taken(checkpoint, before)
            stage_side_files(stage, checkpoint, plan, origin)
            document = _exported(checkpoint, conversion, origin)
            verdict = conversion.settle(allow_inexact=allow_inexact)
            settings.policy.check(conversion.events)
            with WeightsWriter(stage.path, _placed(stage, conversion.files)) as writer:
                conversion.write(writer, allow_inexact=allow_inexact)
            document |= manifest.of_events(conversion.events)
            publish(stage, checkpoint, plan, conversion.files, document, settings=settings)
        except BaseException:  # an export is not resumed: it only copies
            stage.discard()
            raise
    return Exported(
        stage.out, conversion.source_key, plan.format, len(conversion.layers), verdict,
        plan.output_bytes, conversion.coverage, tuple(conversion.events), (*plan.notes, *plan.left_behind),
    )  # fmt: skip


def _again(
    checkpoint: Checkpoint,
    recipe: Recipe,
    out: Path | None,
    settings: Settings,
    source: str | None,
    *,
    requantize: bool,
) -> Outcome:
    """Quantize a quantized model again: from its source by the recorded recipe, or from its decoded weights."""
    if source is not None:
        original = open_model(resolve(source, settings.offline))
        again = recorded(checkpoint, original, recipe)
        check_given(again, settings)
        return _quantize(original, again, out, settings)
    if not requantize:
        raise RefusedError(
            f"{checkpoint.path}: already quantized; --type {recipe.type} would be a second quantization",
            "name what it was made from with --source MODEL, accept the loss with --requantize, or drop --type",
        )
    event = Event("requantized", str(checkpoint.path.name), "from decoded weights")
    return _quantize(decoded(checkpoint), recipe, out, settings, event)


def _stage(
    plan: Plan, files: Sequence[FilePlan], out: Path | None, settings: Settings, source: Path
) -> Stage:
    """The stage of a directory, or of a file; a key that cannot sign is refused before any work."""
    if settings.sign is not None:
        check_key(settings.sign)
    one_file = storage_of(plan.format).one_file
    if settings.modelfile and not one_file:
        raise UsageError(
            f"--modelfile: Ollama reads GGUF files, and {plan.format} is asked for",
            "--format gguf, or leave --modelfile out",
        )
    settings.announce(plan, out := out or naming.place(plan.name, source))
    if not one_file:
        return Stage(out, settings.overwrite, source)
    return FileStage(out, settings.overwrite, source, names=names_of(out, files, settings))


def _placed(stage: Stage, files: Sequence[FilePlan]) -> list[FilePlan]:
    return [replace(file, name=stage.place(file.name)) for file in files]


def _exported(
    checkpoint: Checkpoint, conversion: Conversion, source: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest of an export; what the source's own manifest says of its origin is passed on as it is."""
    document = manifest.manifest(conversion.plan, "", source, None, [], {})
    earlier = manifest.read(checkpoint.path) or {}
    passed_on = ("source", "method", "recipe", "calibration", "lineage")
    document["lineage"] = {key: earlier[key] for key in passed_on if key in earlier}
    return document


def _run(
    checkpoint: Checkpoint,
    before: Mapping[str, Any],
    planned: Planned,
    recipe: Recipe,
    stage: Stage,
    settings: Settings,
) -> Outcome:
    check_device(settings.device)
    import torch

    from quantforge.execution.execute import Run
    from quantforge.numerics.products import reproducible

    plan = planned.plan
    # The peak that the plan promises is of what is alive.
    return_freed_memory(plan.peak_memory_bytes)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    checkpoint, source = taken(checkpoint, before)
    planned = replace(planned, matched=settle_tied(planned.matched, checkpoint))
    with reproducible():
        calibrated = _calibrated(checkpoint, planned, recipe, settings)
    importance = _known(planned, settings)
    work = workspace_of(
        stage, fingerprint_of(recipe, source, calibrated, settings.device, settings.imatrix)
    )
    try:
        stage_side_files(stage, checkpoint, plan, source)
        files = _placed(stage, planned.files)
        with WeightsWriter(stage.path, files, done=done_tensors(plan, work.done)) as writer:
            run = Run(planned, checkpoint, recipe, writer, work, settings, importance)
            with reproducible():
                run.execute(calibrated.sample if calibrated else None)
        events = (*plan.substitutions, *(calibrated.events if calibrated else ()), *run.events())
        settings.policy.check(events)
        described = calibrated.describe() if calibrated else None
        document = manifest.manifest(
            plan, to_toml(recipe), source, described, events, run.figures()
        )
        publish(stage, checkpoint, plan, planned.files, document, settings=settings)
    except InputError:
        work.remove()  # the same input fails again, and mended it is another: nothing to go on with
        stage.discard()
        raise
    except BaseException:
        work.close()
        raise
    work.remove()
    return Outcome(stage.out, plan, events, work.resumed)


def make_imatrix(model: str, recipe: Recipe, out: Path, settings: Settings) -> None:
    """Observe the importance of columns on calibration text, and write it for llama.cpp's tools and for us.

    Raises:
        QuantForgeError: as `quantize`; a family that GGUF has no names for.
    """
    from quantforge.execution.importance import observe_importance
    from quantforge.formats.gguf.imatrix import write_imatrix
    from quantforge.numerics.products import reproducible

    checkpoint = open_model(resolve(model, settings.offline))
    recipe, settings = cited(recipe, settings)
    wanted = replace(recipe, method="rtn", scales="search")
    planned = make_plan(wanted, checkpoint)
    planned = replace(planned, matched=settle_tied(planned.matched, checkpoint))
    with reproducible():
        calibrated = _calibrated(checkpoint, planned, wanted, settings)
        assert calibrated is not None
        found = observe_importance(checkpoint, planned, wanted, calibrated.sample, settings.device)
    write_imatrix(out, found)


def _finished(
    checkpoint: Checkpoint, planned: Planned, recipe: Recipe, stage: Stage, settings: Settings
) -> Outcome | None:
    """The result of this same command if it is there already, because a kill came after it was published.

    Its journal still lies beside it then, and no stage any more.
    """
    from quantforge.execution.journal import recorded_fingerprint

    journal, document = stage.journal, manifest.read(stage.out)
    if settings.overwrite or stage.path.exists() or not journal.is_dir() or document is None:
        return None
    source = source_of(checkpoint)
    wanted = fingerprint_of(recipe, source, None, settings.device, settings.imatrix)
    found = {**recorded_fingerprint(journal), "calibration": ""}
    if (found, document.get("recipe"), document.get("source")) != (wanted, to_toml(recipe), source):
        return None
    events = tuple(Event(**event) for event in document.get("events", ()))
    settings.policy.check(events)
    stage.forget()
    return Outcome(stage.out, planned.plan, events, resumed=True)


def _known(planned: Planned, settings: Settings) -> dict[str, Tensor]:
    """Importance from a file, where one is named: from the bytes that the fingerprint is of."""
    if settings.imatrix is None:
        return {}
    from quantforge.execution.importance import known_importance

    before = manifest.sha256(settings.imatrix, None)
    known = known_importance(settings.imatrix, planned)
    if manifest.sha256(settings.imatrix, None) != before:
        raise changed(settings.imatrix)
    return known


def _calibrated(
    checkpoint: Checkpoint, planned: Planned, recipe: Recipe, settings: Settings
) -> Calibrated | None:
    if not planned.plan.options["needs"]:
        return None
    from quantforge.execution.calibration import calibrate
    from quantforge.execution.self_calibration import own_rows

    found = calibrate(
        checkpoint.path, recipe.calibration, planned.plan, settings.calibration,
        offline=settings.offline, own_rows=own_rows(checkpoint.path, recipe.calibration, settings.device),
    )  # fmt: skip
    settings.policy.check([*planned.plan.substitutions, *found.events])
    return found


def _space(checkpoint: Checkpoint, planned: Planned, recipe: Recipe, settings: Settings) -> int:
    """Bytes beside the output at the fullest moment."""
    dimensions = planned.matched.dimensions
    states = 0
    if settings.activations == "disk" and planned.plan.options["needs"] and dimensions:
        states = 4 * recipe.calibration.samples * recipe.calibration.length * dimensions.hidden
    return planned.plan.output_bytes + _side_bytes(checkpoint) + states


def _side_bytes(checkpoint: Checkpoint) -> int:
    return SPARE_BYTES + sum(path.stat().st_size for path in checkpoint.side_files)
