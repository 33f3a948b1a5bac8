"""Ray: variants made by tasks of a cluster, which places them by the processors, memory and GPUs that they need.

A task makes variants that can share a pass of the calibration rows; there are as many tasks as the cluster has
processors for. All machines see the model and the outputs at the same paths. A task whose machine dies is begun again
on another one by Ray, and goes on from the journals beside the outputs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.errors import BusyError, InputError, QuantForgeError, UsageError
from quantforge.execution.progress import phase, tell
from quantforge.recipe import Recipe
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.verbs.job import Job
    from quantforge.verbs.variants import Variants

Make = Callable[[str, Mapping[str, Recipe], Callable[[str, str], Path], Settings], object]
POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0
_TOLD = ("progress", "note", "announce")  # to the process that was typed: tasks are silent
TRIES = 3  # of a task whose machine has died, or whose variant a dying process still holds


def ray_variants(variants: Variants, make: Make) -> None:
    """Make the missing variants on the Ray cluster that the settings name.

    Args:
        variants: which, and how.
        make: `quantforge.verbs.variants.make_variants`, which a task calls.

    Raises:
        UsageError: Ray is not installed.
        InputError: there is no cluster at the address, or it has no room for a task.
        QuantForgeError: the first of a task that failed, once all have ended.
    """
    settings = variants.settings
    with _cluster(settings.ray) as ray:
        own = replace(settings, ray="", **{name: getattr(Settings(), name) for name in _TOLD})
        room = int(ray.cluster_resources().get("CPU", 1) // (own.threads or 1)) or 1
        tasks = {}
        recipes = {name: variants.recipes[name] for name in variants.missing}
        for names in shares(recipes, room):
            jobs = [variants.jobs[name] for name in names]
            needs = _needs(jobs, own)
            _check_room(ray, needs)
            remote = ray.remote(max_retries=TRIES, retry_exceptions=[BusyError], **needs)(_make)
            asked = {name: recipes[name] for name in names}
            outs = {job.out.name: job.out for job in jobs}
            tasks[remote.remote(make, Path.cwd(), variants.model, asked, outs, own)] = names
        _follow(ray, tasks)


def shares(recipes: Mapping[str, Recipe], room: int) -> list[list[str]]:
    """Return the names of the variants of each task: those of one calibration, in as many parts as have room."""
    groups: dict[object, list[str]] = {}
    for name, recipe in recipes.items():
        groups.setdefault(recipe.calibration, []).append(name)
    found = []
    for names in groups.values():
        parts = min(room, len(names))
        found += [names[part::parts] for part in range(parts)]
    return found


def _make(
    make: Make,
    here: Path,
    model: str,
    recipes: Mapping[str, Recipe],
    outs: Mapping[str, Path],
    settings: Settings,
) -> None:
    os.chdir(here)  # in which relative paths were typed
    make(model, recipes, lambda name, _: outs[name], settings)


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--ray: the library is not installed", "pip install 'quantforge[ray]'")
    import ray

    with redirect_stdout(sys.stderr):  # to which Ray tells of machines that die
        try:
            _check_answers(address)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"--ray {address}: no Ray cluster answers there",
                "start one with: ray start --head; or name another address",
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Try to reach a cluster: Ray itself goes on trying for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()


def _needs(jobs: Sequence[Job], settings: Settings) -> Mapping[str, float]:
    """Return what a task asks of its machine: processors, planned bytes, GPUs."""
    memory = max(job.planned.plan.peak_memory_bytes for job in jobs)
    gpus = 0 if settings.device == "cpu" else 1
    return {"num_cpus": settings.threads or 1, "num_gpus": gpus, "memory": memory}


def _check_room(ray: Any, needs: Mapping[str, float]) -> None:
    """Refuse a task that no machine of the cluster has room for: it would wait for ever."""
    keys = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    for node in ray.nodes():
        has = node["Resources"]
        if node["Alive"] and all(has.get(keys[name], 0) >= value for name, value in needs.items()):
            return
    words = ", ".join(f"{keys[name]} {value:g}" for name, value in needs.items() if value)
    raise InputError(f"--ray: no machine of the cluster has {words}", "add one, or ask for less")


def _follow(ray: Any, tasks: Mapping[Any, Sequence[str]]) -> None:
    """Wait for all tasks, and raise the first error."""
    total = sum(map(len, tasks.values()))
    waiting, errors, made = [*tasks], [], 0
    with phase("", 0.94):
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=POLL_SECONDS)
            for task in ended:
                try:
                    ray.get(task)
                    made += len(tasks[task])
                except ray.exceptions.RayTaskError as error:
                    errors.append(_ours(error))
                except ray.exceptions.RayError as error:
                    errors.append(
                        InputError(f"--ray: a task was lost: {error!s:.300}", "run again")
                    )
            tell(f"{made} of {total} variants are made by the cluster", made, total)
    if errors:
        raise errors[0]


def _ours(error: Any) -> BaseException:
    """Return the error of ours that a task raised, as it was raised there."""
    cause = error.cause
    return cause if isinstance(cause, QuantForgeError) else error
