"""Jobs: further processes of the command that is running, which share its work, say nothing, and end with it.

Each has a pipe of its parent as its stdin: where the parent has ended in whatever way, nothing can be read there. What
fails in one of them is done by the others, the parent among them, which says it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from quantforge.cli import ranks
from quantforge.cli.console import Console
from quantforge.errors import ResourceError
from quantforge.settings import processors

# Modules are found where the parent finds them: not in the directory in which it is called.
_PROGRAM = """
import sys
sys.path[:] = {!r}
from quantforge.cli import jobs
from quantforge.__main__ import main
jobs.TAKING_PART.set()
main()
"""
TAKING_PART = threading.Event()  # set in a further process, for which the one that was typed speaks


def silent() -> bool:
    """Return whether another process speaks for this one."""
    return TAKING_PART.is_set() or ranks.silent()


def console(*, as_json: bool, quiet: bool, machine: bool) -> Console:
    """Return the console of this process, on which it says nothing but errors where another speaks for it."""
    if silent():
        return Console(quiet=True)
    return Console(as_json=as_json, quiet=quiet or as_json, machine=machine)


def threads_of(threads: int | None, jobs: int) -> int | None:
    """Return the number of threads of each process: its share of the processors where nobody says."""
    return threads if threads or jobs == 1 else max(1, processors() // jobs)


@contextmanager
def started(jobs: int, note: Callable[[str], None]) -> Iterator[None]:
    """Start all processes but this one, and wait for their ends; where this one fails, they are told to stop.

    Args:
        jobs: processes in all.
        note: is told of those that failed, when this one has not.

    Raises:
        ResourceError: the system starts no further process.
    """
    if TAKING_PART.is_set():
        threading.Thread(target=_end_with_parent, daemon=True).start()
    if jobs == 1 or silent():
        yield
        return
    others: list[subprocess.Popen[bytes]] = []
    with ExitStack() as waiting:
        try:
            for _ in range(1, jobs):
                others.append(waiting.enter_context(_other()))
            yield
            failed = [code for code in [other.wait() for other in others] if code]
        except BaseException:
            for other in others:
                other.terminate()
            raise
    if failed:
        codes = ", ".join(map(str, failed))
        note(f"{len(failed)} of {jobs} processes failed (exit code {codes}); others did their part")


def _other() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PROGRAM.format(sys.path), *sys.argv[1:]]
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing)
    except OSError as error:
        raise ResourceError(
            f"--jobs: no further process can be started: {error.strerror}", "use fewer"
        ) from error


def _end_with_parent() -> None:
    """Wait for the parent's end, and stop."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
