"""Quantize: a plan carried out and published, or gone on with after any interruption.

Everything that can be refused is refused before torch is imported and before a byte is written; whatever fails later
leaves the output as it was, and beside it either a run that the same command goes on with, or nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from quantforge.api.allocate import sized_recipe
from quantforge.api.completed_result import earlier_outcome, forget
from quantforge.api.imatrix import with_importance
from quantforge.api.job import Job, Outcome, plan_job
from quantforge.api.output import placed_in, space
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.artifacts import manifest
from quantforge.artifacts.publish import publish, stage_side_files
from quantforge.errors import DeniedError, InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.execution.claims import Claims
from quantforge.execution.journal import check_unshared_journal, finished_tensor_names, open_journal
from quantforge.execution.progress import phase, report_to
from quantforge.execution.units import check_shareable, claimable_units, list_units
from quantforge.files.hub import resolve
from quantforge.files.reader import Checkpoint
from quantforge.files.stage import Stage
from quantforge.files.writer import WeightsWriter
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.low_precision import (
    decode_if_low_precision,
    decode_quantized_source,
)
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.size_target import SizeRequest, size_request
from quantforge.recipe import Recipe
from quantforge.settings import Settings, under_torchrun

if TYPE_CHECKING:
    from quantforge.execution.execute import Run, RunInputs


@check_arguments(RecipeOptions)
@torch_defaults()
def quantize(
    model: str | Path,
    recipe: RecipeSource = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    imatrix: str | Path | None = None,
    requantize: bool = False,
    target: str | None = None,
    like: str | Path | None = None,
    candidates: str | Sequence[str] = (),
    **options: Unpack[RecipeOptions],
) -> Outcome:
    """Quantize a model; the same call again goes on after any interruption.

    Args:
        model: a directory, a GGUF file, or ``org/name[@revision]``.
        recipe: what is wanted: a recipe, its file, or the name of a built-in one.
        out: the result; where `naming` says when left out.
        settings: how to run.
        imatrix: importance of columns, made there first where it is missing.
        requantize: quantize the decoded weights of a quantized model again, as an event.
        target: a size that the result is to have, as of `allocate`, which is done first.
        like: likewise.
        candidates: likewise.
        options: choices that override the recipe, see `RecipeOptions`.

    Raises:
        QuantForgeError: bad input, a refusal, a busy output, no space: ``out`` is then what it was before.
    """
    settings, place = settings or Settings(), Path(out) if out else None
    if target is not None or like is not None or candidates:
        asked = size_request(target, like, candidates, recipe, options)
        return _quantize_to_size(model, asked, place, settings, imatrix, requantize=requantize)
    wanted = build_recipe(recipe, **options)
    with report_to(settings.progress):
        if imatrix is not None:
            wanted, settings = with_importance(model, wanted, settings, imatrix)
        with phase("planning", 0.01, "headers of the model"):
            checkpoint = open_model(resolve(str(model), settings.offline))
        if not is_quantized(checkpoint):
            return quantize_opened(checkpoint, wanted, place, settings)
        if not requantize:
            typed = shlex.quote(str(checkpoint.path))
            raise InputError(
                f"{checkpoint.path}: already quantized; quantizing it again rounds rounded weights",
                f"`quantforge quantize {typed} --requantize`, with your other options, accepts the loss;"
                " the model that it was made from has none, and `quantforge export` moves it as it is",
            )
        checkpoint, event = decoded_source(checkpoint)
        return quantize_opened(checkpoint, wanted, place, settings, event)


def _quantize_to_size(
    model: str | Path,
    asked: SizeRequest,
    out: Path | None,
    settings: Settings,
    imatrix: str | Path | None,
    *,
    requantize: bool,
) -> Outcome:
    """Find the scheme of every linear with which the result has a given size, as `allocate`; quantize by these."""
    if imatrix is not None or settings.join or requantize:
        given = "--requantize" if requantize else f"--imatrix {imatrix}"
        raise UsageError(
            f"{'--join' if settings.join else given}: not while a mixture is looked for",
            "quantforge allocate first, then quantize --recipe with what it writes",
        )
    with report_to(settings.progress), sized_recipe(model, asked, out, settings) as (recipe, place):
        checkpoint = open_model(resolve(str(model), settings.offline))
        return quantize_opened(checkpoint, recipe, place, settings)


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Return whether a model is a result of quantization, not one that is published in low precision."""
    found = checkpoint.config.get("quantization_config")
    return isinstance(found, Mapping) and decode_if_low_precision(checkpoint) is checkpoint


def decoded_source(checkpoint: Checkpoint) -> tuple[Checkpoint, Event]:
    """Return a quantized model as its decoded weights, and the event for quantizing them again."""
    event = Event("requantized", str(checkpoint.path.name), "from decoded weights")
    return decode_quantized_source(checkpoint), event


def quantize_opened(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings, *events: Event
) -> Outcome:
    """Plan, check, round and publish an opened model; ``events`` are known already."""
    recipe, settings = strip_local_paths(recipe, settings)  # unchanged unless they name files
    job = plan_job(checkpoint, recipe, out, settings, *events)
    if settings.join:
        _check_shareable(job)
    outcome = earlier_outcome(job)
    if outcome is None:
        try:
            job.stage.check()
            job.check_text()
            settings.announce(job.planned.plan, job.stage.named)
            if settings.join:
                outcome = _join(job)
            else:
                with job.stage:
                    inputs = job.read()  # imports torch
                    from quantforge.execution.execute import execute

                    with published_run(job.stage, inputs) as run:
                        execute([run])
                    outcome = _outcome(job.stage, run)
        except RefusedError:  # the output exists: another process may have published meanwhile
            outcome = earlier_outcome(job)
            if outcome is None:
                raise
    return replace(outcome, adapter=settings.adapter)


@contextmanager
def published_run(stage: Stage, inputs: RunInputs) -> Iterator[Run]:
    """Open the files and the journal of a run, which the body executes; then publish its result.

    The caller holds the lock of the stage. After an error the journal stays, so that the same command resumes the run,
    unless the error is one of the input.
    """
    from quantforge.execution.execute import Run
    from quantforge.execution.shared_run import finished_units

    checkpoint, planned, settings = inputs.checkpoint, inputs.planned, inputs.settings
    plan, source = planned.plan, inputs.source
    units = list_units(plan, planned.model_layout.blocks)
    claims = Claims(stage.units, [unit.name for unit in claimable_units(units)])
    journal = open_journal(stage, claims, inputs.fingerprint, settings)
    try:
        stage_side_files(stage, checkpoint, plan, source, settings)
        files = placed_in(stage, planned.files)
        with WeightsWriter(
            stage.path, files, done=finished_tensor_names(plan, journal.done)
        ) as writer:
            run = Run(inputs, writer, journal, finished_units(claims, units))
            yield run
        events = run.all_events()
        settings.policy.check(events)
        described = inputs.calibrated.describe() if inputs.calibrated else None
        recipe = planned.recipe.to_toml()
        document = manifest.build_manifest(plan, recipe, source, described, events, run.figures())
        with phase("publishing", 1.0):
            publish(stage, checkpoint, plan, planned.files, document, settings=settings)
    except DeniedError:
        journal.close()
        raise
    except InputError:
        journal.remove()  # the same input fails again, and mended it is another: nothing to resume
        stage.discard()
        claims.remove()
        raise
    except BaseException:
        journal.close()
        raise
    claims.remove()
    journal.remove()  # the last: by the journal the next command knows that this one had ended


def _outcome(stage: Stage, run: Run) -> Outcome:
    """Return the outcome of a run that was published."""
    plan, resumed = run.inputs.planned.plan, run.journal.resumed
    return Outcome(stage.out, plan, run.all_events(), resumed, run.scaled_activations())


def _check_shareable(job: Job) -> None:
    """Refuse a run that several processes cannot share; errors as `check_shareable`."""
    planned, family = job.planned, job.planned.model_layout.architecture
    check_shareable(
        planned.plan,
        overwrite=job.settings.overwrite,
        prunes_experts=planned.recipe.prune_experts is not None,
        torchrun=under_torchrun(),
        replayed=family is not None and bool(family.replayed),
    )


def _join(job: Job) -> Outcome:
    """Do units that several processes share; then publish, or wait for the process that does."""
    from quantforge.execution.execute import execute
    from quantforge.execution.shared_run import Worker, run_locked, units_finished_before_sharing
    from quantforge.numerics.threads import reproducible

    stage, settings, planned = job.stage, job.settings, job.planned
    units = claimable_units(list_units(planned.plan, planned.model_layout.blocks))
    claims = Claims(stage.units, [unit.name for unit in units])
    waiting = replace(settings, activations="disk")  # ranks hand on hidden states in files
    needed = planned.plan.output_bytes + space(job.checkpoint, planned, waiting)
    note = settings.note
    run_locked(stage, lambda: stage.check_space(needed), note, skip_if=lambda: claims.exists)
    inputs = job.read_inputs()
    if inputs.sample is not None and inputs.sample.images is not None:
        raise UsageError(
            "a run that processes share (torchrun): rows with images pass a model in one process",
            "use one process, without torchrun",
        )

    def prepare() -> None:
        check_unshared_journal(stage, inputs.fingerprint)
        claims.prepare(inputs.fingerprint)

    run_locked(stage, prepare, note, skip_if=lambda: claims.exists)
    claims.check_fingerprint(inputs.fingerprint)
    if kept := units_finished_before_sharing(stage, units, inputs.fingerprint):
        note(f"{len(kept)} of {len(units)} parts are kept, which one process had finished")
    try:
        with reproducible():
            Worker(claims, units, inputs, kept).run_until_done()
    except DeniedError:
        raise
    except InputError:  # as in `published_run`
        forget(stage)
        raise

    def finish() -> Outcome:
        claims.check_exists()
        claims.check_fingerprint(inputs.fingerprint)
        with published_run(stage, inputs) as run:
            execute([run])
        return _outcome(stage, run)

    outcome = run_locked(stage, finish, note, wait_forever=bool(planned.plan.tune))
    assert outcome is not None
    return outcome
