"""All or nothing: a result is staged beside its place and appears there by one rename.

For an output ``DIR/name`` two things lie beside it, so that renames stay on one file system:

* ``.name.qf.lock``: locked by ``flock`` while a run works on the output. The lock dies with its
  owner; the file stays, because removing it would let two runs lock two different files.
* ``.name.qf-stage``: the stage. It survives an interrupted run, so that it can be resumed.

Files are synced when they are written, directories before the rename, the parent after it, so that
even after a power failure a reader finds the old release, the new one or none, never a mixture. An
overwrite swaps the two directories in one step (renameat2) and then removes the old release, now at
the stage's place; where that does not exist it is refused rather than done in two steps. Before the
swap the lock file records which directory is being published (its inode), so that a run that finds
a stage after a kill knows whether it is work to resume or the remains of the old release.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from quantforge.checkpoint.disk import DISK, Disk, create, free_bytes, no_space, writing
from quantforge.checkpoint.files import FILES, changed
from quantforge.checkpoint.reader import role_of
from quantforge.errors import BusyError, InputError, RefusedError, UsageError
from quantforge_files import Stamp, roles

MANIFEST = "quantforge.manifest.json"
_COPY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Holder:
    """The content of a lock file."""

    pid: int = 0
    host: str = "?"
    started: str = "?"
    publishing: int = 0


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

    def __init__(
        self, out: Path, overwrite: bool, source: Path | None = None, *, disk: Disk = DISK
    ) -> None:
        self.out = _absolute(out)
        self.path = self.out.with_name(f".{self.out.name}.qf-stage")
        self._overwrite = overwrite
        self._source = source
        self._disk = disk
        self._lock = -1

    def __enter__(self) -> Self:
        try:
            _check_apart(self.out, self._source)
            lock = self.out.with_name(f".{self.out.name}.qf.lock")
            if not lock.exists():  # nothing to recover, and a refusal leaves no lock behind
                self._check_place()
            self._lock, published = _locked(lock)
            try:
                self._recover(published)
                _record(self._lock, 0)
                self._check_place()
                self._prepare()
            except BaseException:
                os.close(self._lock)
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
        os.close(self._lock)

    def _recover(self, published: int) -> None:
        """Finish what a kill interrupted in `publish`; the last holder was publishing this inode (or 0)."""
        if self.path.is_symlink():
            self.path.unlink()
        if self.out.exists() and self.out.stat().st_ino == published:
            _remove(self.path)  # killed after the swap: this is the release that was replaced

    def _prepare(self) -> None:
        self.path.mkdir(exist_ok=True)
        for cut in self.path.rglob("*.part"):  # whose writing was interrupted
            cut.unlink()
        if self._overwrite and self.out.exists():
            self._check_exchange()

    def place(self, name: str) -> str:
        """The name under which a weight file ``name`` of a plan is written."""
        return name

    def _check_place(self) -> None:
        _check_replaceable(self.out, self._overwrite)

    def _check_exchange(self) -> None:
        """Find out before the work whether this file system can swap directories."""
        first, second = self.path / ".swap-1", self.path / ".swap-2"
        try:
            first.mkdir(exist_ok=True)
            second.mkdir(exist_ok=True)
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
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = create(part)
            try:
                self._disk.write_at(descriptor, memoryview(data), 0)
                self._disk.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._disk.rename(part, target)

    def copy_file(self, source: Path, relative: str, root: Path | None = None) -> None:
        """Copy a file of a model byte for byte, under the rules of `quantforge.checkpoint.files`.

        Raises:
            InputError: ``source`` is a link out of its model (``root``) or no regular file.
            IntegrityError: it changed while it was copied.
            ResourceError: the disk is full or fails.
        """
        target = self._target(relative)
        part = target.with_name(target.name + ".part")
        with FILES.opened(
            source, role_of(relative) or roles.WEIGHTS, root or source.parent
        ) as reading:
            stamp = Stamp.of(reading)
            with writing(target, stamp.size):
                target.parent.mkdir(parents=True, exist_ok=True)
                descriptor = create(part)
                try:
                    done = 0
                    while data := os.pread(reading, min(_COPY_BYTES, stamp.size - done), done):
                        self._disk.write_at(descriptor, memoryview(data), done)
                        done += len(data)
                    self._disk.fsync(descriptor)
                finally:
                    os.close(descriptor)
            if done != stamp.size or Stamp.of(reading) != stamp:
                raise changed(source)
            with writing(target, 0):
                self._disk.rename(part, target)

    def publish(self) -> None:
        """Make the stage the output, in one step.

        Raises:
            RefusedError: the output appeared or changed since the run began.
            ResourceError: the disk failed; the output is what it was before.
        """
        with writing(self.path, 0):
            for directory, _, _ in os.walk(self.path):
                self._disk.sync(Path(directory))
        self._check_place()
        with writing(self.out, 0):
            if self.out.exists():
                _record(self._lock, self.path.stat().st_ino)
                self._disk.fsync(self._lock)
                self._disk.exchange(self.path, self.out)
            else:
                self._disk.rename(self.path, self.out)
            self._disk.sync(self.out.parent)
            _remove(self.path)

    @property
    def empty(self) -> bool:
        """Whether nothing is staged: what a journal says of earlier work is void then."""
        return not any(self.path.iterdir())

    def clear(self) -> None:
        """Begin afresh: what another run has staged must not become part of this result."""
        _remove(self.path)
        self.path.mkdir()

    def discard(self) -> None:
        """Remove the stage and all that was staged."""
        _remove(self.path)

    def _target(self, relative: str) -> Path:
        parts = PurePosixPath(relative).parts
        if not parts or parts[0] == "/" or ".." in parts or "\\" in relative or "\0" in relative:
            raise ValueError(f"{relative!r} is no place inside the output")
        return self.path.joinpath(*parts)


def _absolute(out: Path) -> Path:
    """``out`` with its parent resolved; the last part is kept, so that a link there is seen."""
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
    ours = (out / MANIFEST).is_file()
    if not ours and any(out.iterdir()):
        raise refuse(
            f"is not a result of quantforge (it holds no {MANIFEST}) and will not be replaced",
            "choose another --output, or remove the directory yourself",
        )


def _locked(path: Path) -> tuple[int, int]:
    """Take the lock: its descriptor, and the inode that its last holder was publishing (or 0)."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        published = _holder(descriptor).publishing
        _record(descriptor, published)  # until it is recovered from, by whoever comes so far
    except BlockingIOError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise BusyError(
            f"{path}: process {holder.pid} on {holder.host}, started {holder.started}, "
            "works on this output",
            "wait for it, or end it and run again",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, published


def _record(descriptor: int, publishing: int) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    holder = _Holder(os.getpid(), socket.gethostname(), started, publishing)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)


def _holder(descriptor: int) -> _Holder:
    try:
        return _Holder(**json.loads(os.pread(descriptor, 1000, 0)))
    except (ValueError, TypeError):
        return _Holder()  # a new lock file, or one that is just being written


def _unwritable(directory: Path, error: OSError) -> InputError:
    return InputError(
        f"{directory}: cannot write here: {error.strerror}",
        "choose an --output in a directory that you may write to",
        file=str(directory),
    )


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
