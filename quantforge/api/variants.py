"""Variants: several results of one model, each a job of its own; a release and a sweep are made of them.

All are planned before any is made. One that is there, whole and by the same recipe, source and versions, is kept; the
others are made by this process, or by all processes that give the same command (``join``).

Each job keeps its own stage, lock, journal and writer, so that its bytes and its way of resuming are those of the
separate command. Jobs that read the same calibration rows share the pass of the rows through the blocks, those whose
transforms change a block last; guides, quantized inputs of the next block, ranges measured behind transforms and
mixtures of experts are made one after another.

A job is made by one process at a time, and the lock of its output says so: where that process dies, the next one that
looks for work goes on with it. Whoever looks for work takes half of what can share a pass, so that the others find some
too. One process at a time looks (`turn`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.api.completed_result import clear_run, is_made
from quantforge.api.job import Job, plan_job
from quantforge.api.quantize import published_run
from quantforge.artifacts.manifest import source_file_digests
from quantforge.errors import BusyError, QuantForgeError, RefusedError
from quantforge.execution.journal import check_versions
from quantforge.execution.progress import phase, report_step
from quantforge.files.disk import run_folder, writing
from quantforge.files.hub import resolve
from quantforge.files.lock import Lock, StaleLockMonitor
from quantforge.files.reader import QUANTIZATION, Checkpoint
from quantforge.files.stage import Stage, check_apart
from quantforge.formats import load_format
from quantforge.formats.open_model import open_model
from quantforge.planning.format_choice import choose_format
from quantforge.planning.local_paths import strip_local_paths
from quantforge.plans import decisions_by_plan
from quantforge.recipe import Recipe
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.execution.execute import RunInputs

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Variants:
    """Results of one model that can be made, as far as headers tell.

    Attributes:
        settings: how they are made.
        source: the model.
        files: of the source, by `source_file_digests`.
        jobs: what is wanted, planned, by name.
        missing: names of those that are not there.
    """

    settings: Settings
    source: Checkpoint
    files: Mapping[str, Any]
    jobs: Mapping[str, Job]
    missing: tuple[str, ...]

    def only(self, names: list[str]) -> Variants:
        """Return the variants of these names alone."""
        jobs = {name: self.jobs[name] for name in names}
        return replace(self, jobs=jobs, missing=tuple(n for n in self.missing if n in jobs))

    def make(self, place: Path, scored: int) -> tuple[str, ...]:
        """Make what is missing, and return the names of those that were made for this call.

        Args:
            place: of what processes share, for `turn`.
            scored: how many models are scored afterwards, each half of the work of making one.

        Raises:
            QuantForgeError: as `quantize`.
        """
        for said in decisions_by_plan(
            {name: self.jobs[name].planned.plan for name in self.missing}
        ):
            self.settings.note(said)
        for name, job in self.jobs.items():
            if name not in self.missing:
                clear_run(job.out)
        wanted = {name: self.jobs[name] for name in self.missing}
        for job in wanted.values():
            job.check_text()
        work = 2 * len(wanted)
        with phase("variants", min(0.95, work / (work + scored)) if wanted else 0.0):
            made = _make_all(wanted, self.files, self.settings, place)
        return tuple(name for name in wanted if name in made)


def plan_variants(
    model: str | Path,
    recipes: Mapping[str, Recipe],
    place_of: Callable[[str, str], Path],
    settings: Settings,
) -> tuple[Variants, dict[str, QuantForgeError]]:
    """Plan results of one model; nothing is written.

    Args:
        model: as of `quantize`.
        recipes: what is wanted, by name.
        place_of: returns where a result goes, by its name (with the suffix of its format) and its format.
        settings: how they are made.

    Returns:
        The variants that can be made, and the errors of the others by name.

    Raises:
        UsageError: a result would touch the model.
        RefusedError: something else lies where a result would go.
    """
    source = open_model(resolve(str(model), settings.offline))
    files = source_file_digests(source)
    own = replace(settings, join=False)  # each is made by one process
    jobs: dict[str, Job] = {}
    errors: dict[str, QuantForgeError] = {}
    for name, recipe in recipes.items():
        try:
            jobs[name] = _planned(source, name, recipe, place_of, own)
        except QuantForgeError as error:
            errors[name] = error
    for job in jobs.values():
        check_apart(job.out, source.path)
    missing = tuple(name for name, job in jobs.items() if not is_made(job, files))
    return Variants(settings, source, files, jobs, missing), errors


def _planned(
    source: Checkpoint,
    name: str,
    recipe: Recipe,
    place_of: Callable[[str, str], Path],
    settings: Settings,
) -> Job:
    recipe, settings = strip_local_paths(recipe, settings)
    key = choose_format(recipe)[0].format
    about = load_format(key).INFO
    job = plan_job(source, recipe, place_of(f"{name}{about.file_suffix}", key), settings)
    if job.one_file and len(job.planned.files) > 1:
        raise RefusedError(
            f"its file would be split into {len(job.planned.files)} (max_shard_bytes)",
            "leave max_shard_bytes out",
        )
    return job


def _make_all(
    jobs: Mapping[str, Job], files: Mapping[str, Any], settings: Settings, place: Path
) -> set[str]:
    """Make results, with other processes where they share the work, until all are there; return those made here."""
    queue, made = _Queue(jobs, files, settings), set[str]()
    while queue.missing:
        with ExitStack() as held:
            with turn(place, settings.note) if settings.join else ExitStack():
                group = queue.take(held)
            elsewhere = len(jobs) - len(queue.missing) - len(group)
            report_step(
                share=elsewhere / len(jobs)
            )  # jobs made here have reported their own shares
            if group:
                with phase("", 0.94 * len(group) / len(jobs)):
                    carry_out([*group.values()])
                made |= group.keys()
                continue
        if queue.missing:
            left = f"{len(queue.missing)} of {len(jobs)} variants"
            report_step(f"made by other processes: {left}", waits=True)
            time.sleep(POLL_SECONDS)
    return made


def carry_out(group: Sequence[tuple[Stage, RunInputs]]) -> None:
    """Make results whose rows pass the blocks together, or what is left of them, and publish each in its stage.

    The caller holds the locks of the stages.
    """
    from quantforge.execution.execute import execute

    with ExitStack() as files:  # the last that was opened is published first
        runs = [files.enter_context(published_run(*one)) for one in group]
        execute(runs)


class _Queue:
    """Jobs whose results are not there; other processes may be about some of them.

    Attributes:
        missing: these, by name.
    """

    def __init__(
        self, jobs: Mapping[str, Job], files: Mapping[str, Any], settings: Settings
    ) -> None:
        self.missing, self._count = {**jobs}, len(jobs)
        self._files, self._shared = files, settings.join
        self._monitor = StaleLockMonitor(settings.note)
        self._read: dict[str, RunInputs] = {}

    def take(self, held: ExitStack) -> dict[str, tuple[Stage, RunInputs]]:
        """Enter the stages of jobs that are free and share a pass of the rows, of half of them where others join in.

        All that are free are looked at and read, so that what cannot be made is refused before work on any.
        """
        if self._shared:
            for job in self.missing.values():
                check_versions(job.stage)
        group: dict[str, tuple[Stage, RunInputs]] = {}
        stages: dict[str, ExitStack] = {}
        for name, job in [*self.missing.items()]:
            stage = held.enter_context(ExitStack())
            if not self._enter(name, job, stage):
                continue
            if name not in self._read:
                with phase("", 0.05 / self._count):
                    self._read[name] = job.read()
            inputs = self._read[name]
            if group and not _share_pass(next(iter(group.values()))[1], inputs):
                stage.close()
                continue
            group[name], stages[name] = (job.stage, inputs), stage
        names = [*group][: (len(group) + 1) // 2 if self._shared else None]
        for name in group.keys() - names:
            stages[name].close()
        for name in names:
            del self.missing[name]
        return {name: group[name] for name in names}

    def _enter(self, name: str, job: Job, stage: ExitStack) -> bool:
        """Enter the stage of a job, unless its result is there or another process makes it."""
        if not is_made(job, self._files):
            try:
                stage.enter_context(job.stage)
            except BusyError as error:
                if not self._shared:
                    raise
                self._monitor.check(error)
                return False
            except RefusedError:
                if not is_made(job, self._files):  # else it was published just now
                    raise
            else:
                return True
        del self.missing[name]
        return False


def _share_pass(first: RunInputs, other: RunInputs) -> bool:
    """Return whether the rows may pass the blocks once for two jobs."""
    if first.sample is None or other.sample is None:
        return False
    from quantforge.execution.execute import can_share_pass

    one, two = first.planned, other.planned
    return (
        one.recipe.calibration == two.recipe.calibration
        and first.source == other.source
        and [tensor.header for tensor in one.model_layout.tensors]
        == [tensor.header for tensor in two.model_layout.tensors]
        and all(
            inputs.checkpoint.facts.keys() <= {QUANTIZATION}
            and inputs.planned.recipe.prune_experts is None
            and can_share_pass(inputs.planned)
            for inputs in (first, other)
        )
    )


@contextmanager
def turn(place: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process does what is inside, for the same place.

    Args:
        place: which.
        note: called with a sentence about a process that does it and does not respond.

    Raises:
        RefusedError: what lies there is no lock.
        ResourceError: it cannot be made.
    """
    lock, monitor = Lock(run_folder(place)), StaleLockMonitor(note)
    try:  # a signal may come between the lock and what is inside
        while True:
            try:
                with writing(place.parent, 0):
                    lock.take()
                break
            except BusyError as error:
                monitor.check(error)
                time.sleep(POLL_SECONDS)
        yield
    finally:
        lock.release()
