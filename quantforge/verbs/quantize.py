"""Quantize: a plan carried out and published, or gone on with after any interruption.

Everything that can be refused is refused before torch is imported and before a byte is written; whatever fails later
leaves the output as it was, and beside it either a run that the same command goes on with, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.execution.resumption import done_tensors, fingerprint_of, workspace_of
from quantforge.formats.matching import settle_tied
from quantforge.formats.opening import open_model
from quantforge.numerics.allocator import return_freed_memory
from quantforge.planning.cited_files import cited
from quantforge.planning.planner import Planned
from quantforge.plans import Plan
from quantforge.recipe import Recipe, to_toml
from quantforge.results import manifest
from quantforge.results.publish import publish, source_of, stage_side_files, taken
from quantforge.results.source_files import small_files
from quantforge.settings import Settings, check_device
from quantforge.verbs.output import placed_in, space, stage_for
from quantforge.verbs.plan import planned_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run."""

    out: Path
    plan: Plan
    events: tuple[Event, ...]
    resumed: bool


def quantize(model: str, recipe: Recipe, out: Path | None, settings: Settings) -> Outcome:
    """Quantize a model into ``out``, or where `naming` says; run again after any interruption, it goes on.

    Raises:
        QuantForgeError: bad input, a refusal, a busy output, no space: ``out`` is then what it was before.
    """
    return quantize_opened(open_model(resolve(model, settings.offline)), recipe, out, settings)


def quantize_opened(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings, *events: Event
) -> Outcome:
    """Quantize an opened model; ``events`` are known already."""
    recipe, settings = cited(recipe, settings)
    before = small_files(checkpoint)
    planned = planned_of(checkpoint, recipe, out, settings)
    recipe = planned.recipe
    known = (*events, *planned.plan.substitutions)
    planned = replace(planned, plan=replace(planned.plan, substitutions=known))
    settings.policy.check(known)
    stage = stage_for(planned.plan, planned.files, out, settings, checkpoint.path)
    try:
        with stage:
            stage.check_space(space(checkpoint, planned, recipe, settings))
            return _run(checkpoint, before, planned, recipe, stage, settings)
    except RefusedError:
        finished = _finished(checkpoint, planned, recipe, stage, settings)
        if finished is None:
            raise
        return finished


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

    from quantforge.execution.calibration import calibrated_for
    from quantforge.execution.execute import Run
    from quantforge.execution.importance import known_importance
    from quantforge.numerics.team import reproducible

    plan = planned.plan
    # The peak that the plan promises is of what is alive.
    return_freed_memory(plan.peak_memory_bytes)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    checkpoint, source = taken(checkpoint, before)
    planned = replace(planned, matched=settle_tied(planned.matched, checkpoint))
    with reproducible():
        calibrated = calibrated_for(checkpoint, planned, recipe, settings)
    importance = known_importance(planned, settings)
    work = workspace_of(
        stage, fingerprint_of(recipe, source, calibrated, settings.device, settings.imatrix)
    )
    try:
        stage_side_files(stage, checkpoint, plan, source)
        files = placed_in(stage, planned.files)
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


def _finished(
    checkpoint: Checkpoint, planned: Planned, recipe: Recipe, stage: Stage, settings: Settings
) -> Outcome | None:
    """Return the result of this same command if it is there already, because a kill came after its publication.

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
