"""Processors that other programs share: how threads wait there, and how much processor time they got.

A thread that has finished its part of a product spins until the others have finished theirs. The OpenMP library that
torch brings (GNU's) spins 300,000 times before it sleeps. That takes milliseconds, during which a thread that another
program has displaced cannot come back to finish: with two threads on two busy cores, decoding takes ten times as long.
Large products lose nothing when threads sleep early. A decoded token consists of many small products, and on an idle
machine it would wait for the system to wake the threads. So verbs that decode keep spinning only where no other program
wants the processors. The library reads its settings once, when torch is imported, so the decision is made before that.

Speeds that were measured while other programs ran say little about a model. `ProcessorShare` measures the processor
time that the threads got as a share of the time that they asked for. Linux counts, for each thread, the time that it
ran and the time that it was ready to run but waited for a processor (``/proc/PID/task/TID/schedstat``), and for each
processor the time that the hypervisor gave to others (``steal`` in ``/proc/stat``).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

SPINS = "GOMP_SPINCOUNT"
POLICY = "OMP_WAIT_POLICY"
TIMES = "2000"
SAMPLE_SECONDS = 0.1
IDLE_LOAD = 0.2  # a load average below which nothing is sampled
OTHERS = (
    0.25  # processors that other programs keep busy, from which on threads of ours are displaced
)
FULL_SHARE = 0.9  # below this share of the processor time, a speed is not compared
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of /proc/stat
_COLUMNS = 8  # user to steal; what follows is counted in them already


def wait_briefly() -> None:
    """Let threads sleep after a short wait, unless the environment says how they wait or torch is there already."""
    if "torch" not in sys.modules and not {SPINS, POLICY} & os.environ.keys():
        os.environ[SPINS] = TIMES


def processors_are_shared() -> bool:
    """Return whether threads on all processors would be displaced: by a quota, or by other programs right now.

    Takes `SAMPLE_SECONDS`, in which this process sleeps, unless the system has been idle for a minute.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if not available:
        return False
    quota = processor_quota()
    if quota is not None and quota < available:
        return True
    if os.getloadavg()[0] < IDLE_LOAD:
        return False
    before = _times()
    time.sleep(SAMPLE_SECONDS)
    passed = [end - start for start, end in zip(before, _times(), strict=True)]
    total = sum(passed)
    busy = total - passed[_IDLE] - passed[_IOWAIT] if total else 0
    return bool(total) and available * busy / total > OTHERS


def processor_quota() -> float | None:
    """Return how many processors the control groups of this process allow it, None where they set no limit."""
    found = []
    for line in _system_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / ("cpu" if controllers else "")
        inside = Path(place.lstrip("/"))
        limits = (_limit(root / folder) for folder in (inside, *inside.parents))
        found += [limit for limit in limits if limit is not None]
    return min(found, default=None)


def _limit(folder: Path) -> float | None:
    """Return the quota of one control group in processors: version 2 in one file, version 1 in two."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        words = " ".join(_system_text(folder / name) for name in names).split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            return int(words[0]) / int(words[1])
    return None


class ProcessorShare:
    """Count the share of processor time that the threads of this process get, from the moment this object is made."""

    def __init__(self) -> None:
        self._threads, self._system = _threads(), _times()

    def so_far(self) -> float | None:
        """Return the share, from 0 to 1; None where the system does not count it, or nothing has run."""
        ran = waited = 0
        for thread, (running, waiting) in _threads().items():
            before = self._threads.get(thread, (0, 0))
            ran, waited = ran + running - before[0], waited + waiting - before[1]
        if ran <= 0:
            return None
        passed = [end - start for start, end in zip(self._system, _times(), strict=True)]
        busy = sum(passed) - passed[_IDLE] - passed[_IOWAIT]
        stolen = passed[_STEAL] / busy if busy > 0 else 0.0
        return ran / (ran + max(0, waited)) * (1 - stolen)


def _threads() -> dict[str, tuple[int, int]]:
    """Return nanoseconds that each thread of this process has run, and has waited for a processor."""
    tasks = Path("/proc/self/task")
    folders = list(tasks.iterdir()) if tasks.is_dir() else []
    counts = {folder.name: _system_text(folder / "schedstat").split() for folder in folders}
    return {name: (int(ran[0]), int(ran[1])) for name, ran in counts.items() if len(ran) == 3}


def _times() -> list[int]:
    """Return the time that the processors of this process have spent, by kind, as /proc/stat counts it."""
    totals = [0] * _COLUMNS
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    ours = {f"cpu{number}" for number in allowed}
    for line in _system_text(Path("/proc/stat")).splitlines():
        name, *numbers = line.split()
        if name in ours:
            totals = [total + int(number) for total, number in zip(totals, numbers, strict=False)]
    return totals


def _system_text(path: Path) -> str:
    """Return what the system says in a file of its own, "" where it has no such file or does not let us read it."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
