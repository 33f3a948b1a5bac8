"""All or nothing: a result is staged beside its place and appears there by one rename.

For an output ``DIR/name`` a run keeps all that it needs in ``DIR/.name.qf`` (see `quantforge.checkpoint.lock`), so that
renames stay on one file system: the stage, which becomes the result, and the journal. Both survive an interrupted run,
so that it can be resumed; nothing is left beside a result that is finished.

Files are synced when they are written, directories before the rename, the parent after it, so that even after a power
failure a reader finds the old release, the new one or none, never a mixture. An overwrite swaps the two directories in
one step (renameat2) and then removes the files of the old release, now at the stage's place; where that does not exist
it is refused rather than done in two steps. Before the swap the lock file durably records which directory is being
published (its inode), so that a run that finds a stage after a kill knows whether it is work to resume or the remains
of the old release. Only what the old release's own manifest lists is ever removed (`quantforge.checkpoint.earlier`);
this is looked at before the work, before the swap, and once more after it, when nobody can find the old release by its
name any more: if something was put there in between, the two are swapped back.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from quantforge.checkpoint.disk import DISK, Disk, folder, place_of_run, writing
from quantforge.checkpoint.lock import Lock
from quantforge.checkpoint.result_place import (
    MANIFEST,
    absolute,
    check_apart,
    check_replaceable,
    earlier_release,
    unwritable,
)
from quantforge.checkpoint.staged_files import StagedFiles, remove
from quantforge.errors import RefusedError

STAGE = "stage"  # its name in the directory of a run


class Stage(StagedFiles):
    """The locked stage of one output directory, as a context manager.

    Leaving the ``with`` block keeps a stage that holds files (after an error it can be resumed) and
    frees the lock; `publish` or `discard` end it.

    Args:
        out: the output directory, which need not exist.
        overwrite: whether an earlier release (or an empty directory) at ``out`` may be replaced.
        source: the model that is read, which ``out`` must not touch.

    Raises (name and parent of ``out`` at once, the others on entering):
        UsageError: ``out`` and ``source`` overlap, or ``out`` is no name for a directory.
        InputError: the parent is missing or cannot be written to.
        RefusedError: ``out`` exists and must not be replaced.
        BusyError: another run works on ``out``.
    """

    manifest = MANIFEST  # its name in the stage

    def __init__(
        self, out: Path, overwrite: bool, source: Path | None = None, *, disk: Disk = DISK
    ) -> None:
        self.named, self.out = out, absolute(out)  # as it was given, and where it is
        self._lock = Lock(place_of_run(self.out))
        super().__init__(self._lock.directory / STAGE, disk)
        self.journal = self._lock.directory / "journal"
        self.units = self._lock.directory / "units"  # of a run that several processes share
        self._overwrite = overwrite
        self._source = source

    @property
    def begun(self) -> bool:
        """Return whether an earlier run on the output has not ended, or has just published."""
        return self._lock.directory.exists()

    def check(self) -> None:
        """Refuse a place where no result may lie, before anything is made; errors as on entering."""
        check_apart(self.out, self._source)
        if not self.begun:  # nothing to recover
            self._check_place()

    def __enter__(self) -> Self:
        try:
            self.check()
            published = self._lock.take()
            try:
                self._recover(published)
                self._lock.record(0)
                self._check_place()
                self._prepare()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise unwritable(self.out.parent, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.path.rmdir()  # only if it is empty
        self._lock.release()

    def _recover(self, published: int) -> None:
        """Finish what a kill interrupted in `publish`; the last holder was publishing this inode (or 0)."""
        for place in (self.path, self.journal, self.units):
            if os.path.lexists(place) and not stat.S_ISDIR(place.lstat().st_mode):
                raise RefusedError(
                    f"{place}: is no directory of a run", f"move it away: mv {place} ELSEWHERE", file=str(place)
                )  # fmt: skip
        there = self.path.exists() and self.out.exists()
        if published and there and self.out.stat().st_ino == published:  # killed after the swap
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove the release that was replaced, which is at the stage's place."""
        if os.path.lexists(self.path / MANIFEST):
            old = earlier_release(self.path)
            old.check_alone()
            old.remove()
        for directory, _, names in os.walk(self.path, topdown=False):
            if names:
                raise RefusedError(
                    f"{directory}/{names[0]}: is no file of the release that was replaced, and it is kept",
                    "move it away, then run again",
                    file=f"{directory}/{names[0]}",
                )
            Path(directory).rmdir()

    def _prepare(self) -> None:
        folder(self.path)
        for cut in self.path.rglob("*.part"):  # whose writing was interrupted
            cut.unlink()
        if self._overwrite and self.out.exists():
            self._check_exchange()

    def place(self, name: str) -> str:
        """Return the name under which a weight file ``name`` of a plan is written."""
        return name

    def _check_place(self) -> None:
        check_replaceable(self.out, self._overwrite)

    def _check_exchange(self) -> None:
        """Find out before the work whether this file system can swap directories."""
        first, second = self.path / ".swap-1", self.path / ".swap-2"
        try:
            folder(first)
            folder(second)
            self._disk.exchange(first, second)
        except OSError as error:
            raise RefusedError(
                f"{self.out}: this file system cannot swap two directories in one step",
                f"write to a new directory, or remove it first: rm -r {self.out}",
                file=str(self.out),
            ) from error
        finally:
            remove(first)
            remove(second)

    def publish(self) -> None:
        """Make the stage the output, in one step.

        Raises:
            RefusedError: the output appeared or changed since the run began.
            BusyError: the lock was removed, and another run has begun.
            ResourceError: the disk failed; the output is what it was before.
        """
        with writing(self.path, 0):
            for directory, _, _ in os.walk(self.path):
                self._disk.sync(Path(directory))
            self._lock.keep()
        self._check_place()
        with writing(self.out, 0):
            if self.out.exists():
                self._lock.record(self.path.stat().st_ino)
                self._disk.fsync(self._lock.descriptor)
                self._disk.exchange(self.path, self.out)
                self._disk.sync(self.out.parent)
                self._settle()
            else:
                self._disk.rename(self.path, self.out)
                self._disk.sync(self.out.parent)

    def _settle(self) -> None:
        """Remove the old release after the swap, or swap back if it is not only that any more."""
        try:
            self._remove_old()
        except RefusedError:
            self._disk.exchange(self.path, self.out)
            self._disk.sync(self.out.parent)
            self._lock.record(0)
            raise

    def forget(self, also: Callable[[], None] = lambda: None) -> None:
        """Remove what a run that is over has left, and do what ``also`` does; errors as `Lock.take`."""
        self._lock.take()
        try:
            also()
            if not self.path.exists():
                remove(self.journal)
        finally:
            self._lock.release()
