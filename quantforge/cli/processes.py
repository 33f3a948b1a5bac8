"""Several processes of one command: ranks of torchrun, and workers of ``--jobs``; only one prints.

Ranks of torchrun share a run (`--join`), or hold parts of a model that generates (tensor parallelism).

Those of ``--jobs`` (see `worker_processes`) share the results to be made. The stdin of each worker is a pipe from its
parent: when the parent has ended in any way, the pipe closes and the worker ends too. The work of a failed worker is
done by the others; the parent reports its last output.
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
from quantforge.cli.options import OptionValues, build_policy
from quantforge.errors import ResourceError, UsageError
from quantforge.files.disk import create_file
from quantforge.settings import Settings, under_torchrun, usable_processors

# Each rank has its own file below a common directory; torchrun removes them.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
SHARED_VERBS = ("quantize", "release", "sweep", "generate")  # verbs whose work ranks can share
# Workers use the import path of the parent, not their working directory.
_WORKER_PROGRAM = """
import sys
sys.path[:] = {!r}
from quantforge.cli import processes
from quantforge.__main__ import main
processes.IS_WORKER.set()
main()
"""
# Size of the end of a worker's stderr that is reported: it has the error and hint
_TAIL_BYTES = 2000
IS_WORKER = threading.Event()  # set in a worker of --jobs, whose parent prints


def is_silent() -> bool:
    """Return whether this process must not print, since another one does."""
    return IS_WORKER.is_set() or (under_torchrun() and os.environ["RANK"] != "0")


def make_console(
    *, as_json: bool, quiet: bool, verbose: bool = False, machine: bool = False
) -> Console:
    """Return the console of this process; if another process prints, it shows only errors."""
    if is_silent():
        return Console(quiet=True)
    return Console(as_json=as_json, quiet=quiet or as_json, verbose=verbose, machine=machine)


def console_from_options(run_options: OptionValues) -> Console:
    """Return the console of a verb from its run options."""
    return make_console(
        as_json=bool(run_options["as_json"]),
        quiet=bool(run_options.get("quiet")),
        verbose=bool(run_options.get("reasons")),
        machine=bool(run_options.get("json_progress")),
    )


def settings_from_options(run_options: OptionValues, console: Console, **extra: Any) -> Settings:
    """Return the settings of a run from the verb's run options; ``extra`` are further settings."""
    jobs, names = run_options.get("jobs", 1), ("input_bits", "activations", "offline")
    given_settings = {
        name: run_options[name] for name in names if run_options.get(name) is not None
    }
    return Settings(
        **{
            "device": rank_device(run_options.get("device", "cpu")),
            "threads": threads_per_process(run_options.get("threads"), jobs),
            "join": "join" in run_options
            and (bool(run_options["join"]) or jobs > 1 or under_torchrun()),
            "policy": build_policy(bool(run_options.get("strict")), run_options.get("allow")),
            "progress": console.show_progress,
            "note": console.note,
            **given_settings,
            **extra,
        }
    )


# ---- torchrun


def check_ranks(arguments: Sequence[str]) -> None:
    """Check that torchrun is used with a verb whose work its ranks can share.

    Raises:
        UsageError: it is used with another verb.
    """
    if under_torchrun() and arguments[0] not in SHARED_VERBS:
        raise UsageError(
            f"torchrun: its processes share nothing of '{arguments[0]}'",
            f"torchrun is for {', '.join(SHARED_VERBS)}",
        )


def rank_device(device: str) -> str:
    """Return the device of this process; under torchrun each rank has its own GPU."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if under_torchrun() and device == "cuda" else device


@contextmanager
def print_only_once() -> Iterator[None]:
    """Drop output to stdout in the body, unless this is the process that prints."""
    if not is_silent():
        yield
        return
    with redirect_stdout(io.StringIO()):
        yield


def is_already_reported(text: str) -> bool:
    """Return whether another rank on this machine has printed a text already; record it if not."""
    if not under_torchrun() or ERROR_FILE_VARIABLE not in os.environ:
        return False
    name = f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        os.close(create_file(Path(os.environ[ERROR_FILE_VARIABLE]).parents[1] / name))
    except FileExistsError:
        return True
    except (OSError, IndexError):
        pass
    return False


# ---- --jobs


class FailedProcess(TypedDict):
    """A failed worker: its exit code (negative for a signal) and the end of its stderr."""

    exit_code: int
    stderr: str


def threads_per_process(threads: int | None, jobs: int) -> int | None:
    """Return the number of threads of each process; by default the processors are split evenly."""
    return threads if threads or jobs == 1 else max(1, usable_processors() // jobs)


@contextmanager
def worker_processes(jobs: int, note: Callable[[str], None]) -> Iterator[list[FailedProcess]]:
    """Start workers and run the body beside them, then wait for them; they are stopped if the body fails.

    Args:
        jobs: total number of processes, including this one.
        note: called with a message about failed workers, if the body succeeds.

    Yields:
        A list that holds the failed workers afterwards.

    Raises:
        ResourceError: a process cannot be started.
    """
    if IS_WORKER.is_set():
        threading.Thread(target=_end_with_parent, daemon=True).start()
    failed_processes: list[FailedProcess] = []
    if jobs == 1 or is_silent():
        yield failed_processes
        return
    workers: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    with ExitStack() as open_workers:
        try:
            for _ in range(1, jobs):
                stderr_file: IO[bytes] = open_workers.enter_context(tempfile.TemporaryFile())
                workers.append(
                    (open_workers.enter_context(_start_worker(stderr_file)), stderr_file)
                )
            yield failed_processes
            for worker, stderr_file in workers:
                if code := worker.wait():
                    failed_processes.append({"exit_code": code, "stderr": _read_tail(stderr_file)})
        except BaseException:
            for worker, _ in workers:
                worker.terminate()
            # The pipes close afterwards: a second signal would interrupt their shutdown.
            for worker, _ in workers:
                worker.wait()
            raise
    if failed_processes:
        codes = ", ".join(str(process["exit_code"]) for process in failed_processes)
        details = "".join(
            f"\n{text}"
            for text in dict.fromkeys(process["stderr"] for process in failed_processes)
            if text
        )
        note(
            f"{len(failed_processes)} of {jobs} processes failed (exit code {codes}); others did their part{details}"
        )


def _read_tail(stderr_file: IO[bytes]) -> str:
    """Return the end of a worker's stderr."""
    stderr_file.seek(max(0, stderr_file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return stderr_file.read().decode(errors="replace").strip()


def _start_worker(stderr_file: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _WORKER_PROGRAM.format(sys.path), *sys.argv[1:]]
    devnull = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=devnull, stderr=stderr_file)
    except OSError as error:
        raise ResourceError(
            f"--jobs: no further process can be started: {error.strerror}", "use fewer"
        ) from error


def _end_with_parent() -> None:
    """Wait until the parent has ended, then stop this process."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
