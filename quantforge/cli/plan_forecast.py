"""Forecast of a run: its time, files and memory, each with what it rests on, and what this machine lacks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quantforge.checkpoint.disk import free_bytes
from quantforge.cli.console import Console
from quantforge.cli.meter import duration
from quantforge.planning.run_work import BASIS, DIGEST, PRODUCTS, seconds_of
from quantforge.plans import Plan, RunWork
from quantforge.results.significant import significant, size
from quantforge.settings import Settings, memory_bytes, workers_of
from quantforge.verbs.output import SPARE_BYTES, memory_hint

DISK, MEMORY = "disk", "memory"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Needs of a run, and what there is.

    Attributes:
        work: of the run.
        seconds: by step.
        threads: that share the work.
        on_disk: whether activations wait there.
        peak: bytes of memory, above the imports.
        free: bytes at the place of the output.
        memory: bytes of this machine, None where the system does not tell.
    """

    work: RunWork
    seconds: dict[str, float]
    threads: int
    on_disk: bool
    peak: int
    free: int
    memory: int | None

    @property
    def disk(self) -> int:
        """Return the bytes that a run takes on the disk at most."""
        states = self.work.states_bytes if self.on_disk else 0
        return self.work.output_bytes + states + self.work.guide_bytes + SPARE_BYTES


def forecast(plan: Plan, output: Path, settings: Settings) -> Forecast | None:
    """Return the forecast of a plan's run; None for a plan that quantizes nothing.

    Args:
        plan: of the run.
        output: its result.
        settings: its threads, and where activations wait.
    """
    if plan.work is None:
        return None
    threads = workers_of(settings)
    return Forecast(
        plan.work, seconds_of(plan.work, threads), threads, settings.activations == DISK,
        plan.peak_memory_bytes, free_bytes(output.absolute().parent),
        memory_bytes(),
    )  # fmt: skip


def show(console: Console, found: Forecast, output: str) -> None:
    """Print what a run takes, by what basis, and what is missing for it."""
    whole = sum(found.seconds.values())
    parts = [
        f"{step} {duration(seconds)}"
        for step, seconds in found.seconds.items()
        if seconds >= 0.01 * whole
    ]
    threads = f"{found.threads} thread{'s' * (found.threads > 1)}"
    console.entry("time", f"about {duration(whole)} on {threads}: {', '.join(parts)}")
    console.entry(
        "by",
        f"{significant(PRODUCTS / 1e9)} GFLOP/s and {size(DIGEST)}/s read and digested, {BASIS}",
    )
    console.entry(
        "source", f"{size(found.work.source_bytes)}, read {found.work.reads} times, never copied"
    )
    console.entry("disk", _disk(found, output))
    for what, said in lacks(found, output):
        console.entry("beyond", f"{what}: {said}")


def _disk(found: Forecast, output: str) -> str:
    parts = [f"{size(found.work.output_bytes)} of weights"]
    states, guide = found.work.states_bytes, found.work.guide_bytes
    if states:
        where = "hidden states" if found.on_disk else "more with --activations disk"
        parts.append(f"{size(states)} {where}")
    if guide:
        parts.append(f"{size(guide)} for the backward pass")
    return f"{', '.join(parts)}, beside {output}; {size(found.free)} are free there"


def lacks(found: Forecast, output: str) -> Iterator[tuple[str, str]]:
    """Yield what this machine has too little of, and what to type."""
    if found.disk > found.free:
        yield DISK, f"{size(found.disk)} are needed for {output}: -o on another disk"
    if found.memory is not None and found.peak > found.memory:
        yield MEMORY, memory_hint(found.peak, found.memory, on_disk=found.on_disk)


def document(found: Forecast) -> dict[str, object]:
    """Return a forecast as plain data: the key ``forecast`` of a plan's document."""
    return {
        "seconds": {step: round(seconds, 1) for step, seconds in found.seconds.items()},
        "total_seconds": math.ceil(sum(found.seconds.values())),
        "threads": found.threads,
        "products_per_second": PRODUCTS,
        "digested_bytes_per_second": DIGEST,
        "basis": BASIS,
        "source_bytes": found.work.source_bytes,
        "source_reads": found.work.reads,
        "states_bytes": found.work.states_bytes,
        "guide_bytes": found.work.guide_bytes,
        "disk_bytes": found.disk,
        "free_bytes": found.free,
        "memory_bytes": found.memory,
        "beyond": [what for what, _ in lacks(found, "")],
    }
