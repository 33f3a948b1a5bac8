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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantforge.errors import BusyError, InputError, QuantForgeError, UsageError
from quantforge.execution.progress import phase, tell
from quantforge.settings import Settings
from quantforge.verbs.asked_result import Variant
from quantforge.verbs.quantize_variants import AskedVariant, asked_variants, quantize_variants

POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0
TRIES = 3  # of a task whose machine has died, or whose variant a dying process still holds


def ray_variants(model: str | Path, variants: Sequence[Variant], settings: Settings) -> list[int]:
    """Make variants on a Ray cluster.

    Args:
        model: as of `quantize`, at the same path on all machines.
        variants: what is wanted, each with an output of its own.
        settings: how to run; ``ray`` is the address of the cluster.

    Returns:
        The numbers of those that were made: all.

    Raises:
        UsageError: Ray is not installed.
        InputError: there is no cluster at the address, or it has no room for a task.
        QuantForgeError: as `quantize_variants`; the first of a task that failed, once all have ended.
    """
    asked = asked_variants(model, variants, settings)
    with _cluster(settings.ray) as ray:
        own = replace(settings, **{name: getattr(Settings(), name) for name in _TOLD}, ray="")
        room = int(ray.cluster_resources().get("CPU", 1) // (own.threads or 1)) or 1
        tasks = {}
        for numbers in shares(variants, room):
            needs = _needs([asked[number] for number in numbers], own)
            _check_room(ray, needs)
            remote = ray.remote(max_retries=TRIES, retry_exceptions=[BusyError], **needs)(_make)
            chosen = [variants[number] for number in numbers]
            tasks[remote.remote(Path.cwd(), str(model), chosen, own)] = numbers
        _follow(ray, tasks)
    return [*range(len(variants))]


_TOLD = ("progress", "note", "announce")  # to the process that asks: tasks are silent


def shares(variants: Sequence[Variant], room: int) -> list[list[int]]:
    """Return the numbers of the variants of each task: those of one calibration, in as many parts as have room."""
    groups: dict[object, list[int]] = {}
    for number, variant in enumerate(variants):
        groups.setdefault(variant.recipe.calibration, []).append(number)
    found = []
    for numbers in groups.values():
        parts = min(room, len(numbers))
        found += [numbers[part::parts] for part in range(parts)]
    return found


def _make(place: Path, model: str, variants: Sequence[Variant], settings: Settings) -> None:
    os.chdir(place)  # in which relative paths were typed
    quantize_variants(model, variants, settings)


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


def _needs(asked: Sequence[AskedVariant], settings: Settings) -> Mapping[str, float]:
    """Return what a task asks of its machine: processors, planned bytes, GPUs."""
    memory = max(one.wanted.planned.plan.peak_memory_bytes for one in asked)
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


def _follow(ray: Any, tasks: Mapping[Any, Sequence[int]]) -> None:
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
