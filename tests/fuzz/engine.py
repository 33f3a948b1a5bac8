"""Run a fuzz target on its corpus and on damaged copies, and judge the outcome: see `scripts/fuzz.py`."""

from __future__ import annotations

import random
import resource
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.targets import TARGETS, Target, is_accepted, seeds

SECONDS = 1.0  # of the processor: the machine may be busy
BYTES = 200 << 20
GIVEN_UP = 30  # seconds of the processor after which an input hangs; nothing here waits
_MEMORY = Path("/dev/shm")


@dataclass
class Outcome:
    """The outcome of fuzzing one target."""

    name: str
    executions: int = 0
    accepted: int = 0
    seconds: float = 0.0  # of the processor
    slowest: float = 0.0
    growth: int = 0  # of the peak of memory, bytes
    count: int = 0  # of findings
    # By kind: what, and the input
    findings: dict[str, tuple[str, bytes]] = field(default_factory=dict)


def fuzz(
    name: str, executions: int, seconds: float = float("inf"), seed: int = 0, first: int = 0
) -> Outcome:
    """Run the corpus and then ``executions`` damaged inputs, or as many as fit into ``seconds`` of the processor.

    Inputs are numbered from ``first``; each is a function of target, seed and number.
    """
    corpus, outcome = seeds(name), Outcome(name)
    signal.signal(signal.SIGPROF, _raise_timeout)
    start = time.process_time()
    with scratch() as directory:
        path = Path(directory)
        warm_up(name, path)
        for data in corpus:
            _execute(outcome, TARGETS[name], data, path)
        outcome.executions, outcome.growth, before = 0, 0, peak()
        for number in range(first, first + executions):
            chance = random.Random(f"{name} {seed} {number}")
            data = mutate_bytes(chance.choice(corpus), corpus, chance)
            _execute(outcome, TARGETS[name], data, path)
            outcome.growth = peak() - before
            if outcome.growth > BYTES:
                _record_finding(outcome, data, f"{outcome.growth >> 20} MB")
                before = peak()
            if time.process_time() - start > seconds:
                break
    outcome.seconds = time.process_time() - start
    return outcome


def warm_up(name: str, directory: Path) -> None:
    """Trigger lazy imports, so that no input is charged for them."""
    import torch  # noqa: F401 - some damage reaches code that needs it, the corpus may not

    for data in seeds(name):
        with suppress(Exception):
            TARGETS[name](data, directory)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory for the files of a target, in memory if possible."""
    return tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)


def _execute(outcome: Outcome, target: Target, data: bytes, directory: Path) -> None:
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, GIVEN_UP)
    try:
        outcome.accepted += is_accepted(target, data, directory)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        _record_finding(outcome, data, "".join(traceback.format_exception(error)[-3:]))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    spent = time.process_time() - start
    outcome.executions += 1
    outcome.slowest = max(outcome.slowest, spent)
    if spent > SECONDS:
        _record_finding(outcome, data, f"{spent:.1f} s")


def _record_finding(outcome: Outcome, data: bytes, what: str) -> None:
    """Keep one input of each kind of finding."""
    outcome.count += 1
    outcome.findings.setdefault(what.strip().splitlines()[-1][:60], (what, data))


def _raise_timeout(number: int, frame: object) -> None:
    raise TimeoutError(f"no answer in {GIVEN_UP} s")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
