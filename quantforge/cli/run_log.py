"""Progress of a run: shown to people and, where a file is named, written for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from quantforge.checkpoint.disk import append, check_new, existing
from quantforge.cli.console import Console
from quantforge.errors import UsageError
from quantforge.execution.progress import Progress
from quantforge.execution.units import SHOWN
from quantforge.plans import Plan, decisions
from quantforge.results.significant import size

_LOG = b'{"part": "'  # how a log begins


class RunLog:
    """Progress for people and, where a file is named, for programs.

    The file holds times, so it must not be inside of a result. A run that goes on after an interruption continues it;
    a file that is no such log is never written to.

    Raises:
        UsageError: the file would lie in the model.
        InputError: its directory is missing.
        RefusedError: it is there, and no log of a run.
    """

    def __init__(self, console: Console, log: Path | None, model: str, *, said: bool) -> None:
        self._console, self._log, self._said = console, log, said
        self._to_say: list[str] = []
        self._told: set[str] = set()
        if log is None:
            return
        self._check_outside(Path(model), "model")
        check_new(log, "--log", overwrite=_is_log(log), adds=True)

    def listeners(self) -> dict[str, Any]:
        """Return the settings of a run by which it tells of itself."""
        return {"progress": self.progress, "announce": self.announce, "note": self._console.note}

    def announce(self, plan: Plan, out: Path) -> None:
        """Take what was decided for a user who left it open, to be said when the work begins: not before a refusal.

        Where a mixture is looked for, a likely one is announced first; nothing is said twice.

        Raises:
            UsageError: the log would lie in the result.
        """
        self._check_outside(out, "result")
        said = [*decisions(plan), *(() if self._said else (f"output: {shown(out)}",))]
        self._to_say = [one for one in said if one not in self._told]  # one is announced twice
        self._told |= {*said}

    def progress(self, progress: Progress) -> None:
        """Show where the run is; note a finished part in the log."""
        notes, self._to_say = self._to_say, []
        for note in notes:
            self._console.note(note)
        self._console.show(progress)
        if not progress.part:
            return
        error = "" if progress.error is None else f"  err {progress.error:.5f}"
        said = SHOWN.get(progress.part, progress.part)
        self._console.detail(
            f"{said}{error}  {progress.seconds:.1f} s  peak {size(progress.peak_bytes)}"
        )
        entry = {"part": progress.part, "seconds": round(progress.seconds, 3)}
        entry |= {"error": progress.error, "peak_bytes": progress.peak_bytes}
        if self._log is not None:
            append(self._log, json.dumps(entry).encode() + b"\n")

    def _check_outside(self, place: Path, what: str) -> None:
        if self._log is not None and Path(os.path.realpath(self._log)).is_relative_to(
            os.path.realpath(place)
        ):
            raise UsageError(f"--log {self._log}: is inside of the {what}", "name a file beside it")


def _is_log(path: Path) -> bool:
    """Return whether a file is empty or was begun by a `RunLog`."""
    try:
        descriptor = existing(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(_LOG), 0) in {b"", _LOG}
    finally:
        os.close(descriptor)


def shown(out: Path) -> str:
    """Return a path as it is typed in a shell, with ``./`` before a relative one that does not lead upwards."""
    return str(out) if out.is_absolute() or out.parts[:1] == ("..",) else f"./{out}"


def from_here(path: Path) -> Path:
    """Return a path as it is typed in the working directory: relative where it lies inside of that."""
    here = Path(os.path.realpath(Path.cwd()))
    return path.relative_to(here) if here in path.parents else path
