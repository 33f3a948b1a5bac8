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

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from quantforge.checkpoint.disk import DISK, Disk, folder, free_bytes, fresh, no_space, writing
from quantforge.checkpoint.earlier import Earlier, earlier
from quantforge.checkpoint.files import FILES, changed
from quantforge.checkpoint.lock import Lock
from quantforge.checkpoint.reader import role_of
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge_files import Stamp, roles

MANIFEST = "quantforge.manifest.json"
SIGNATURE = ".sig"
OF_DIRECTORY = f"model{SIGNATURE}"
_COPY_BYTES = 2**20


class Stage:
    """The locked stage of one output directory, as a context manager.

    Leaving the ``with`` block keeps a stage that holds files (after an error it can be resumed) and
    frees the lock; `publish` or `discard` end it.

    Args:
        out: the output directory, which need not exist.
        overwrite: whether an earlier release (or an empty directory) at ``out`` may be replaced.
        source: the model that is read, which ``out`` must not touch.

    Raises (on entering):
        UsageError: ``out`` and ``source`` overlap, or ``out`` is no name for a directory.
        InputError: the parent is missing or cannot be written to.
        RefusedError: ``out`` exists and must not be replaced.
        BusyError: another run works on ``out``.
    """

    manifest = MANIFEST  # its name in the stage

    def __init__(
        self, out: Path, overwrite: bool, source: Path | None = None, *, disk: Disk = DISK
    ) -> None:
        self.out = _absolute(out)
        self._lock = Lock(self.out.with_name(f".{self.out.name}.qf"))
        self.path = self._lock.directory / "stage"
        self.journal = self._lock.directory / "journal"
        self._overwrite = overwrite
        self._source = source
        self._disk = disk

    def __enter__(self) -> Self:
        try:
            _check_apart(self.out, self._source)
            if (
                not self._lock.directory.exists()
            ):  # nothing to recover: refuse before anything is made
                self._check_place()
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
            raise _unwritable(self.out.parent, error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self.path.rmdir()  # only if it is empty
        self._lock.release()

    def _recover(self, published: int) -> None:
        """Finish what a kill interrupted in `publish`; the last holder was publishing this inode (or 0)."""
        for place in (self.path, self.journal):
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
            old = _earlier(self.path)
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
        _check_replaceable(self.out, self._overwrite)

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
            _remove(first)
            _remove(second)

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
        part = target.with_name(target.name + ".part")
        with writing(target, len(data)):
            self._make_folders(relative)
            descriptor = fresh(part)
            try:
                self._disk.write_at(descriptor, memoryview(data), 0)
                self._disk.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._disk.rename(part, target)

    def copy_file(self, source: Path, relative: str, root: Path | None = None) -> str:
        """Copy a file of a model byte for byte, under the rules of `quantforge.checkpoint.files`; return its SHA-256.

        Raises:
            InputError: ``source`` is a link out of its model (``root``) or no regular file.
            IntegrityError: it changed while it was copied.
            ResourceError: the disk is full or fails.
        """
        target = self._target(relative)
        part = target.with_name(target.name + ".part")
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
        return digest.hexdigest()

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

    @property
    def empty(self) -> bool:
        """Return whether nothing is staged: a journal of earlier work is void then."""
        return not any(self.path.iterdir())

    def clear(self) -> None:
        """Begin afresh: what another run has staged must not become part of this result."""
        _remove(self.path)
        folder(self.path)

    def forget(self) -> None:
        """Remove what a run that was killed after its publication has left; errors as `Lock.take`."""
        self._lock.take()
        try:
            if not self.path.exists():
                _remove(self.journal)
        finally:
            self._lock.release()

    def discard(self) -> None:
        """Remove the stage and all that was staged."""
        _remove(self.path)

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


def _absolute(out: Path) -> Path:
    """Return ``out`` with its parent resolved; the last part is kept, so that a link there is seen."""
    if out.name in {"", ".."}:
        raise UsageError(f"--output {out}: no name for a directory", "e.g. --output quantized")
    try:
        parent = Path(os.path.realpath(out.parent, strict=True))
    except OSError as error:
        raise InputError(
            f"{out.parent}: {error.strerror}", f"mkdir -p {out.parent}", file=str(out)
        ) from error
    return parent / out.name


def _check_apart(out: Path, source: Path | None) -> None:
    if source is None:
        return
    real, place = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    if place == real or place.is_relative_to(real) or real.is_relative_to(place):
        raise UsageError(
            f"--output {out}: overlaps the model {source}", "write to a directory beside the model"
        )


def _check_replaceable(out: Path, overwrite: bool) -> None:
    def refuse(what: str, hint: str) -> RefusedError:
        return RefusedError(f"{out}: {what}", hint, file=str(out))

    if out.is_symlink():
        raise refuse("is a link", f"give the directory that it leads to: {os.path.realpath(out)}")
    if not out.exists():
        return
    if not out.is_dir():
        raise refuse("is a file", "give the name of a directory")
    if not overwrite:
        raise refuse("exists", "replace it with --overwrite, or choose another --output")
    if not any(out.iterdir()):
        return
    if not os.path.lexists(out / MANIFEST):
        raise refuse(
            f"is not a result of quantforge (it holds no {MANIFEST}) and will not be replaced",
            "choose another --output, or remove the directory yourself",
        )
    _earlier(out).check_alone()


def _earlier(directory: Path) -> Earlier:
    return earlier(directory, MANIFEST, OF_DIRECTORY, lambda _: True)


def _unwritable(directory: Path, error: OSError) -> InputError:
    return InputError(
        f"{directory}: cannot write here: {error.strerror}",
        "choose an --output in a directory that you may write to",
        file=str(directory),
    )


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
