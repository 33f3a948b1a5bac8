"""Jobs: further processes of the command that is running, which share its work, say nothing, and end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from quantforge.cli import ranks
from quantforge.cli.console import Console
from quantforge.settings import processors

STARTED = "QUANTFORGE_JOB"  # the number of a process that another one has started


def silent() -> bool:
    """Return whether another process speaks for this one."""
    return STARTED in os.environ or ranks.silent()


def console(*, as_json: bool, quiet: bool, machine: bool) -> Console:
    """Return the console of this process, on which it says nothing but errors where another speaks for it."""
    if silent():
        return Console(quiet=True)
    return Console(as_json=as_json, quiet=quiet or as_json, machine=machine)


def threads_of(threads: int | None, jobs: int) -> int | None:
    """Return the number of threads of each process: its share of the processors where nobody says."""
    return threads if threads or jobs == 1 else max(1, processors() // jobs)


@contextmanager
def started(jobs: int) -> Iterator[None]:
    """Start all processes but this one, and wait for their ends; where this one fails, they are told to stop."""
    if jobs == 1 or silent():
        yield
        return
    command = [sys.executable, "-m", "quantforge", *sys.argv[1:]]
    others = [
        subprocess.Popen(
            command, env={**os.environ, STARTED: str(number)}, stdout=subprocess.DEVNULL
        )
        for number in range(1, jobs)
    ]
    try:
        yield
    except BaseException:
        for other in others:
            other.terminate()
        raise
    finally:
        for other in others:
            other.wait()
