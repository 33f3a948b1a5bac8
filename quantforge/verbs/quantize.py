"""Quantize: a plan carried out and published, or gone on with after any interruption.

Everything that can be refused is refused before torch is imported and before a byte is written; whatever fails later
leaves the output as it was, and beside it either a run that the same command goes on with, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.execution.claims import Claims
from quantforge.execution.resumption import done_tensors, fingerprint_of, workspace_of
from quantforge.execution.units import check_shareable, units_of
from quantforge.formats.matching import settle_tied
from quantforge.formats.opening import open_model
from quantforge.numerics.allocator import return_freed_memory
from quantforge.planning.cited_files import cited
from quantforge.planning.planner import Planned
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.plans import Plan
from quantforge.quantizers import prepared, source_transforms
from quantforge.recipe import Recipe
from quantforge.results import manifest
from quantforge.results.publish import publish, stage_side_files, taken
from quantforge.results.source_files import small_files
from quantforge.settings import Settings, check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.finished_result import events_of_finished, forget
from quantforge.verbs.imatrix import with_importance
from quantforge.verbs.output import placed_in, space, stage_for
from quantforge.verbs.plan import planned_of

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.execution.calibration import Calibrated


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run."""

    out: Path
    plan: Plan
    events: tuple[Event, ...]
    resumed: bool


@torch_defaults()
def quantize(
    model: str | Path,
    recipe: RecipeSource = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    imatrix: Path | None = None,
    **options: Unpack[RecipeOptions],
) -> Outcome:
    """Quantize a model; the same call again goes on after any interruption.

    Args:
        model: a directory, a GGUF file, or ``org/name[@revision]``.
        recipe: what is wanted: a recipe, its file, or the name of a built-in one.
        out: the result; where `naming` says when left out.
        settings: how to run.
        imatrix: importance of columns, made there first where it is missing.
        options: choices that override the recipe, see `RecipeOptions`.

    Raises:
        QuantForgeError: bad input, a refusal, a busy output, no space: ``out`` is then what it was before.
    """
    settings = settings or Settings()
    wanted = build_recipe(recipe, **options)
    wanted, settings = with_importance(model, wanted, settings, imatrix)
    checkpoint = open_model(resolve(str(model), settings.offline))
    return quantize_opened(checkpoint, wanted, Path(out) if out else None, settings)


def quantize_opened(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings, *events: Event
) -> Outcome:
    """Quantize an opened model; ``events`` are known already."""
    recipe, settings = cited(recipe, settings)
    checkpoint = prepared(checkpoint, source_transforms(recipe.method))
    before = small_files(checkpoint)
    planned = planned_of(checkpoint, recipe, out, settings)
    known = (*events, *planned.plan.substitutions)
    planned = replace(planned, plan=replace(planned.plan, substitutions=known))
    settings.policy.check(known)
    if settings.join:
        units = units_of(planned.plan, planned.matched.blocks)
        check_shareable(units, recipe.method, overwrite=settings.overwrite)
    stage = stage_for(planned.plan, planned.files, out, settings, checkpoint.path)
    made = events_of_finished(checkpoint, planned, stage, settings)
    if made is not None:
        return Outcome(stage.out, planned.plan, made, resumed=not settings.join)
    if not settings.join:
        with stage:
            stage.check_space(space(checkpoint, planned, settings))
            return _carry_out(_read(checkpoint, before, planned, settings), stage, settings)
    try:
        return _join(checkpoint, before, planned, stage, settings)
    except RefusedError:  # the output exists: another process may have published meanwhile
        made = events_of_finished(checkpoint, planned, stage, settings)
        if made is None:
            raise
        return Outcome(stage.out, planned.plan, made, resumed=False)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A run that can begin: everything that decides its bytes was read."""

    checkpoint: Checkpoint
    planned: Planned
    source: Mapping[str, Any]
    calibrated: Calibrated | None
    importance: Mapping[str, Tensor]
    fingerprint: Mapping[str, str]


def _read(
    checkpoint: Checkpoint, before: Mapping[str, Any], planned: Planned, settings: Settings
) -> _Prepared:
    """Read what decides the bytes of a run, but for the weights; ``before``: see `taken`."""
    check_device(settings.device)
    import torch

    from quantforge.execution.calibration import calibrated_for
    from quantforge.execution.importance import known_importance
    from quantforge.numerics.team import reproducible

    # The peak that the plan promises is of what is alive.
    return_freed_memory(planned.plan.peak_memory_bytes)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    checkpoint, source = taken(checkpoint, before)
    planned = replace(planned, matched=settle_tied(planned.matched, checkpoint))
    with reproducible():
        calibrated = calibrated_for(checkpoint, planned, settings)
    return _Prepared(
        checkpoint, planned, source, calibrated, known_importance(planned, settings),
        fingerprint_of(planned.recipe.to_toml(), source, calibrated, settings.device, settings.imatrix),
    )  # fmt: skip


def _carry_out(prepared: _Prepared, stage: Stage, settings: Settings) -> Outcome:
    """Do what is not done yet, and publish. The caller holds the lock of the output."""
    from quantforge.execution.execute import Run
    from quantforge.execution.sharing import finished_units
    from quantforge.numerics.team import reproducible

    checkpoint, planned, calibrated = prepared.checkpoint, prepared.planned, prepared.calibrated
    plan, source = planned.plan, prepared.source
    work = workspace_of(stage, prepared.fingerprint)
    units = units_of(plan, planned.matched.blocks)
    claims = Claims(stage.units, [unit.name for unit in units])
    try:
        claims.check(prepared.fingerprint)
        stage_side_files(stage, checkpoint, plan, source)
        files = placed_in(stage, planned.files)
        with WeightsWriter(stage.path, files, done=done_tensors(plan, work.done)) as writer:
            run = Run(
                planned, checkpoint, writer, work, settings, prepared.importance,
                finished_units(claims, units),
            )  # fmt: skip
            with reproducible():
                run.execute(calibrated.sample if calibrated else None)
        events = (*plan.substitutions, *(calibrated.events if calibrated else ()), *run.events())
        settings.policy.check(events)
        described = calibrated.describe() if calibrated else None
        recipe = planned.recipe.to_toml()
        document = manifest.manifest(plan, recipe, source, described, events, run.figures())
        publish(stage, checkpoint, plan, planned.files, document, settings=settings)
    except InputError:
        work.remove()  # the same input fails again, and mended it is another: nothing to go on with
        stage.discard()
        claims.remove()
        raise
    except BaseException:
        work.close()
        raise
    claims.remove()
    work.remove()  # the last: by the journal the next command knows that this one had ended
    return Outcome(stage.out, plan, events, work.resumed)


def _join(
    checkpoint: Checkpoint,
    before: Mapping[str, Any],
    planned: Planned,
    stage: Stage,
    settings: Settings,
) -> Outcome:
    """Do units that several processes share; then publish, or wait for the process that does."""
    from quantforge.execution.sharing import locked, work_off
    from quantforge.numerics.team import reproducible

    units = units_of(planned.plan, planned.matched.blocks)
    claims = Claims(stage.units, [unit.name for unit in units])
    needed = planned.plan.output_bytes + space(checkpoint, planned, settings)
    locked(stage, lambda: stage.check_space(needed), unless=lambda: claims.there)
    prepared = _read(checkpoint, before, planned, settings)
    locked(stage, lambda: claims.prepare(prepared.fingerprint), unless=lambda: claims.there)
    claims.check(prepared.fingerprint)
    try:
        with reproducible():
            work_off(
                claims, units, prepared.planned, prepared.checkpoint, settings, prepared.importance
            )
    except InputError:  # as in `_carry_out`
        forget(stage)
        raise

    def finish() -> Outcome:
        claims.check_there()
        claims.check(prepared.fingerprint)
        return _carry_out(prepared, stage, settings)

    outcome = locked(stage, finish)
    assert outcome is not None
    return outcome
