"""Processors shared with other programs: how threads wait there, and how much processor time they get.

A thread that has finished its part of a matrix product spins until the others have finished theirs. The OpenMP library
that torch brings (GNU's) spins 300,000 times before it sleeps. That takes milliseconds, during which a thread that
another program has preempted cannot resume and finish: with two threads on two busy cores, decoding takes ten times as
long. Large products lose nothing when threads sleep early. Decoding a token takes many small products, and on an idle
machine each would wait for the system to wake the threads. So verbs that decode keep spinning only while no other
program uses the processors. OpenMP reads its settings once, when torch is imported, so the choice is made before that.

Speeds that were measured while other programs ran say little about a model. `ProcessorShare` measures how much
processor time the threads got, as a share of the time in which they could have run. Linux counts, for each thread, the
time that it ran and the time that it was ready to run but waited for a processor (``/proc/PID/task/TID/schedstat``),
and for each processor the time that the hypervisor gave to others (``steal`` in ``/proc/stat``).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

SPINS = "GOMP_SPINCOUNT"
POLICY = "OMP_WAIT_POLICY"
TIMES = "2000"  # spins before a thread sleeps
SAMPLE_SECONDS = 0.1
IDLE_LOAD = 0.2  # load average below which the machine counts as idle, without a sample
OTHERS = 0.25  # our threads are preempted if other programs keep more processors busy than this
FULL_SHARE = 0.9  # below this share of the processor time, a speed is not compared
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of /proc/stat
_COLUMNS = 8  # user to steal; what follows is counted in them already


def wait_briefly() -> None:
    """Let OpenMP threads sleep after `TIMES` spins, unless the environment sets this or torch is imported already."""
    if "torch" not in sys.modules and not {SPINS, POLICY} & os.environ.keys():
        os.environ[SPINS] = TIMES


def processors_are_shared() -> bool:
    """Return whether threads on all processors would be preempted: by a quota, or by other programs right now.

    Sleeps for `SAMPLE_SECONDS` to measure that, unless a quota or a load average below `IDLE_LOAD` decides it.
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
    elapsed = [end - start for start, end in zip(before, _times(), strict=True)]
    total = sum(elapsed)
    busy = total - elapsed[_IDLE] - elapsed[_IOWAIT] if total else 0
    return bool(total) and available * busy / total > OTHERS


def processor_quota() -> float | None:
    """Return how many processors the cgroups of this process allow it, None if they set no limit."""
    quotas = []
    for line in _system_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, cgroup_path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / ("cpu" if controllers else "")
        relative_path = Path(cgroup_path.lstrip("/"))
        limits = (_limit(root / folder) for folder in (relative_path, *relative_path.parents))
        quotas += [limit for limit in limits if limit is not None]
    return min(quotas, default=None)


def _limit(folder: Path) -> float | None:
    """Return the quota of one cgroup in processors, None without one; v2 has it in one file, v1 in two."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        fields = " ".join(_system_text(folder / name) for name in names).split()
        if len(fields) == 2 and all(field.isdecimal() for field in fields) and int(fields[1]):
            return int(fields[0]) / int(fields[1])
    return None


class ProcessorShare:
    """Measure the share of processor time that the threads of this process get, from the creation of this object on."""

    def __init__(self) -> None:
        self._threads, self._system = _threads(), _times()

    def current_share(self) -> float | None:
        """Return the share, from 0 to 1; None if the system does not count it, or no thread has run since."""
        ran = waited = 0
        for thread, (running, waiting) in _threads().items():
            before = self._threads.get(thread, (0, 0))
            ran, waited = ran + running - before[0], waited + waiting - before[1]
        if ran <= 0:
            return None
        elapsed = [end - start for start, end in zip(self._system, _times(), strict=True)]
        busy = sum(elapsed) - elapsed[_IDLE] - elapsed[_IOWAIT]
        stolen = elapsed[_STEAL] / busy if busy > 0 else 0.0
        return ran / (ran + max(0, waited)) * (1 - stolen)


def _threads() -> dict[str, tuple[int, int]]:
    """Return, for each thread of this process, the nanoseconds that it has run and has waited for a processor."""
    tasks = Path("/proc/self/task")
    folders = list(tasks.iterdir()) if tasks.is_dir() else []
    counts = {folder.name: _system_text(folder / "schedstat").split() for folder in folders}
    return {name: (int(ran[0]), int(ran[1])) for name, ran in counts.items() if len(ran) == 3}


def _times() -> list[int]:
    """Return the columns of /proc/stat (user, idle, steal, ...), summed over the processors this process may use."""
    totals = [0] * _COLUMNS
    processor_numbers = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    ours = {f"cpu{number}" for number in processor_numbers}
    for line in _system_text(Path("/proc/stat")).splitlines():
        name, *numbers = line.split()
        if name in ours:
            totals = [total + int(number) for total, number in zip(totals, numbers, strict=False)]
    return totals


def _system_text(path: Path) -> str:
    """Return the text of a file in /proc or /sys, "" if it does not exist or may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
