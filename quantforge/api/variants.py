"""Make several results (variants) of one model, for releases and sweeps; each is a job.

All are planned before any is made. An existing result is kept if it is complete and has the same recipe, source and
versions; the others are made by this process, or by all processes that run the same command (``join``).

Each job has its own stage, lock, journal and writer, so that it gives the same bytes and is resumed in the same way as
a separate command. Jobs with the same calibration rows share one forward pass of the rows through the blocks, except
jobs with gradient guides, quantized inputs of the next block, input ranges measured after transforms, or mixtures of
experts, which run one after another.

A job is made by one process at a time, which holds the lock of its output. If that process dies, the next process that
looks for work resumes the job. A process takes half of the jobs that can share a pass, so that others get some too.
Only one process at a time looks for work (`exclusive_lock`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.api.completed_result import is_up_to_date, remove_run_files
from quantforge.api.job import Job, plan_job
from quantforge.api.quantize import published_run
from quantforge.artifacts.manifest import source_file_digests
from quantforge.errors import BusyError, QuantForgeError, RefusedError
from quantforge.execution.journal import check_versions
from quantforge.files.disk import run_folder, write_errors
from quantforge.files.hub import resolve_model
from quantforge.files.lock import Lock, StaleLockMonitor
from quantforge.files.reader import QUANTIZATION, Checkpoint
from quantforge.files.stage import Stage, check_no_overlap
from quantforge.formats import load_format
from quantforge.formats.open_model import open_model
from quantforge.planning.format_choice import choose_format
from quantforge.planning.local_paths import strip_local_paths
from quantforge.plans import decisions_by_plan
from quantforge.progress import phase, report_step
from quantforge.recipe import Recipe
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.execution.run_inputs import RunInputs

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Variants:
    """Planned results of one model.

    Attributes:
        settings: how to run.
        source: the model.
        files: digests of the source files, from `source_file_digests`.
        jobs: planned jobs by name.
        missing: names of results that have to be made.
    """

    settings: Settings
    source: Checkpoint
    files: Mapping[str, Any]
    jobs: Mapping[str, Job]
    missing: tuple[str, ...]

    def only(self, names: list[str]) -> Variants:
        """Return only the variants with these names."""
        jobs = {name: self.jobs[name] for name in names}
        return replace(self, jobs=jobs, missing=tuple(n for n in self.missing if n in jobs))

    def make(self, lock_path: Path, num_scored: int) -> tuple[str, ...]:
        """Make the missing results; return the names of those that this process made.

        Args:
            lock_path: path for `exclusive_lock`.
            num_scored: number of models scored afterwards; for progress, each counts half as much as making one.

        Raises:
            QuantForgeError: as `quantize`.
        """
        for decision in decisions_by_plan(
            {name: self.jobs[name].planned.plan for name in self.missing}
        ):
            self.settings.note(decision)
        for name, job in self.jobs.items():
            if name not in self.missing:
                remove_run_files(job.out)
        missing_jobs = {name: self.jobs[name] for name in self.missing}
        for job in missing_jobs.values():
            job.check_text()
        work_units = 2 * len(missing_jobs)
        with phase(
            "variants", min(0.95, work_units / (work_units + num_scored)) if missing_jobs else 0.0
        ):
            made_names = _make_all(missing_jobs, self.files, self.settings, lock_path)
        return tuple(name for name in missing_jobs if name in made_names)


def plan_variants(
    model: str | Path,
    recipes: Mapping[str, Recipe],
    output_path: Callable[[str, str], Path],
    settings: Settings,
) -> tuple[Variants, dict[str, QuantForgeError]]:
    """Plan results of one model; nothing is written.

    Args:
        model: as of `quantize`.
        recipes: recipes by name.
        output_path: returns the path of a result from its name (with the suffix of its format) and its format.
        settings: how to run.

    Returns:
        The variants that can be made, and the errors of the others by name.

    Raises:
        UsageError: a result would overwrite the model.
        RefusedError: something else exists at the path of a result.
    """
    source = open_model(resolve_model(str(model), settings.offline))
    files = source_file_digests(source)
    job_settings = replace(settings, join=False)  # one process makes each job
    jobs: dict[str, Job] = {}
    errors: dict[str, QuantForgeError] = {}
    for name, recipe in recipes.items():
        try:
            jobs[name] = _plan_variant(source, name, recipe, output_path, job_settings)
        except QuantForgeError as error:
            errors[name] = error
    for job in jobs.values():
        check_no_overlap(job.out, source.path)
    missing_names = tuple(name for name, job in jobs.items() if not is_up_to_date(job, files))
    return Variants(settings, source, files, jobs, missing_names), errors


def _plan_variant(
    source: Checkpoint,
    name: str,
    recipe: Recipe,
    output_path: Callable[[str, str], Path],
    settings: Settings,
) -> Job:
    recipe, settings = strip_local_paths(recipe, settings)
    key = choose_format(recipe)[0].format
    info = load_format(key).INFO
    job = plan_job(source, recipe, output_path(f"{name}{info.file_suffix}", key), settings)
    if job.one_file and len(job.planned.files) > 1:
        raise RefusedError(
            f"its file would be split into {len(job.planned.files)} (max_shard_bytes)",
            "leave max_shard_bytes out",
        )
    return job


def _make_all(
    jobs: Mapping[str, Job], files: Mapping[str, Any], settings: Settings, lock_path: Path
) -> set[str]:
    """Make all results, together with other processes if they share the work; return the names made here."""
    queue, made_names = _Queue(jobs, files, settings), set[str]()
    while queue.missing:
        with ExitStack() as locks:
            with exclusive_lock(lock_path, settings.note) if settings.join else ExitStack():
                group = queue.take(locks)
            made_by_others = len(jobs) - len(queue.missing) - len(group)
            report_step(
                share=made_by_others / len(jobs)
            )  # jobs made here have reported their own shares
            if group:
                with phase("", 0.94 * len(group) / len(jobs)):
                    run_group([*group.values()])
                made_names |= group.keys()
                continue
        if queue.missing:
            remaining = f"{len(queue.missing)} of {len(jobs)} variants"
            report_step(f"made by other processes: {remaining}", waits=True)
            time.sleep(POLL_SECONDS)
    return made_names


def run_group(group: Sequence[tuple[Stage, RunInputs]]) -> None:
    """Make the results of jobs that share a pass through the blocks, and publish each.

    The caller holds the locks of the stages.
    """
    from quantforge.execution.execute import execute

    with ExitStack() as files:  # published in reverse order
        runs = [files.enter_context(published_run(*job)) for job in group]
        execute(runs)


class _Queue:
    """Queue of jobs whose results are missing; other processes may be working on some of them.

    Attributes:
        missing: the jobs by name.
    """

    def __init__(
        self, jobs: Mapping[str, Job], files: Mapping[str, Any], settings: Settings
    ) -> None:
        self.missing, self._count = {**jobs}, len(jobs)
        self._files, self._shared = files, settings.join
        self._monitor = StaleLockMonitor(settings.note)
        self._read: dict[str, RunInputs] = {}

    def take(self, locks: ExitStack) -> dict[str, tuple[Stage, RunInputs]]:
        """Lock free jobs that can share a pass, and remove them from the queue.

        If processes share the work, only half of these jobs are taken. The inputs of all free jobs
        are read first, so that errors occur before any work.
        """
        if self._shared:
            for job in self.missing.values():
                check_versions(job.stage)
        group: dict[str, tuple[Stage, RunInputs]] = {}
        stage_locks: dict[str, ExitStack] = {}
        for name, job in [*self.missing.items()]:
            stage_lock = locks.enter_context(ExitStack())
            if not self._enter(name, job, stage_lock):
                continue
            if name not in self._read:
                with phase("", 0.05 / self._count):
                    self._read[name] = job.read()
            inputs = self._read[name]
            if group and not _can_share_pass(next(iter(group.values()))[1], inputs):
                stage_lock.close()
                continue
            group[name], stage_locks[name] = (job.stage, inputs), stage_lock
        names = [*group][: (len(group) + 1) // 2 if self._shared else None]
        for name in group.keys() - names:
            stage_locks[name].close()
        for name in names:
            del self.missing[name]
        return {name: group[name] for name in names}

    def _enter(self, name: str, job: Job, stage_lock: ExitStack) -> bool:
        """Lock the stage of a job; return False if its result exists or another process is making it."""
        if not is_up_to_date(job, self._files):
            try:
                stage_lock.enter_context(job.stage)
            except BusyError as error:
                if not self._shared:
                    raise
                self._monitor.check(error)
                return False
            except RefusedError:
                if not is_up_to_date(job, self._files):  # else it was published just now
                    raise
            else:
                return True
        del self.missing[name]
        return False


def _can_share_pass(first: RunInputs, other: RunInputs) -> bool:
    """Return whether two jobs can share one pass of the calibration rows."""
    if first.sample is None or other.sample is None:
        return False
    from quantforge.execution.execute import can_share_pass

    first_plan, second_plan = first.planned, other.planned
    return (
        first_plan.recipe.calibration == second_plan.recipe.calibration
        and first.source == other.source
        and [tensor.header for tensor in first_plan.model_layout.tensors]
        == [tensor.header for tensor in second_plan.model_layout.tensors]
        and all(
            inputs.checkpoint.source_notes.keys() <= {QUANTIZATION}
            and inputs.planned.recipe.prune_experts is None
            and can_share_pass(inputs.planned)
            for inputs in (first, other)
        )
    )


@contextmanager
def exclusive_lock(path: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock between processes while the body runs; wait until it is free.

    Args:
        path: path next to which the lock is made.
        note: called with a message about a process that holds the lock and does not respond.

    Raises:
        RefusedError: the path of the lock is something else.
        ResourceError: the lock cannot be made.
    """
    lock, monitor = Lock(run_folder(path)), StaleLockMonitor(note)
    try:  # a signal may arrive between the lock and the body
        while True:
            try:
                with write_errors(path.parent, 0):
                    lock.acquire()
                break
            except BusyError as error:
                monitor.check(error)
                time.sleep(POLL_SECONDS)
        yield
    finally:
        lock.release()
