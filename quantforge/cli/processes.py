"""Processes of one command, of which one speaks: those that torchrun starts, and those that ``--jobs`` adds.

torchrun's are called ranks; they share the run (`--join`), or a model that answers, of which each holds a part.

Those of ``--jobs`` (see `started`) share results that are to be made. Each has a pipe of its parent as its stdin: where
the parent has ended in whatever way, nothing can be read there, and it ends too. What fails in one of them is done by
the others, the parent among them, which says it: with what that one said last.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Any, TypedDict

from quantforge.cli.console import Console
from quantforge.cli.options import Given, build_policy
from quantforge.errors import ResourceError, UsageError
from quantforge.files.disk import create
from quantforge.settings import Settings, under_torchrun, usable_processors

OWN_FILE = "TORCHELASTIC_ERROR_FILE"  # in a directory of its own, inside of one for all; torchrun removes them
VERBS = ("quantize", "release", "sweep", "generate")  # whose work ranks share
# Modules are found where the parent finds them: not in the directory in which it is called.
_PROGRAM = """
import sys
sys.path[:] = {!r}
from quantforge.cli import processes
from quantforge.__main__ import main
processes.TAKING_PART.set()
main()
"""
_LAST = 2000  # bytes of what a process said that are looked at: its error and hint stand at the end
TAKING_PART = threading.Event()  # set in a further process, for which the one that was typed speaks


def silent() -> bool:
    """Return whether another process speaks for this one."""
    return TAKING_PART.is_set() or (under_torchrun() and os.environ["RANK"] != "0")


def console(*, as_json: bool, quiet: bool, verbose: bool = False, machine: bool = False) -> Console:
    """Return the console of this process, on which it says nothing but errors where another speaks for it."""
    if silent():
        return Console(quiet=True)
    return Console(as_json=as_json, quiet=quiet or as_json, verbose=verbose, machine=machine)


def console_of(run: Given) -> Console:
    """Return the console of a verb by its options of `options.RUN`."""
    return console(
        as_json=bool(run["as_json"]),
        quiet=bool(run.get("quiet")),
        verbose=bool(run.get("reasons")),
        machine=bool(run.get("json_progress")),
    )


def settings_of(run: Given, console: Console, **more: Any) -> Settings:
    """Return the settings of a run by the verb's options of `options.RUN`, and ``more`` of them."""
    jobs, names = run.get("jobs", 1), ("input_bits", "activations", "offline")
    given = {name: run[name] for name in names if run.get(name) is not None}
    return Settings(
        **{
            "device": own_device(run.get("device", "cpu")),
            "threads": threads_of(run.get("threads"), jobs),
            "join": "join" in run and (bool(run["join"]) or jobs > 1 or under_torchrun()),
            "policy": build_policy(bool(run.get("strict")), run.get("allow")),
            "progress": console.show,
            "note": console.note,
            **given,
            **more,
        }
    )


# ---- torchrun


def check_ranks(arguments: Sequence[str]) -> None:
    """Refuse what the processes of torchrun would each do anew.

    Raises:
        UsageError: another verb than those that are shared.
    """
    if under_torchrun() and arguments[0] not in VERBS:
        raise UsageError(
            f"torchrun: its processes share nothing of '{arguments[0]}'",
            f"torchrun is for {', '.join(VERBS)}",
        )


def own_device(asked: str) -> str:
    """Return the device of this process: of several GPUs in a machine each rank has its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if under_torchrun() and asked == "cuda" else asked


@contextmanager
def only_first_prints() -> Iterator[None]:
    """Drop what processes write to stdout for which another one speaks."""
    if not silent():
        yield
        return
    with redirect_stdout(io.StringIO()):
        yield


def said_already(text: str) -> bool:
    """Return whether another rank on this machine has said the same; from now on this one has."""
    if not under_torchrun() or OWN_FILE not in os.environ:
        return False
    name = f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        os.close(create(Path(os.environ[OWN_FILE]).parents[1] / name))
    except FileExistsError:
        return True
    except (OSError, IndexError):
        pass
    return False


# ---- --jobs


class FailedProcess(TypedDict):
    """A further process that failed: its exit code, negative for a signal, and what it said last."""

    exit_code: int
    said: str


def threads_of(threads: int | None, jobs: int) -> int | None:
    """Return the number of threads of each process: its share of the processors where nobody says."""
    return threads if threads or jobs == 1 else max(1, usable_processors() // jobs)


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
