"""Claims: processes on one directory share the units of a run, by renames alone.

A shared run has a directory with a random name. In it every unit has one, whose name says how far the unit is; it
passes from hand to hand by renames, of which the file system lets exactly one succeed:

    0003.0.free -> 0003.1.held    claimed
    0003.1.held -> 0003.2.held    taken over from a worker that does not respond
    0003.1.held -> 0003.1.free    given back
    0003.1.held -> 0003.1.done    finished

The number in the middle is the generation, which no two claims of a unit share. A worker writes to files that bear its
generation, and reaches them by the name of its claim. Once the claim was taken over, that name is gone: the worker
finishes nothing any more, and what it still writes to files that it has open nobody reads.

A worker counts while it works. Others watch the count by their own monotonic clocks, so that clocks need not agree; a
claim whose count has stood still for `LEASE_SECONDS` may be taken over.
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
    FINGERPRINT,
    check_same,
    damaged,
    line_of,
    record_of,
    write_durably,
    write_fingerprint,
)
from quantforge.files.disk import DISK, create_fresh, make_folder, open_existing, writing
from quantforge.files.lock import Watch
from quantforge.files.opener import FILES
from quantforge_files.roles import JOURNAL as JOURNAL_ROLE

LEASE_SECONDS = 30.0
BEAT_SECONDS = 1.0
_PLACE = re.compile(r"(\d{4,})\.(\d+)\.(free|held|done)")
_RUN = re.compile("[0-9a-f]{16}")
_FILE = re.compile(r"\d+\.(data|record|beats|new)")


class State(StrEnum):
    """Progress of a unit."""

    FREE = "free"
    HELD = "held"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class UnitDirectory:
    """The directory of a unit, by what its name says."""

    unit: int
    generation: int
    state: State

    @property
    def name(self) -> str:
        """Return the name of the directory."""
        return f"{self.unit:04}.{self.generation}.{self.state}"


class Claim:
    """One unit claimed by this process, as a context manager.

    Leaving it without `finish` gives the unit back. If the claim was taken over meanwhile, errors of the work, whose
    files are gone, are dropped, and ``lost`` says so.

    Attributes:
        unit: the position of the unit in the list.
        directory: where the files of the claim are.
        lost: whether the claim was taken over.
    """

    def __init__(self, root: Path, place: UnitDirectory) -> None:
        self._root, self._place = root, place
        self.unit = place.unit
        self.directory = root / place.name
        self.lost = False
        self._finished = False
        self._ends = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def file(self, what: str) -> str:
        """Return the name of a file of this claim."""
        return f"{self._place.generation}.{what}"

    def __enter__(self) -> Self:
        self._beats.start()
        return self

    def __exit__(self, _: object, error: object, *__: object) -> bool:
        self._ends.set()
        self._beats.join()
        if not self._finished:
            self._move(State.FREE)
        return self.lost and isinstance(error, QuantForgeError | OSError)

    def finish(self, record: Mapping[str, Any]) -> None:
        """Mark the unit as done, with its record; its files are on the disk already.

        Raises:
            ResourceError: the disk is full, or the claim was taken over before the record was written.
        """
        with writing(self.directory, 0):
            write_durably(self.directory / self.file("record"), line_of(record))
        self._finished = self._move(State.DONE)
        if self._finished:
            with writing(self._root, 0):
                DISK.sync(self._root)

    def _move(self, state: State) -> bool:
        self.lost = not _renamed(self._root, self._place, replace(self._place, state=state))
        return not self.lost

    def _beat(self) -> None:
        """Increment the heartbeat until the claim ends or is taken over."""
        count = 0
        with suppress(OSError):
            beats = self.directory / self.file("beats")
            descriptor = create_fresh(beats)
            while True:
                count += 1
                DISK.write_at(descriptor, memoryview(str(count).encode()), 0)
                os.close(descriptor)
                if self._ends.wait(BEAT_SECONDS):
                    return
                descriptor = open_existing(beats)


class Claims:
    """The units that several processes share, in a directory.

    Args:
        directory: holds that of the run.
        names: of the units, in order.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory, self.names = directory, names
        self._run: Path | None = None
        self._watch = Watch()

    @property
    def run(self) -> Path | None:
        """Return the directory of the run, the first found or the one that `prepare` makes; None without one."""
        if self._run is None:
            names = [name for name in _folders(self.directory) if _RUN.fullmatch(name)]
            self._run = self.directory / names[0] if names else None
        return self._run

    @property
    def there(self) -> bool:
        """Return whether the shared run exists: not before the first worker, nor after the end."""
        return self.run is not None and self.run.is_dir()

    def prepare(self, fingerprint: Mapping[str, str]) -> None:
        """Make the directory, whole or not at all. The caller holds the lock of the output.

        Raises:
            IntegrityError: it is there, and of a run that differs.
            RefusedError: somebody's files are there.
            ResourceError: the disk is full.
        """
        if not self.there:
            self._check_own()
            begun = self.directory.with_name(f"{self.directory.name}.new")
            with writing(self.directory.parent, 0):
                shutil.rmtree(begun, ignore_errors=True)
                make_folder(begun)
                run = begun / secrets.token_hex(8)
                make_folder(run)
                for unit in range(len(self.names)):
                    make_folder(run / UnitDirectory(unit, 0, State.FREE).name)
                write_fingerprint(run, fingerprint)
                DISK.sync(begun)
                DISK.rename(begun, self.directory)
                DISK.sync(self.directory.parent)
            self._run = self.directory / run.name
        self.check(fingerprint)

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Refuse a directory that belongs to a different run; accept a missing one.

        Raises:
            IntegrityError: naming in what the two differ.
        """
        if self.run is None:
            return
        try:
            check_same(self.run / FINGERPRINT, fingerprint, self.directory)
        except IntegrityError:
            if self.there:
                raise

    def _check_own(self) -> None:
        """Refuse an existing directory that is not a shared run."""
        if self.directory.is_dir() and any(self.directory.iterdir()):
            raise RefusedError.at(
                self.directory,
                "is no directory of a shared run",
                f"move it away: mv {self.directory} ELSEWHERE",
            )

    def check_there(self) -> None:
        """Refuse to continue a run that ended without a result.

        Raises:
            IntegrityError: the directory is gone.
        """
        if not self.there:
            raise IntegrityError.at(
                self.directory,
                "the run that was shared here is over and left no result",
                "another process says why, or somebody has removed it; run the command again to begin afresh",
            )

    def take(self, names: Collection[str]) -> Claim | None:
        """Claim one of these units that is open; None if there is none at the moment.

        Raises:
            IntegrityError: a unit is missing.
        """
        for place in self._open(names):
            mine = UnitDirectory(place.unit, place.generation + 1, State.HELD)
            if self.run is not None and _renamed(self.run, place, mine):
                _clear(self.run / mine.name)
                return Claim(self.run, mine)
        return None

    def is_open(self, names: Collection[str]) -> bool:
        """Return whether any of these units is free, or held by a worker that does not respond; errors as `take`."""
        return any(True for _ in self._open(names))

    def done(self) -> dict[str, UnitDirectory]:
        """Return the directories of the finished units, by the name of the unit."""
        places = (place for place in self._places() if place.state is State.DONE)
        return {self.names[place.unit]: place for place in places}

    def _open(self, names: Collection[str]) -> Iterator[UnitDirectory]:
        places = list(self._places())
        still = self._watch.seconds_unchanged("units", len(places))
        if self.there and len(places) < len(self.names) and still > LEASE_SECONDS:
            raise damaged(self.directory, self.directory)
        for place in places:
            held = place.state is State.HELD and not self._silent(place)
            if self.names[place.unit] in names and place.state is not State.DONE and not held:
                yield place

    def finished(self) -> dict[str, tuple[dict[str, Any], Path]]:
        """Return the record of every finished unit and the path of its file ``data``, by the name of the unit.

        Raises:
            IntegrityError: a record is damaged.
        """
        found = {}
        for name, place in self.done().items():
            assert self.run is not None  # else none is finished
            path = self.run / place.name / f"{place.generation}.record"
            try:
                line = FILES.read(path, JOURNAL_ROLE, self.directory).removesuffix(b"\n")
            except InputError as error:
                raise damaged(path, self.directory) from error
            found[name] = (record_of(line, path, self.directory), path.with_suffix(".data"))
        return found

    def remove(self) -> None:
        """Remove everything: the run is published, or cannot be finished."""
        over = self.directory.with_name(f"{self.directory.name}.over")
        shutil.rmtree(over, ignore_errors=True)
        with suppress(OSError):  # in one step, so that nobody takes half of it for the whole
            DISK.rename(self.directory, over)
        for left in (over, self.directory.with_name(f"{self.directory.name}.new")):
            shutil.rmtree(left, ignore_errors=True)

    def _places(self) -> Iterator[UnitDirectory]:
        """Yield the units as they are now, in order; one that is just being renamed may be missing."""
        for name in _folders(self.run) if self.run is not None else ():
            if (found := _PLACE.fullmatch(name)) and int(found[1]) < len(self.names):
                yield UnitDirectory(int(found[1]), int(found[2]), State(found[3]))

    def _silent(self, place: UnitDirectory) -> bool:
        assert self.run is not None
        beats = self.run / place.name / f"{place.generation}.beats"
        try:
            count = FILES.read(beats, JOURNAL_ROLE, self.directory)
        except QuantForgeError:  # not begun to count, just being counted, or not there any more
            count = b""
        return self._watch.seconds_unchanged(place, count) > LEASE_SECONDS


def _renamed(root: Path, before: UnitDirectory, after: UnitDirectory) -> bool:
    """Rename a directory; return whether it was still there."""
    with writing(root, 0):
        try:
            DISK.rename(root / before.name, root / after.name)
        except FileNotFoundError:
            return False
    return True


def _folders(directory: Path) -> list[str]:
    """Return the names of the real directories in a real directory, sorted; none where it is not there."""
    if directory.is_symlink():
        return []
    try:
        with os.scandir(directory) as entries:
            return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _clear(directory: Path) -> None:
    """Remove what earlier claims of a unit have left; somebody else may have taken it over already."""
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            if _FILE.fullmatch(path.name):
                path.unlink()
