"""One writer per output: a directory beside it that belongs to one run at a time.

For an output ``DIR/name`` it is ``DIR/.name.qf``: it holds all that a run keeps while it works, on the file system of
the output, and goes when the run has ended. In it, ``lock`` is locked by a lock of the system, which dies with its
owner, and says who that is. A directory of that name without such a file is not ours, and nothing in it is touched.

A file that is locked and then removed lets a second run lock another file of the same name. Therefore whoever gets the
lock looks whether the file is still at its name, and tries again if it is not; and whoever is about to publish looks
again, and locks anew what somebody has removed meanwhile, or gives way to the run that has done so.

While it has the lock, a process sets the time of its file every second. Nobody reads what time that is: whoever waits
sees that it changes, and so that the process has not been stopped.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from quantforge.checkpoint.disk import create, existing, folder
from quantforge.errors import BusyError, RefusedError

FILE = "lock"
BEAT_SECONDS = 1.0
_TRIES = 100  # of a lock whose file goes away while it is being locked
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Holder:
    """The content of a lock file."""

    pid: int = 0
    host: str = "?"
    started: str = "?"
    publishing: int = 0


class HeldError(BusyError):
    """Another process has a lock.

    Attributes:
        path: of the lock file.
        pid, host, started: of the process.
        beat: changes while the process works.
    """

    def __init__(self, path: Path, holder: _Holder, beat: int, work: str) -> None:
        super().__init__(
            f"{path}: process {holder.pid} on {holder.host}, started {holder.started}, {work}",
            "wait for it, or end it and run again",
        )
        self.path, self.beat = path, beat
        self.pid, self.host, self.started = holder.pid, holder.host, holder.started


class Lock:
    """The lock of one output; ``directory`` is what it stands for, and ``work`` says it to whoever has to wait."""

    def __init__(self, directory: Path, work: str = "works on this output") -> None:
        self.directory, self._work = directory, work
        self._path = directory / FILE
        self._descriptor = -1
        self._publishing = 0
        self._ends = threading.Event()

    @property
    def descriptor(self) -> int:
        """Return the descriptor of the file, for syncing it."""
        return self._descriptor

    def take(self) -> int:
        """Lock, and return the inode that the last holder was publishing (or 0).

        Raises:
            HeldError: another run has it.
            RefusedError: the directory, or the file in it, is not ours.
            OSError: it cannot be made.
        """
        last: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        for _ in range(_TRIES):
            try:
                self._descriptor = self._opened()
            except (FileExistsError, FileNotFoundError) as error:  # another run begins, or ends
                last = error
                continue
            except BaseException as error:
                if not isinstance(error, Exception):  # a signal, before there is a file
                    with suppress(OSError):  # it is not empty: another run's, or somebody's
                        self.directory.rmdir()
                raise
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there():
                    return self._taken()
            except BlockingIOError as error:
                busy = self._busy()
                self._close()
                raise busy from error
            except BaseException:
                self._close()
                raise
            self._close()
        raise last

    def keep(self) -> None:
        """Make sure that nobody else can have the lock: its file may have been removed during the run.

        Raises:
            BusyError: it was removed, and another run has begun.
        """
        if self._is_there():
            return
        try:
            folder(self.directory)
            fresh = create(self._path)
            try:
                fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(fresh)
                raise
        except (FileExistsError, BlockingIOError) as error:
            raise BusyError(
                f"{self._path}: was removed while this run worked, and another run has begun",
                "let the other one finish",
            ) from error
        self._close()
        self._descriptor = fresh
        self.record(self._publishing)

    def record(self, publishing: int) -> None:
        """Note who holds the lock, and the inode of the directory that is about to be published (or 0)."""
        self._publishing = publishing
        started = datetime.now(UTC).isoformat(timespec="seconds")
        holder = _Holder(os.getpid(), socket.gethostname(), started, publishing)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(holder)).encode(), 0)

    def release(self) -> None:
        """Free the lock; its directory goes too when it holds nothing else."""
        self._ends.set()
        try:
            if self._is_there() and [path.name for path in self.directory.iterdir()] == [FILE]:
                self._path.unlink()
                self.directory.rmdir()
        except OSError:
            pass  # whoever comes next takes it, and cleans up
        finally:
            self._close()

    def _opened(self) -> int:
        """Open the file, made if the directory is empty; what was not made by a run is refused."""
        try:
            folder(self.directory)
        except FileExistsError as error:
            raise self._foreign(self.directory, "is no directory of a run") from error
        names = self._names()
        if FILE not in names:
            if not names:
                return create(self._path)
            if os.path.lexists(self._path) or self._names() != names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            raise self._foreign(
                self.directory,
                "holds files and no lock of quantforge: another run may still work there",
            )
        try:
            descriptor = existing(self._path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            raise self._foreign(self._path, "is no lock of quantforge") from error
        if _read(descriptor) is None:
            os.close(descriptor)
            raise self._foreign(self._path, "is no lock of quantforge")
        return descriptor

    def _names(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}

    def _taken(self) -> int:
        """Note that this run has the lock; what the last holder was publishing stays until it is recovered from."""
        last = _read(self._descriptor) or _Holder()
        self.record(last.publishing)
        self._ends = threading.Event()
        threading.Thread(target=self._beat, args=[self._ends], daemon=True).start()
        return last.publishing

    def _beat(self, ends: threading.Event) -> None:
        """Set the time of the file until the lock is freed."""
        while not ends.wait(BEAT_SECONDS):
            with suppress(OSError):  # somebody has removed it
                os.utime(self._path, follow_symlinks=False)

    def _is_there(self) -> bool:
        """Return whether the locked file is the one at its name."""
        try:
            named = self._path.lstat()
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self._descriptor))

    def _busy(self) -> HeldError:
        beat = os.fstat(self._descriptor).st_mtime_ns
        return HeldError(self._path, _read(self._descriptor) or _Holder(), beat, self._work)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _foreign(self, path: Path, what: str) -> RefusedError:
        return RefusedError(
            f"{path}: {what}",
            f"choose another --output, or, if no run is using it: rm -r {self.directory}",
            file=str(path),
        )


def _read(descriptor: int) -> _Holder | None:
    """Read a lock file: an empty `_Holder` if it is empty (its run was killed just then), None if it is not ours."""
    data = os.pread(descriptor, _MAX_BYTES, 0).strip(b"\0")
    if not data:
        return _Holder()
    try:
        found = json.loads(data)
        names = [field.name for field in fields(_Holder)]  # another version may note more, or less
        holder = _Holder(**{name: found[name] for name in names if name == "pid" or name in found})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return holder if type(holder.publishing) is int else None
