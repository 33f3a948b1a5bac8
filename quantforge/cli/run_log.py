"""Progress of a run on the console, and in the file of ``--log``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from quantforge.artifacts.number_text import size
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import display_path
from quantforge.errors import UsageError
from quantforge.files.disk import append_to_file, check_new_file, open_existing
from quantforge.plans import Plan, decisions
from quantforge.progress import Progress, part_label

_LOG_START = b'{"part": "'  # start of the file of --log


class RunLog:
    """Listener that reports the progress of a run on the console and to a log file.

    The file contains times, so it must not be inside of a result. A resumed run appends to it; a file that is not such
    a log is never changed.

    Raises:
        UsageError: the file would be inside of the model.
        InputError: its directory is missing.
        RefusedError: the file exists and is not a log of a run.
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
        check_new_file(log, "--log", overwrite=_is_log(log), appends=True)

    def listeners(self) -> dict[str, Any]:
        """Return the callbacks for `Settings` that a run reports to."""
        return {"progress": self.progress, "announce": self.announce, "note": self._console.note}

    def announce(self, plan: Plan, out: Path) -> None:
        """Store the plan's decisions, to show them when the work begins, but not before an error.

        If a mixture is searched, an estimated one is announced first; nothing is shown twice.

        Raises:
            UsageError: the log would be inside of the result.
        """
        self._check_outside(out, "result")
        output = () if self._output_named else (f"output: {display_path(out)}",)
        notes = [*decisions(plan), *output]
        self._pending = [note for note in notes if note not in self._announced]
        self._announced |= {*notes}

    def progress(self, progress: Progress) -> None:
        """Show progress; append a finished part to the log."""
        notes, self._pending = self._pending, []
        for note in notes:
            self._console.note(note)
        self._console.show_progress(progress)
        if not progress.part:
            return
        error = "" if progress.error is None else f"  err {progress.error:.5f}"
        self._console.print_detail(
            f"{part_label(progress.part)}{error}  {progress.seconds:.1f} s  peak {size(progress.peak_bytes)}"
        )
        entry = {"part": progress.part, "seconds": round(progress.seconds, 3)}
        entry |= {"error": progress.error, "peak_bytes": progress.peak_bytes}
        if self._log is not None:
            append_to_file(self._log, json.dumps(entry).encode() + b"\n")

    def _check_outside(self, directory: Path, kind: str) -> None:
        if self._log is not None and Path(os.path.realpath(self._log)).is_relative_to(
            os.path.realpath(directory)
        ):
            raise UsageError(f"--log {self._log}: is inside of the {kind}", "name a file beside it")


def _is_log(path: Path) -> bool:
    """Return whether a file is empty or was written by a `RunLog`."""
    try:
        descriptor = open_existing(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(_LOG_START), 0) in {b"", _LOG_START}
    finally:
        os.close(descriptor)
