"""Quantize: a plan carried out and published, or gone on with after any interruption.

Everything that can be refused is refused before torch is imported and before a byte is written; whatever fails later
leaves the output as it was, and beside it either a run that the same command goes on with, or nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from quantforge.arguments import check_arguments
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import DeniedError, InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.execution.claims import Claims
from quantforge.execution.journal import check_journal, done_tensors, open_journal
from quantforge.execution.progress import followed, phase
from quantforge.execution.units import check_shareable, claimed_units, units_of
from quantforge.formats.opening import open_model
from quantforge.formats.sources.low_precision import plain_source, quantized_source
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.recipe import Recipe
from quantforge.results import manifest
from quantforge.results.publish import publish, stage_side_files
from quantforge.settings import Settings, under_torchrun
from quantforge.verbs.allocate import asked_size, sized_recipe
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.finished_result import finished, forget
from quantforge.verbs.imatrix import with_importance
from quantforge.verbs.job import Job, Outcome, plan_job
from quantforge.verbs.output import placed_in, space

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
    settings = settings or Settings()
    asked = asked_size(target, like, candidates, recipe, options)
    if asked is not None:
        if imatrix is not None or settings.join or requantize:
            given = (
                "--join"
                if settings.join
                else "--requantize"
                if requantize
                else f"--imatrix {imatrix}"
            )
            raise UsageError(
                f"{given}: not while a mixture is looked for",
                "quantforge allocate first, then quantize --recipe with what it writes",
            )
        given_place = Path(out) if out else None
        with (
            followed(settings.progress),
            sized_recipe(model, asked, given_place, settings) as found,
        ):
            checkpoint = open_model(resolve(str(model), settings.offline))
            return quantize_opened(checkpoint, *found, settings)
    wanted = build_recipe(recipe, **options)
    with followed(settings.progress):
        wanted, settings = with_importance(model, wanted, settings, imatrix)
        with phase("planning", 0.01, "headers of the model"):
            checkpoint = open_model(resolve(str(model), settings.offline))
        again = is_quantized(checkpoint)
        if again and not requantize:
            place = shlex.quote(str(checkpoint.path))
            raise InputError(
                f"{checkpoint.path}: already quantized; quantizing it again rounds rounded weights",
                f"`quantforge quantize {place} --requantize`, with your other options, accepts the loss;"
                " the model that it was made from has none, and `quantforge export` moves it as it is",
            )
        checkpoint, *events = decoded_source(checkpoint) if again else (checkpoint,)
        return quantize_opened(checkpoint, wanted, Path(out) if out else None, settings, *events)


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Return whether a model is a result of quantization, not one that is published in low precision."""
    found = checkpoint.config.get("quantization_config")
    return isinstance(found, Mapping) and plain_source(checkpoint) is checkpoint


def decoded_source(checkpoint: Checkpoint) -> tuple[Checkpoint, Event]:
    """Return a quantized model as its decoded weights, and the event for quantizing them again."""
    event = Event("requantized", str(checkpoint.path.name), "from decoded weights")
    return quantized_source(checkpoint), event


def quantize_opened(
    checkpoint: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings, *events: Event
) -> Outcome:
    """Quantize an opened model; ``events`` are known already."""
    recipe, settings = strip_local_paths(recipe, settings)
    job = plan_job(checkpoint, recipe, out, settings, *events)
    if settings.join:
        architecture = job.planned.matched.architecture
        check_shareable(
            job.planned.plan, overwrite=settings.overwrite, prunes=recipe.prune_experts is not None,
            torchrun=under_torchrun(), replayed=architecture is not None and bool(architecture.replayed),
        )  # fmt: skip
    outcome = finished(job)
    if outcome is None:
        try:
            job.stage.check()
            job.announce()
            if settings.join:
                outcome = _join(job)
            else:
                with job.stage:
                    (outcome,) = carry_out([(job.stage, job.read())])
        except RefusedError:  # the output exists: another process may have published meanwhile
            outcome = finished(job)
            if outcome is None:
                raise
    return replace(outcome, adapter=settings.adapter)


def carry_out(work: Sequence[tuple[Stage, RunInputs]]) -> list[Outcome]:
    """Make results whose rows pass the blocks together, or what is left of them, and publish each in its stage.

    The caller holds the locks of the stages.
    """
    from quantforge.execution.execute import execute
    from quantforge.numerics.threads import reproducible

    outcomes: list[Outcome] = []
    with ExitStack() as files:
        runs = [files.enter_context(_opened(*one, outcomes)) for one in work]
        with reproducible(), phase("rounding", 0.95):
            execute(runs, work[0][1].sample)
    return outcomes[::-1]  # the last that was opened is published first


@contextmanager
def _opened(stage: Stage, inputs: RunInputs, outcomes: list[Outcome]) -> Iterator[Run]:
    """Open the files and the journal of a run, which the body executes; then publish, and add the outcome."""
    from quantforge.execution.execute import Run
    from quantforge.execution.shared_run import finished_units

    checkpoint, planned, settings = inputs.checkpoint, inputs.planned, inputs.settings
    plan, source, calibrated = planned.plan, inputs.source, inputs.calibrated
    units = units_of(plan, planned.matched.blocks)
    claims = Claims(stage.units, [unit.name for unit in claimed_units(units)])
    journal = open_journal(stage, claims, inputs.fingerprint, settings)
    try:
        stage_side_files(stage, checkpoint, plan, source, settings)
        files = placed_in(stage, planned.files)
        with WeightsWriter(stage.path, files, done=done_tensors(plan, journal.done)) as writer:
            run = Run(inputs, writer, journal, finished_units(claims, units))
            yield run
        events = (*plan.substitutions, *(calibrated.events if calibrated else ()), *run.events())
        settings.policy.check(events)
        described = calibrated.describe() if calibrated else None
        recipe = planned.recipe.to_toml()
        document = manifest.manifest(plan, recipe, source, described, events, run.figures())
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
    outcomes.append(Outcome(stage.out, plan, events, journal.resumed, run.scaled()))


def _join(job: Job) -> Outcome:
    """Do units that several processes share; then publish, or wait for the process that does."""
    from quantforge.execution.shared_run import Worker, finished_alone, locked
    from quantforge.numerics.threads import reproducible

    stage, settings, planned = job.stage, job.settings, job.planned
    units = claimed_units(units_of(planned.plan, planned.matched.blocks))
    claims = Claims(stage.units, [unit.name for unit in units])
    waiting = replace(settings, activations="disk")  # ranks hand on hidden states in files
    needed = planned.plan.output_bytes + space(job.checkpoint, planned, waiting)
    note = settings.note
    locked(stage, lambda: stage.check_space(needed), note, unless=lambda: claims.there)
    inputs = job.read_inputs()
    if inputs.sample is not None and inputs.sample.images is not None:
        raise UsageError(
            "a run that processes share (torchrun): rows with images pass a model in one process",
            "use one process, without torchrun",
        )

    def prepare() -> None:
        check_journal(stage, inputs.fingerprint)
        claims.prepare(inputs.fingerprint)

    locked(stage, prepare, note, unless=lambda: claims.there)
    claims.check(inputs.fingerprint)
    if kept := finished_alone(stage, units, inputs.fingerprint):
        note(f"{len(kept)} of {len(units)} parts are kept, which one process had finished")
    try:
        with reproducible():
            Worker(claims, units, inputs, kept).work_off()
    except DeniedError:
        raise
    except InputError:  # as in `_opened`
        forget(stage)
        raise

    def finish() -> Outcome:
        claims.check_there()
        claims.check(inputs.fingerprint)
        return carry_out([(stage, inputs)])[0]

    outcome = locked(stage, finish, note, waits=bool(planned.plan.tune))
    assert outcome is not None
    return outcome
