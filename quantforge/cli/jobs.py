"""Jobs: further processes of the command that is running, which share its work, say nothing, and end with it.

Each has a pipe of its parent as its stdin: where the parent has ended in whatever way, nothing can be read there. What
fails in one of them is done by the others, the parent among them, which says it: with what that one said last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, TypedDict

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
_LAST = 2000  # bytes of what a process said that are looked at: its error and hint stand at the end
TAKING_PART = threading.Event()  # set in a further process, for which the one that was typed speaks


class FailedProcess(TypedDict):
    """A further process that failed: its exit code, negative for a signal, and what it said last."""

    exit_code: int
    said: str


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
def started(jobs: int, note: Callable[[str], None]) -> Iterator[list[FailedProcess]]:
    """Start all processes but this one, and wait for their ends; where this one fails, they are told to stop.

    Args:
        jobs: processes in all.
        note: is told of those that failed, when this one has not.

    Yields:
        A list, which holds those afterwards.

    Raises:
        ResourceError: the system starts no further process.
    """
    if TAKING_PART.is_set():
        threading.Thread(target=_end_with_parent, daemon=True).start()
    failed: list[FailedProcess] = []
    if jobs == 1 or silent():
        yield failed
        return
    others: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    with ExitStack() as waiting:
        try:
            for _ in range(1, jobs):
                words: IO[bytes] = waiting.enter_context(tempfile.TemporaryFile())
                others.append((waiting.enter_context(_other(words)), words))
            yield failed
            for other, said in others:
                if code := other.wait():
                    failed.append({"exit_code": code, "said": _last(said)})
        except BaseException:
            for other, _ in others:
                other.terminate()
            # The pipes close afterwards: a second signal would cut short how they end.
            for other, _ in others:
                other.wait()
            raise
    if failed:
        codes = ", ".join(str(one["exit_code"]) for one in failed)
        why = "".join(f"\n{text}" for text in dict.fromkeys(one["said"] for one in failed) if text)
        note(
            f"{len(failed)} of {jobs} processes failed (exit code {codes}); others did their part{why}"
        )


def _last(said: IO[bytes]) -> str:
    """Return the lines at the end of what a process said."""
    said.seek(max(0, said.seek(0, os.SEEK_END) - _LAST))
    return said.read().decode(errors="replace").strip()


def _other(said: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PROGRAM.format(sys.path), *sys.argv[1:]]
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=said)
    except OSError as error:
        raise ResourceError(
            f"--jobs: no further process can be started: {error.strerror}", "use fewer"
        ) from error


def _end_with_parent() -> None:
    """Wait for the parent's end, and stop."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
