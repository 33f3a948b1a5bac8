"""Stamps of open files, and files that are opened again: the same content, or an error."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantforge_files import system


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of the content of an open file, known without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Stamp:
        """Return the stamp of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@contextmanager
def reopened(path: Path, stamp: Stamp | None, changed: Callable[[], Exception]) -> Iterator[int]:
    """Open a file that was read before, by its real path, and yield the descriptor.

    Raises:
        changed: at the end of the block, if the file was replaced, truncated or written to since its stamp was taken.
    """
    try:
        descriptor = os.open(path, system.READ)
    except OSError as error:
        raise changed() from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise changed()
        yield descriptor
        if stamp is not None and Stamp.of(descriptor) != stamp:
            raise changed()
    finally:
        os.close(descriptor)
