"""One writer per output: a directory beside it that belongs to one run at a time.

For an output ``DIR/name`` it is ``DIR/.name.qf``: it holds all that a run keeps while it works, on the file system of
the output, and goes when the run has ended. In it, ``lock`` is locked by a lock of the system, which dies with its
owner, and says who that is. A directory of that name without such a file is not ours, and nothing in it is touched.

A file that is locked and then removed lets a second run lock another file of the same name. Therefore whoever gets the
lock looks whether the file is still at its name, and tries again if it is not; and whoever is about to publish looks
again, and locks anew what somebody has removed meanwhile, or gives way to the run that has done so.

While it has the lock, a process sets the time of its file every second. Nobody reads what time that is: whoever waits
sees that it changes, and so that the process has not been stopped (`StaleLockMonitor`).

The library `filelock` would take the place of one call of this, `flock`. Of what is described above it does nothing: it
takes a second name of somebody's file for its own, gives the lock of a removed file to a second process beside the
first, and says neither who has it nor whether that one still works.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from quantforge.errors import BusyError, RefusedError
from quantforge.files.disk import create, make_folder, open_existing

FILE = "lock"
BEAT_SECONDS = 1.0
QUIET_SECONDS = 10.0
_TRIES = 100  # of a lock whose file goes away while it is being locked
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Holder:
    """Content of a lock file: who holds it, and the inode of the directory about to be published (or 0)."""

    pid: int = 0
    host: str = "?"
    started: str = "?"
    publishing: int = 0


class HeldError(BusyError):
    """Another process has a lock.

    Attributes:
        path: of the lock file.
        holder: the process.
        beat: changes while the process works.
    """

    def __init__(self, path: Path, holder: Holder, beat: int, work: str) -> None:
        super().__init__(
            f"{path}: process {holder.pid} on {holder.host}, started {holder.started}, {work}",
            "wait for it, or end it and run again",
        )
        self.path, self.holder, self.beat = path, holder, beat


class Lock:
    """The lock of one output; ``directory`` holds it, and ``work`` describes the holder in errors.

    Attributes:
        descriptor: of the locked file, -1 without the lock.
    """

    def __init__(self, directory: Path, work: str = "works on this output") -> None:
        self.directory, self._work = directory, work
        self.descriptor = -1
        self._path = directory / FILE
        self._publishing = 0
        self._ends = threading.Event()

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
                self.descriptor = self._opened()
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there():
                    return self._taken()
                self._close()
            except (FileExistsError, FileNotFoundError) as error:  # another run begins, or ends
                last = error
            except BlockingIOError as error:
                beat = os.fstat(self.descriptor).st_mtime_ns
                held = HeldError(self._path, _read(self.descriptor) or Holder(), beat, self._work)
                self._close()
                raise held from error
            except BaseException:
                self._close()
                with suppress(OSError):  # it is not empty: another run's, or somebody's
                    self.directory.rmdir()
                raise
        raise last

    def keep(self) -> None:
        """Verify that the lock is still held; take it again if its file was removed during the run.

        Raises:
            BusyError: it was removed, and another run has begun.
        """
        if self._is_there():
            return
        self._close()
        try:
            make_folder(self.directory)
            self.descriptor = create(self._path)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileExistsError, BlockingIOError) as error:
            self._close()
            raise BusyError(
                f"{self._path}: was removed while this run worked, and another run has begun",
                "let the other one finish",
            ) from error
        self.record(self._publishing)

    def record(self, publishing: int) -> None:
        """Note who holds the lock, and the inode of the directory that is about to be published (or 0)."""
        self._publishing = publishing
        started = datetime.now(UTC).isoformat(timespec="seconds")
        holder = Holder(os.getpid(), socket.gethostname(), started, publishing)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(asdict(holder)).encode(), 0)

    def release(self) -> None:
        """Free the lock; its directory goes too when it holds nothing else."""
        try:
            self._remove()
        except BaseException:  # a signal came in between
            self._remove()
            raise
        finally:
            self._close()

    def _remove(self) -> None:
        """Remove the file and its directory, if this process has the lock and the directory holds nothing else."""
        self._ends.set()
        with suppress(OSError):  # whoever comes next takes it, and cleans up
            if self._is_there() and self._names() == {FILE}:
                self._path.unlink()
            self.directory.rmdir()

    def _opened(self) -> int:
        """Open the file, made if the directory is empty; what was not made by a run is refused."""
        try:
            make_folder(self.directory)
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
            descriptor = open_existing(self._path, os.O_RDWR)
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
        last = _read(self.descriptor) or Holder()
        self.record(last.publishing)
        self._ends = threading.Event()
        threading.Thread(target=self._beat, args=[self._ends], daemon=True).start()
        return last.publishing

    def _beat(self, ends: threading.Event) -> None:
        """Update the time of the file every second until the lock is freed."""
        while not ends.wait(BEAT_SECONDS):
            with suppress(OSError):  # somebody has removed it
                os.utime(self._path, follow_symlinks=False)

    def _is_there(self) -> bool:
        """Return whether the locked file is the one at its name."""
        try:
            return os.path.samestat(self._path.lstat(), os.fstat(self.descriptor))
        except OSError:
            return False

    def _close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _foreign(self, path: Path, what: str) -> RefusedError:
        hint = f"choose another --output, or, if no run is using it: rm -r {self.directory}"
        return RefusedError.at(path, what, hint)


def _read(descriptor: int) -> Holder | None:
    """Read a lock file: an empty `Holder` if it is empty (its run was killed just then), None if it is no lock file."""
    data = os.pread(descriptor, _MAX_BYTES, 0).strip(b"\0")
    if not data:
        return Holder()
    try:
        found = json.loads(data)
        names = [field.name for field in fields(Holder)]  # another version may note more, or less
        holder = Holder(**{name: found[name] for name in names if name == "pid" or name in found})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return holder if type(holder.publishing) is int else None


class Watch:
    """Track how long values have been unchanged, by the monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[object, tuple[object, float]] = {}

    def seconds_unchanged(self, key: object, value: object) -> float:
        """Return for how many seconds ``value`` has been unchanged, as far as this object has seen."""
        now = time.monotonic()
        known, since = self._seen.get(key, (None, now))
        if key not in self._seen or known != value:
            self._seen[key] = value, now
            return 0.0
        return now - since


class StaleLockMonitor:
    """Watch the holders of locks that this process waits for; call ``note`` once for each that does not respond.

    A lock of the system dies with its owner, but not with one that was stopped: whoever waits would wait for ever.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._watch = note, Watch()
        self._told: set[object] = set()

    def check(self, error: BusyError) -> None:
        """Check the holder of a lock that could not be taken."""
        if not isinstance(error, HeldError):
            return
        holder = error.holder
        who = error.path, holder.pid, holder.host, holder.started
        if who in self._told or self._watch.seconds_unchanged(who, error.beat) < QUIET_SECONDS:
            return
        self._told.add(who)
        self._note(
            f"process {holder.pid} on {holder.host}, which holds {error.path}, has not responded for"
            f" {QUIET_SECONDS:g} s: this one waits for it; if it was stopped, kill -CONT {holder.pid} lets it go on"
            f" there, and after kill -9 {holder.pid} another does its part"
        )
