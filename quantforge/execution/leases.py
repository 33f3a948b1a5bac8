"""Lease of one unit: a directory that a worker holds by its name, for as long as it is heard of (see `claims`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from quantforge.checkpoint.disk import DISK, existing, fresh, writing
from quantforge.errors import QuantForgeError
from quantforge.execution.journal import line_of, write_durably

BEAT_SECONDS = 1.0


class State(StrEnum):
    """How far a unit is."""

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
    """One unit in the hands of this process, as a context manager.

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
        """Hand in the unit, whose files are on the disk, with its record.

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
        self.lost = not renamed(self._root, self._place, replace(self._place, state=state))
        return not self.lost

    def _beat(self) -> None:
        """Count until the claim ends or is taken over."""
        count = 0
        with suppress(OSError):
            beats = self.directory / self.file("beats")
            descriptor = fresh(beats)
            while True:
                count += 1
                DISK.write_at(descriptor, memoryview(str(count).encode()), 0)
                os.close(descriptor)
                if self._ends.wait(BEAT_SECONDS):
                    return
                descriptor = existing(beats)


def renamed(root: Path, before: UnitDirectory, after: UnitDirectory) -> bool:
    """Rename a directory; return whether it was still there."""
    with writing(root, 0):
        try:
            DISK.rename(root / before.name, root / after.name)
        except FileNotFoundError:
            return False
    return True
