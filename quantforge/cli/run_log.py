"""Reports of a run: its progress for people, and the file of ``--log`` for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from quantforge.artifacts.number_text import size
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import shown
from quantforge.errors import UsageError
from quantforge.files.disk import append, check_new, open_existing
from quantforge.plans import Plan, decisions
from quantforge.progress import Progress, part_label

_LOG = b'{"part": "'  # how the file of --log begins


class RunLog:
    """Progress for people and, where a file is named, for programs.

    The file holds times, so it must not be inside of a result. A run that is resumed continues it; a file that is no
    such log is never written to.

    Raises:
        UsageError: the file would lie in the model.
        InputError: its directory is missing.
        RefusedError: it is there, and no log of a run.
    """

    def __init__(
        self, console: Console, log: Path | None, model: str, *, output_named: bool
    ) -> None:
        self._console, self._log, self._output_named = console, log, output_named
        self._pending: list[str] = []
        self._announced: set[str] = set()
        if log is None:
            return
        self._check_outside(Path(model), "model")
        check_new(log, "--log", overwrite=_is_log(log), adds=True)

    def listeners(self) -> dict[str, Any]:
        """Return the callbacks of `Settings` by which a run reports."""
        return {"progress": self.progress, "announce": self.announce, "note": self._console.note}

    def announce(self, plan: Plan, out: Path) -> None:
        """Keep what was decided for a user who left it open; it is shown when the work begins, not before a refusal.

        Where a mixture is looked for, a likely one is announced first; nothing is shown twice.

        Raises:
            UsageError: the log would lie in the result.
        """
        self._check_outside(out, "result")
        output = () if self._output_named else (f"output: {shown(out)}",)
        notes = [*decisions(plan), *output]
        self._pending = [note for note in notes if note not in self._announced]
        self._announced |= {*notes}

    def progress(self, progress: Progress) -> None:
        """Show where the run is; note a finished part in the log."""
        notes, self._pending = self._pending, []
        for note in notes:
            self._console.note(note)
        self._console.show(progress)
        if not progress.part:
            return
        error = "" if progress.error is None else f"  err {progress.error:.5f}"
        self._console.detail(
            f"{part_label(progress.part)}{error}  {progress.seconds:.1f} s  peak {size(progress.peak_bytes)}"
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
        descriptor = open_existing(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(_LOG), 0) in {b"", _LOG}
    finally:
        os.close(descriptor)
