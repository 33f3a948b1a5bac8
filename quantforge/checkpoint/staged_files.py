"""Files of a stage: each is written whole and durable, or is absent.

A file has another name until its last byte is synced, so that a run that is killed leaves no half of one.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from quantforge.checkpoint.disk import Disk, folder, free_bytes, fresh, no_space, writing
from quantforge.checkpoint.files import FILES, changed
from quantforge.checkpoint.reader import role_of
from quantforge.errors import RefusedError
from quantforge_files import Stamp, roles

_COPY_BYTES = 2**20
PART = ".part"  # ends the name of a file that is not whole


class StagedFiles:
    """The files below one directory, ``path``, to which nothing else writes."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._written: set[str] = set()

    def check_space(self, needed: int) -> None:
        """Refuse to begin when ``needed`` bytes, less those already staged, do not fit.

        Raises:
            ResourceError: with the bytes needed and free.
        """
        files = (path.stat() for path in self.path.rglob("*") if path.is_file())
        held = sum(found.st_blocks * 512 for found in files)  # POSIX: whatever the block size
        if free_bytes(self.path) + held < needed:
            raise no_space(self.path, needed - held, "the result does not fit")

    def write_file(self, relative: str, data: bytes) -> None:
        """Write a file of the result, durable and whole: it is absent until all of it is there.

        Raises:
            ResourceError: the disk is full or fails.
        """
        target = self._target(relative)
        part = target.with_name(target.name + PART)
        with writing(target, len(data)):
            self._make_folders(relative)
            descriptor = fresh(part)
            try:
                self._disk.write_at(descriptor, memoryview(data), 0)
                self._disk.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._disk.rename(part, target)
        self._written.add(relative)

    def copy_file(self, source: Path, relative: str, root: Path | None = None) -> str:
        """Copy a file of a model byte for byte, under the rules of `quantforge.checkpoint.files`; return its SHA-256.

        Raises:
            InputError: ``source`` is a link out of its model (``root``) or no regular file.
            IntegrityError: it changed while it was copied.
            ResourceError: the disk is full or fails.
        """
        target = self._target(relative)
        part = target.with_name(target.name + PART)
        digest = hashlib.sha256()
        with FILES.opened(
            source, role_of(relative) or roles.WEIGHTS, root or source.parent
        ) as reading:
            stamp = Stamp.of(reading)
            with writing(target, stamp.size):
                self._make_folders(relative)
                descriptor = fresh(part)
                try:
                    done = 0
                    while data := os.pread(reading, min(_COPY_BYTES, stamp.size - done), done):
                        digest.update(data)
                        self._disk.write_at(descriptor, memoryview(data), done)
                        done += len(data)
                    self._disk.fsync(descriptor)
                finally:
                    os.close(descriptor)
            if done != stamp.size or Stamp.of(reading) != stamp:
                part.unlink()
                raise changed(source)
            with writing(target, 0):
                self._disk.rename(part, target)
        self._written.add(relative)
        return digest.hexdigest()

    def check_whole(self, others: Collection[str]) -> None:
        """Refuse files that this run has not written, but for ``others``: they would be published with the result.

        What an interrupted run has left half written is removed.

        Raises:
            RefusedError: naming one, and where it lies.
        """
        known = {*self._written, *others}
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if name in known or (path.is_dir() and not path.is_symlink()):
                continue
            if name.endswith(PART) and name.removesuffix(PART) in known:
                path.unlink()
                continue
            raise RefusedError(
                f"{path}: is no file of the result, and would be published with it",
                f"the same command goes on without it: mv {shlex.quote(str(path))} ELSEWHERE",
                file=str(path),
            )

    @property
    def empty(self) -> bool:
        """Return whether nothing is staged: a journal of earlier work is void then."""
        return not any(self.path.iterdir())

    def clear(self) -> None:
        """Begin afresh: what another run has staged must not become part of this result."""
        remove(self.path)
        folder(self.path)

    def discard(self) -> None:
        """Remove the stage and all that was staged."""
        remove(self.path)

    def _make_folders(self, relative: str) -> None:
        """Make the directories of a file of the result; a link in place of one is an error."""
        made = self.path
        for part in PurePosixPath(relative).parts[:-1]:
            made = made / part
            folder(made)

    def _target(self, relative: str) -> Path:
        parts = PurePosixPath(relative).parts
        if not parts or parts[0] == "/" or ".." in parts or "\\" in relative or "\0" in relative:
            raise ValueError(f"{relative!r} is no place inside the output")
        return self.path.joinpath(*parts)


def remove(directory: Path) -> None:
    """Remove a directory of the run with all that it holds, if it is there."""
    if directory.exists():
        shutil.rmtree(directory)
