"""``quantize``: plan, round and publish a model; an interrupted run is resumed.

Whatever can be checked is checked before torch is imported and before anything is written. If the run fails later, the
output stays as it was, and next to it there is either an unfinished run that the same command resumes, or nothing.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from quantforge.api.allocate import sized_recipe
from quantforge.api.completed_result import earlier_outcome, forget
from quantforge.api.imatrix import add_importance_file
from quantforge.api.job import Job, Outcome, plan_job
from quantforge.api.output import files_in_stage, space
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.artifacts import manifest
from quantforge.artifacts.publish import publish, stage_side_files
from quantforge.errors import DeniedError, InputError, IntegrityError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.execution.claims import Claims
from quantforge.execution.journal import (
    Journal,
    check_unshared_journal,
    finished_tensor_names,
    resume_or_create_journal,
)
from quantforge.execution.units import check_shareable, claimable_units, list_units
from quantforge.files.hub import resolve_model
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
from quantforge.progress import phase, report_to
from quantforge.recipe import Recipe
from quantforge.settings import Settings, under_torchrun

if TYPE_CHECKING:
    from quantforge.execution.execute import Run
    from quantforge.execution.run_inputs import RunInputs


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
    """Quantize a model; the same call resumes an interrupted run.

    Args:
        model: a directory, a GGUF file, or ``org/name[@revision]``.
        recipe: a recipe, its file, or the name of a built-in one.
        out: path of the result; the default of `naming` when left out.
        settings: how to run.
        imatrix: importance matrix file; it is made first if it is missing.
        requantize: quantize the decoded weights of a quantized model again, which is recorded as an event.
        target: target size of the result, as for `allocate`, which runs first.
        like: as for `allocate`.
        candidates: as for `allocate`.
        options: choices that override the recipe, see `RecipeOptions`.

    Raises:
        QuantForgeError: bad input, a refusal, a busy output, or no space; ``out`` stays as it was.
    """
    settings, out_path = settings or Settings(), Path(out) if out else None
    if target is not None or like is not None or candidates:
        request = size_request(target, like, candidates, recipe, options)
        return _quantize_to_size(model, request, out_path, settings, imatrix, requantize=requantize)
    requested = build_recipe(recipe, **options)
    with report_to(settings.progress):
        if imatrix is not None:
            requested, settings = add_importance_file(model, requested, settings, imatrix)
        with phase("planning", 0.01, "headers of the model"):
            checkpoint = open_model(resolve_model(str(model), settings.offline))
        if not is_quantized(checkpoint):
            return quantize_opened(checkpoint, requested, out_path, settings)
        if not requantize:
            quoted_path = shlex.quote(str(checkpoint.path))
            raise InputError(
                f"{checkpoint.path}: already quantized; quantizing it again rounds rounded weights",
                f"`quantforge quantize {quoted_path} --requantize`, with your other options, accepts the loss;"
                " the model that it was made from has none, and `quantforge export` moves it as it is",
            )
        checkpoint, event = decoded_source(checkpoint)
        return quantize_opened(checkpoint, requested, out_path, settings, event)


def _quantize_to_size(
    model: str | Path,
    request: SizeRequest,
    out: Path | None,
    settings: Settings,
    imatrix: str | Path | None,
    *,
    requantize: bool,
) -> Outcome:
    """Choose schemes for a target size as `allocate` does, then quantize with them."""
    if imatrix is not None or settings.join or requantize:
        option = "--requantize" if requantize else f"--imatrix {imatrix}"
        raise UsageError(
            f"{'--join' if settings.join else option}: not while a mixture is looked for",
            "quantforge allocate first, then quantize --recipe with what it writes",
        )
    with (
        report_to(settings.progress),
        sized_recipe(model, request, out, settings) as (recipe, result_path),
    ):
        checkpoint = open_model(resolve_model(str(model), settings.offline))
        return quantize_opened(checkpoint, recipe, result_path, settings)


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Return whether a model is quantized, other than one published in low precision by its authors."""
    quantization = checkpoint.config.get("quantization_config")
    return isinstance(quantization, Mapping) and decode_if_low_precision(checkpoint) is checkpoint


def decoded_source(checkpoint: Checkpoint) -> tuple[Checkpoint, Event]:
    """Return a quantized model with decoded weights, and the event that records the second quantization."""
    event = Event("requantized", str(checkpoint.path.name), "from decoded weights")
    return decode_quantized_source(checkpoint), event


def quantize_opened(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings, *events: Event
) -> Outcome:
    """Plan, check, round and publish an opened model; ``events`` are those known already."""
    recipe, settings = strip_local_paths(recipe, settings)  # unchanged unless they name files
    job = plan_job(checkpoint, recipe, out, settings, *events)
    if settings.join:
        _check_shareable(job)
    outcome = earlier_outcome(job)
    if outcome is None:
        try:
            job.stage.check()
            job.check_text()
            settings.announce(job.planned.plan, job.stage.output_argument)
            if settings.join:
                outcome = _run_shared(job)
            else:
                with job.stage:
                    inputs = job.read()  # imports torch
                    from quantforge.execution.execute import execute

                    with published_run(job.stage, inputs) as run:
                        execute([run])
                    outcome = _build_outcome(job.stage, run)
        except RefusedError:  # the output exists: another process may have published meanwhile
            outcome = earlier_outcome(job)
            if outcome is None:
                raise
    return replace(outcome, adapter=settings.adapter)


@contextmanager
def published_run(stage: Stage, inputs: RunInputs) -> Iterator[Run]:
    """Open the output files and journal of a run; after the body has executed it, publish the result.

    The caller holds the lock of the stage. After an error the journal stays, so that the same command resumes the run;
    after an error of the input it is removed.
    """
    from quantforge.execution.execute import Run
    from quantforge.execution.shared_run import finished_units

    checkpoint, planned, settings = inputs.checkpoint, inputs.planned, inputs.settings
    plan, source = planned.plan, inputs.source
    units = list_units(plan, planned.model_layout.blocks)
    claims = Claims(stage.units, [unit.name for unit in claimable_units(units)])
    journal = _open_journal(stage, claims, inputs.fingerprint, settings)
    try:
        stage_side_files(stage, checkpoint, plan, source, settings)
        files = files_in_stage(stage, planned.files)
        with WeightsWriter(
            stage.path, files, finished_names=finished_tensor_names(plan, journal.done)
        ) as writer:
            run = Run(inputs, writer, journal, finished_units(claims, units))
            yield run
        events = run.recorder.all_events()
        settings.policy.check(events)
        calibration_entry = inputs.calibrated.describe() if inputs.calibrated else None
        recipe = planned.recipe.to_toml()
        document = manifest.build_manifest(
            plan, recipe, source, calibration_entry, events, run.recorder.figures()
        )
        with phase("publishing", 1.0):
            publish(stage, checkpoint, plan, planned.files, document, settings=settings)
    except DeniedError:
        journal.close()
        raise
    except InputError:
        journal.remove()  # the same input fails again, and corrected input is another run
        stage.discard()
        claims.remove()
        raise
    except BaseException:
        journal.close()
        raise
    claims.remove()
    journal.remove()  # last: the journal tells the next command that this run had finished


def _open_journal(
    stage: Stage, claims: Claims, fingerprint: Mapping[str, str], settings: Settings
) -> Journal:
    """Open the journal of this run, or that of the unfinished run that it resumes.

    With ``settings.overwrite`` an unfinished run that cannot be resumed is discarded. The caller holds the lock of the
    output.

    Raises:
        IntegrityError: a different run is unfinished here, or its journal is damaged, and overwriting is not allowed.
    """
    journal = None
    try:
        journal = resume_or_create_journal(stage, fingerprint)
        claims.check_fingerprint(fingerprint)
    except IntegrityError as error:
        if journal is not None:
            journal.close()
        if not settings.overwrite:
            raise
        settings.note(f"{error.message}; it is ended, because --overwrite is given")
        claims.remove()
        shutil.rmtree(stage.journal, ignore_errors=True)
        stage.clear()
        journal = resume_or_create_journal(stage, fingerprint)
    return journal


def _build_outcome(stage: Stage, run: Run) -> Outcome:
    """Return the outcome of a published run."""
    plan, resumed = run.inputs.planned.plan, run.journal.resumed
    return Outcome(
        stage.out, plan, run.recorder.all_events(), resumed, run.recorder.scaled_activations()
    )


def _check_shareable(job: Job) -> None:
    """Check that several processes can share a run; errors as `check_shareable`."""
    planned, family = job.planned, job.planned.model_layout.architecture
    check_shareable(
        planned.plan,
        overwrite=job.settings.overwrite,
        prunes_experts=planned.recipe.prune_experts is not None,
        torchrun=under_torchrun(),
        replayed=family is not None and bool(family.needs_model_replay),
    )


def _run_shared(job: Job) -> Outcome:
    """Run a job together with other processes; then publish it, or wait for the process that does."""
    from quantforge.execution.execute import execute
    from quantforge.execution.shared_run import Worker, run_locked, units_finished_before_sharing
    from quantforge.numerics.threads import reproducible

    stage, settings, planned = job.stage, job.settings, job.planned
    units = claimable_units(list_units(planned.plan, planned.model_layout.blocks))
    claims = Claims(stage.units, [unit.name for unit in units])
    # Processes exchange hidden states in files
    shared_settings = replace(settings, activations="disk")
    required_bytes = planned.plan.output_bytes + space(job.checkpoint, planned, shared_settings)
    note = settings.note
    run_locked(
        stage, lambda: stage.check_space(required_bytes), note, skip_if=lambda: claims.exists
    )
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
    if finished := units_finished_before_sharing(stage, units, inputs.fingerprint):
        note(f"{len(finished)} of {len(units)} parts are kept, which one process had finished")
    try:
        with reproducible():
            Worker(claims, units, inputs, finished).run_until_done()
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
        return _build_outcome(stage, run)

    outcome = run_locked(stage, finish, note, wait_forever=bool(planned.plan.tune))
    assert outcome is not None
    return outcome
