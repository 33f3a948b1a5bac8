"""The journal of a run: what is done, so that the same command goes on after any kill.

Weights go straight into the preallocated files of the stage; a unit of work (the tensors outside of the blocks, or
one block) is done when its bytes are on the disk and its line is in the journal, in that order. Every line begins with
a digest of itself. A fingerprint over everything that decides a byte of the result (recipe, source, calibration
tokens, device, versions) guards against going on with something else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge.checkpoint.disk import create, existing, folder, fresh, writing
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.foreign_json import parse_object, read_object
from quantforge.errors import InputError, IntegrityError
from quantforge_files.roles import JOURNAL as JOURNAL_ROLE

FINGERPRINT = "fingerprint.json"
JOURNAL = "journal.jsonl"
_DIGEST = 16  # hex digits at the beginning of a line


class Workspace:
    """The journal directory beside an output. The caller holds the output's lock.

    Attributes:
        directory: where it is; hidden states on disk live there too.
        done: the records of the finished units, by unit.
        resumed: whether there were any when it was opened.

    Raises:
        IntegrityError: the directory belongs to a run that differs (the message names in what), or is damaged.
        ResourceError: the disk is full.
    """

    def __init__(self, directory: Path, fingerprint: Mapping[str, str]) -> None:
        self.directory = directory
        self.done: dict[str, dict[str, Any]] = {}
        path = directory / FINGERPRINT
        if path.exists() and self._begun():
            self._check(path, fingerprint)
            self.done = self._read()
        else:
            with writing(directory, 0):
                shutil.rmtree(directory, ignore_errors=True)
                folder(directory)
                _write_durably(path, json.dumps(dict(fingerprint), indent=1).encode())
        self.resumed = bool(self.done)
        with writing(directory / JOURNAL, 0):
            self._journal = _appending(directory / JOURNAL)

    def _begun(self) -> bool:
        """Return whether anything was finished: otherwise there is nothing to go on with, and nothing to lose."""
        try:
            return (self.directory / JOURNAL).stat().st_size > 0
        except OSError:
            return False

    def _check(self, path: Path, fingerprint: Mapping[str, str]) -> None:
        try:
            earlier = read_object(path, JOURNAL_ROLE, self.directory)
        except InputError as error:
            raise self._damaged(path) from error
        keys = sorted({*earlier, *fingerprint})
        differ = [key for key in keys if earlier.get(key) != fingerprint.get(key)]
        if differ:
            raise IntegrityError(
                f"{self.directory}: holds an unfinished run that differs in: {', '.join(differ)}",
                f"finish it with its own command, or start afresh: rm -r {self.directory}",
                file=str(path),
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        """Read whole lines; a line cut by a kill is dropped, and its unit is done again."""
        path = self.directory / JOURNAL
        *lines, rest = (
            FILES.read(path, JOURNAL_ROLE, self.directory).split(b"\n") if path.exists() else [b""]
        )
        records = {}
        for line in lines:
            data = line[_DIGEST + 1 :]
            if _line(data) != line:
                raise self._damaged(path)
            try:
                record = parse_object(data, path, JOURNAL_ROLE, loose=True)
                records[str(record["unit"])] = record
            except (InputError, KeyError) as error:
                raise self._damaged(path) from error
        if rest:
            with writing(path, 0):
                descriptor = existing(path)
                os.ftruncate(descriptor, sum(len(line) + 1 for line in lines))
                os.close(descriptor)
        return records

    def _damaged(self, path: Path) -> IntegrityError:
        return IntegrityError(
            f"{path}: the journal of the interrupted run is damaged",
            f"start afresh: rm -r {self.directory}",
            file=str(path),
        )

    def commit(self, unit: str, record: Mapping[str, Any]) -> None:
        """Write one line for a unit whose bytes are already on the disk."""
        entry = {"unit": unit, **record}
        line = _line(json.dumps(entry, sort_keys=True).encode()) + b"\n"
        with writing(self.directory / JOURNAL, len(line)):
            if os.write(self._journal, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._journal)
        self.done[unit] = entry

    def close(self) -> None:
        """Close the journal and keep it: the run can be resumed."""
        if self._journal >= 0:
            os.close(self._journal)
        self._journal = -1

    def remove(self) -> None:
        """Close the journal and delete it: the run is published, or cannot be finished."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def recorded_fingerprint(directory: Path) -> dict[str, str]:
    """Return the fingerprint of the run that a journal is of; empty if it cannot be read."""
    try:
        return read_object(directory / FINGERPRINT, JOURNAL_ROLE, directory)
    except InputError:
        return {}


def _line(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest()[:_DIGEST].encode() + b" " + data


def _appending(path: Path) -> int:
    """Open a file of the journal for appending."""
    if not os.path.lexists(path):
        os.close(create(path))
    return existing(path, os.O_WRONLY | os.O_APPEND)


def _write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    descriptor = fresh(temporary)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
