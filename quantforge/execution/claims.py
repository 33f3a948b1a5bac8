"""Claims: processes that share a run claim its units by renaming directories.

A shared run has a directory with a random name. Each unit has a subdirectory whose name encodes its state. State
changes are renames, of which the file system lets exactly one process succeed:

    0003.0.free -> 0003.1.held    claimed
    0003.1.held -> 0003.2.held    taken over from a worker that does not respond
    0003.1.held -> 0003.1.free    given back
    0003.1.held -> 0003.1.done    finished

The number in the middle is the generation; no two claims of a unit have the same one. A worker prefixes its files with
its generation and opens them through the directory name of its claim. After a takeover that name no longer exists, so
the previous worker cannot finish the unit, and nobody reads what it still writes to files that it has open.

A worker increments a heartbeat counter while it works. Other processes watch the counter with their own monotonic
clocks, so clocks need not agree. A claim whose counter has not changed for `LEASE_SECONDS` may be taken over.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from quantforge.errors import InputError, IntegrityError, QuantForgeError, RefusedError
from quantforge.execution.journal import (
    FINGERPRINT_FILE,
    check_fingerprint,
    damaged_journal_error,
    decode_line,
    encode_line,
    write_durably,
    write_fingerprint,
)
from quantforge.files.disk import DISK, make_directory, open_existing, recreate_file, write_errors
from quantforge.files.lock import ChangeTracker
from quantforge.files.opener import FILES
from quantforge_files.roles import JOURNAL as JOURNAL_ROLE

LEASE_SECONDS = 30.0
HEARTBEAT_SECONDS = 1.0
_UNIT_DIRECTORY_NAME = re.compile(r"(\d{4,})\.(\d+)\.(free|held|done)")
_RUN_NAME = re.compile("[0-9a-f]{16}")
_CLAIM_FILE_NAME = re.compile(r"\d+\.(data|record|beats|new)")


class UnitState(StrEnum):
    """State of a unit: not claimed, claimed by a worker, or finished."""

    FREE = "free"
    HELD = "held"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class UnitDirectory:
    """Parsed name of the directory of a unit."""

    unit: int
    generation: int
    state: UnitState

    @property
    def name(self) -> str:
        """Return the name of the directory."""
        return f"{self.unit:04}.{self.generation}.{self.state}"


class Claim:
    """Claim of one unit by this process; a context manager that gives the unit back unless `finish` was called.

    If another process took the claim over in the meantime, errors raised by the work are suppressed, because its files
    no longer exist, and ``lost`` is set.

    Attributes:
        unit: position of the unit in the list of units.
        directory: directory for the files of the claim.
        lost: whether another process took the claim over.
    """

    def __init__(self, root: Path, unit_directory: UnitDirectory) -> None:
        self._root, self._unit_directory = root, unit_directory
        self.unit = unit_directory.unit
        self.directory = root / unit_directory.name
        self.lost = False
        self._finished = False
        self._stop = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._count_heartbeats, daemon=True)

    def file(self, suffix: str) -> str:
        """Return the name of a file of this claim with the given suffix."""
        return f"{self._unit_directory.generation}.{suffix}"

    def __enter__(self) -> Self:
        self._heartbeat_thread.start()
        return self

    def __exit__(self, _: object, error: object, *__: object) -> bool:
        self._stop.set()
        self._heartbeat_thread.join()
        if not self._finished:
            self._rename(UnitState.FREE)
        return self.lost and isinstance(error, QuantForgeError | OSError)

    def finish(self, record: Mapping[str, Any]) -> None:
        """Mark the unit as done and store its record; its data files must already be on disk.

        Raises:
            ResourceError: the disk is full, or the claim was taken over before the record was written.
        """
        with write_errors(self.directory, 0):
            write_durably(self.directory / self.file("record"), encode_line(record))
        self._finished = self._rename(UnitState.DONE)
        if self._finished:
            with write_errors(self._root, 0):
                DISK.sync(self._root)

    def _rename(self, state: UnitState) -> bool:
        self.lost = not _try_rename(
            self._root, self._unit_directory, replace(self._unit_directory, state=state)
        )
        return not self.lost

    def _count_heartbeats(self) -> None:
        """Increment the heartbeat counter until the claim ends or is taken over."""
        count = 0
        with suppress(OSError):
            heartbeat_file = self.directory / self.file("beats")
            descriptor = recreate_file(heartbeat_file)
            while True:
                count += 1
                DISK.write_at(descriptor, memoryview(str(count).encode()), 0)
                os.close(descriptor)
                if self._stop.wait(HEARTBEAT_SECONDS):
                    return
                descriptor = open_existing(heartbeat_file)


class Claims:
    """Units that several processes share, stored as a directory tree.

    Args:
        directory: parent of the directory of the run.
        names: names of the units, in order.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory, self.names = directory, names
        self._run: Path | None = None
        self._watch = ChangeTracker()

    @property
    def run(self) -> Path | None:
        """Return the directory of the run: the first one found, or the one that `prepare` created; else None."""
        if self._run is None:
            names = [name for name in _subdirectories(self.directory) if _RUN_NAME.fullmatch(name)]
            self._run = self.directory / names[0] if names else None
        return self._run

    @property
    def exists(self) -> bool:
        """Return whether the directory of the shared run exists, from its first worker to its end."""
        return self.run is not None and self.run.is_dir()

    def prepare(self, fingerprint: Mapping[str, str]) -> None:
        """Create the directory of the run atomically. The caller holds the lock of the output.

        Raises:
            IntegrityError: the directory exists and belongs to a different run.
            RefusedError: the directory contains unrelated files.
            ResourceError: the disk is full.
        """
        if not self.exists:
            self._refuse_foreign_files()
            new_directory = self.directory.with_name(f"{self.directory.name}.new")
            with write_errors(self.directory.parent, 0):
                shutil.rmtree(new_directory, ignore_errors=True)
                make_directory(new_directory)
                run = new_directory / secrets.token_hex(8)
                make_directory(run)
                for unit in range(len(self.names)):
                    make_directory(run / UnitDirectory(unit, 0, UnitState.FREE).name)
                write_fingerprint(run, fingerprint)
                DISK.sync(new_directory)
                DISK.rename(new_directory, self.directory)
                DISK.sync(self.directory.parent)
            self._run = self.directory / run.name
        self.check_fingerprint(fingerprint)

    def check_fingerprint(self, fingerprint: Mapping[str, str]) -> None:
        """Check that an existing directory belongs to this run; accept a missing one.

        Raises:
            IntegrityError: the fingerprints differ; the message lists the differences.
        """
        if self.run is None:
            return
        try:
            check_fingerprint(self.run / FINGERPRINT_FILE, fingerprint, self.directory)
        except IntegrityError:
            if self.exists:
                raise

    def _refuse_foreign_files(self) -> None:
        """Refuse an existing directory that does not hold a shared run."""
        if self.directory.is_dir() and any(self.directory.iterdir()):
            raise RefusedError.at(
                self.directory,
                "is no directory of a shared run",
                f"move it away: mv {self.directory} ELSEWHERE",
            )

    def check_exists(self) -> None:
        """Refuse to continue a run that ended without a result.

        Raises:
            IntegrityError: the directory no longer exists.
        """
        if not self.exists:
            raise IntegrityError.at(
                self.directory,
                "the run that was shared here is over and left no result",
                "another process says why, or somebody has removed it; run the command again to begin afresh",
            )

    def claim(self, names: Collection[str]) -> Claim | None:
        """Claim one of the given units; return None if none can be claimed at the moment.

        Raises:
            IntegrityError: the directory of a unit is missing.
        """
        for unit_directory in self._claimable_directories(names):
            claimed = UnitDirectory(
                unit_directory.unit, unit_directory.generation + 1, UnitState.HELD
            )
            if self.run is not None and _try_rename(self.run, unit_directory, claimed):
                _remove_claim_files(self.run / claimed.name)
                return Claim(self.run, claimed)
        return None

    def has_claimable(self, names: Collection[str]) -> bool:
        """Return whether any of these units is free or held by a worker that does not respond; errors as `claim`."""
        return any(True for _ in self._claimable_directories(names))

    def finished_directories(self) -> dict[str, UnitDirectory]:
        """Return the directories of the finished units, keyed by unit name."""
        unit_directories = (
            unit_directory
            for unit_directory in self._unit_directories()
            if unit_directory.state is UnitState.DONE
        )
        return {
            self.names[unit_directory.unit]: unit_directory for unit_directory in unit_directories
        }

    def _claimable_directories(self, names: Collection[str]) -> Iterator[UnitDirectory]:
        unit_directories = list(self._unit_directories())
        unchanged_seconds = self._watch.seconds_unchanged("units", len(unit_directories))
        if (
            self.exists
            and len(unit_directories) < len(self.names)
            and unchanged_seconds > LEASE_SECONDS
        ):
            raise damaged_journal_error(self.directory, self.directory)
        for unit_directory in unit_directories:
            is_held = unit_directory.state is UnitState.HELD and not self._is_stale(unit_directory)
            if (
                self.names[unit_directory.unit] in names
                and unit_directory.state is not UnitState.DONE
                and not is_held
            ):
                yield unit_directory

    def finished_records(self) -> dict[str, tuple[dict[str, Any], Path]]:
        """Return the record of each finished unit and the path of its ``data`` file, keyed by unit name.

        Raises:
            IntegrityError: a record is damaged.
        """
        unit_records = {}
        for name, unit_directory in self.finished_directories().items():
            assert self.run is not None  # else none is finished
            path = self.run / unit_directory.name / f"{unit_directory.generation}.record"
            try:
                line = FILES.read(path, JOURNAL_ROLE, self.directory).removesuffix(b"\n")
            except InputError as error:
                raise damaged_journal_error(path, self.directory) from error
            unit_records[name] = (
                decode_line(line, path, self.directory),
                path.with_suffix(".data"),
            )
        return unit_records

    def remove(self) -> None:
        """Delete the directory of the run, after the result was published or when the run cannot be finished."""
        renamed_directory = self.directory.with_name(f"{self.directory.name}.over")
        shutil.rmtree(renamed_directory, ignore_errors=True)
        with suppress(OSError):  # in one step, so that no process sees a partial directory
            DISK.rename(self.directory, renamed_directory)
        for directory in (
            renamed_directory,
            self.directory.with_name(f"{self.directory.name}.new"),
        ):
            shutil.rmtree(directory, ignore_errors=True)

    def _unit_directories(self) -> Iterator[UnitDirectory]:
        """Yield the directories of the units in order; one that is being renamed at this moment may be missing."""
        for name in _subdirectories(self.run) if self.run is not None else ():
            if (match := _UNIT_DIRECTORY_NAME.fullmatch(name)) and int(match[1]) < len(self.names):
                yield UnitDirectory(int(match[1]), int(match[2]), UnitState(match[3]))

    def _is_stale(self, unit_directory: UnitDirectory) -> bool:
        assert self.run is not None
        heartbeat_file = self.run / unit_directory.name / f"{unit_directory.generation}.beats"
        try:
            count = FILES.read(heartbeat_file, JOURNAL_ROLE, self.directory)
        except QuantForgeError:  # not created yet, being written, or already removed
            count = b""
        return self._watch.seconds_unchanged(unit_directory, count) > LEASE_SECONDS


def _try_rename(root: Path, before: UnitDirectory, after: UnitDirectory) -> bool:
    """Rename a directory; return False if it no longer exists."""
    with write_errors(root, 0):
        try:
            DISK.rename(root / before.name, root / after.name)
        except FileNotFoundError:
            return False
    return True


def _subdirectories(directory: Path) -> list[str]:
    """Return the sorted names of the subdirectories, ignoring symbolic links; empty if the directory does not exist."""
    if directory.is_symlink():
        return []
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _remove_claim_files(directory: Path) -> None:
    """Delete files left by earlier claims of a unit; the directory may already have been taken over."""
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            if _CLAIM_FILE_NAME.fullmatch(path.name):
                path.unlink()
