"""The journal of a run: what is done, so that the same command goes on after any kill.

Weights go straight into the preallocated files of the stage; a unit of work (the tensors outside of the blocks, or
one block) is done when its bytes are on the disk and its line is in the journal, in that order. A fingerprint over
everything that decides a byte of the result (recipe, source, calibration tokens, versions) guards against going on
with something else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge.errors import IntegrityError

FINGERPRINT = "fingerprint.json"
JOURNAL = "journal.jsonl"


class Workspace:
    """The journal directory beside an output. The caller holds the output's lock."""

    def __init__(self, directory: Path, fingerprint: Mapping[str, str]) -> None:
        """Open a fresh journal, or the one of the same run.

        Raises:
            IntegrityError: the directory belongs to a run that differs; the message names in what.
        """
        self.directory = directory
        self.done: dict[str, dict[str, Any]] = {}
        path = directory / FINGERPRINT
        if path.exists():
            self._check(path, fingerprint)
            self.done = self._read()
        else:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            _write_durably(path, json.dumps(dict(fingerprint), indent=1, sort_keys=True).encode())
        self.resumed = bool(self.done)
        self._journal = (directory / JOURNAL).open("ab")

    def _check(self, path: Path, fingerprint: Mapping[str, str]) -> None:
        try:
            earlier = json.loads(path.read_bytes())
        except ValueError:
            earlier = {}
        keys = sorted({*earlier, *fingerprint})
        differ = [key for key in keys if earlier.get(key) != fingerprint.get(key)]
        if differ:
            raise IntegrityError(
                f"{self.directory}: holds an unfinished run that differs in: {', '.join(differ)}",
                "finish it with its own command, or delete that directory to start afresh",
                file=str(path),
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        """Read whole lines; a line cut by a kill is dropped, and its unit is done again."""
        path = self.directory / JOURNAL
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        records = [json.loads(line) for line in lines[:-1]]
        if lines and lines[-1]:
            with path.open("r+b") as file:
                file.truncate(sum(len(line) + 1 for line in lines[:-1]))
        return {record["unit"]: record for record in records}

    def commit(self, unit: str, record: Mapping[str, Any]) -> None:
        """Write one line for a unit whose bytes are already on the disk."""
        entry = {"unit": unit, **record}
        self._journal.write(json.dumps(entry, sort_keys=True).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self.done[unit] = entry

    def close(self) -> None:
        """Close the journal and keep it: the run can be resumed."""
        self._journal.close()

    def remove(self) -> None:
        """Close the journal and delete it: the run is published."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
