"""One writer per output: a lock in a hidden directory beside the output.

For an output ``DIR/name`` the directory is ``DIR/.name.qf``. It holds all files that a run needs while it works, on the
file system of the output, and is removed when the run ends. Its file ``lock`` is locked with ``flock``, which is
released when the process dies, and says who holds it. A directory of that name without such a file was not made by
QuantForge, and nothing in it is touched.

If a locked file is removed, a second run can lock a new file of the same name. Therefore a run that gets the lock
checks that its file still has that name, and tries again if not. Before it publishes it checks once more, and locks a
new file if somebody has removed the old one, or gives way to a run that has done so.

While it holds the lock, a process updates the modification time of the file every second. The value does not matter:
waiting processes see that it changes, and so that the holder has not been stopped (`StaleLockMonitor`).

The library `filelock` could replace one call here, `flock`. It does nothing else of the above: it accepts a hard link
to somebody's file as its own, lets a second process lock a new file after the first was removed, and says neither who
holds the lock nor whether that process still works.
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
from quantforge.files.disk import create_file, make_directory, open_existing

LOCK_FILE = "lock"
HEARTBEAT_SECONDS = 1.0
STALE_SECONDS = 10.0
_MAX_TRIES = 100  # of a lock whose file goes away while it is being locked
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Holder:
    """Content of a lock file: the process that holds it, and the inode of the directory to be published (or 0)."""

    pid: int = 0
    host: str = "?"
    started: str = "?"
    publishing: int = 0


class LockHeldError(BusyError):
    """Another process holds the lock.

    Attributes:
        path: path of the lock file.
        holder: the process.
        heartbeat: a value that changes while the process works.
    """

    def __init__(self, path: Path, holder: Holder, beat: int, work: str) -> None:
        super().__init__(
            f"{path}: process {holder.pid} on {holder.host}, started {holder.started}, {work}",
            "wait for it, or end it and run again",
        )
        self.path, self.holder, self.heartbeat = path, holder, beat


class Lock:
    """The lock of one output.

    ``directory`` contains the lock file, and ``work`` describes in errors what the holder does.

    Attributes:
        descriptor: descriptor of the locked file, -1 without the lock.
    """

    def __init__(self, directory: Path, work: str = "works on this output") -> None:
        self.directory, self._work = directory, work
        self.descriptor = -1
        self._path = directory / LOCK_FILE
        self._publishing = 0
        self._stop_heartbeat = threading.Event()

    def acquire(self) -> int:
        """Acquire the lock, and return the inode that the last holder was publishing (or 0).

        Raises:
            LockHeldError: another run holds it.
            RefusedError: the directory, or its lock file, was not made by QuantForge.
            OSError: it cannot be created.
        """
        last_error: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        for _ in range(_MAX_TRIES):
            try:
                self.descriptor = self._open_file()
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_held():
                    return self._start_holding()
                self._close()
            except (FileExistsError, FileNotFoundError) as error:  # another run begins, or ends
                last_error = error
            except BlockingIOError as error:
                heartbeat = os.fstat(self.descriptor).st_mtime_ns
                held_error = LockHeldError(
                    self._path, _read_holder(self.descriptor) or Holder(), heartbeat, self._work
                )
                self._close()
                raise held_error from error
            except BaseException:
                self._close()
                with suppress(OSError):  # it is not empty: another run's, or somebody's
                    self.directory.rmdir()
                raise
        raise last_error

    def ensure_held(self) -> None:
        """Check that the lock is still held; acquire it again if its file was removed during the run.

        Raises:
            BusyError: it was removed, and another run has started.
        """
        if self._is_held():
            return
        self._close()
        try:
            make_directory(self.directory)
            self.descriptor = create_file(self._path)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileExistsError, BlockingIOError) as error:
            self._close()
            raise BusyError(
                f"{self._path}: was removed while this run worked, and another run has begun",
                "let the other one finish",
            ) from error
        self.record(self._publishing)

    def record(self, publishing: int) -> None:
        """Write who holds the lock, and the inode of the directory that is about to be published (or 0)."""
        self._publishing = publishing
        started = datetime.now(UTC).isoformat(timespec="seconds")
        holder = Holder(os.getpid(), socket.gethostname(), started, publishing)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(asdict(holder)).encode(), 0)

    def release(self) -> None:
        """Release the lock, and remove its directory if it holds nothing else."""
        try:
            self._remove()
        except BaseException:  # a signal came in between
            self._remove()
            raise
        finally:
            self._close()

    def _remove(self) -> None:
        """Remove the lock file and its directory if this process holds the lock and there are no other files."""
        self._stop_heartbeat.set()
        with suppress(OSError):  # whoever comes next takes it, and cleans up
            if self._is_held() and self._names() == {LOCK_FILE}:
                self._path.unlink()
            self.directory.rmdir()

    def _open_file(self) -> int:
        """Open the lock file, creating it if the directory is empty; refuse one that was not made by a run."""
        try:
            make_directory(self.directory)
        except FileExistsError as error:
            raise self._not_ours_error(self.directory, "is no directory of a run") from error
        names = self._names()
        if LOCK_FILE not in names:
            if not names:
                return create_file(self._path)
            if os.path.lexists(self._path) or self._names() != names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            raise self._not_ours_error(
                self.directory,
                "holds files and no lock of quantforge: another run may still work there",
            )
        try:
            descriptor = open_existing(self._path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            raise self._not_ours_error(self._path, "is no lock of quantforge") from error
        if _read_holder(descriptor) is None:
            os.close(descriptor)
            raise self._not_ours_error(self._path, "is no lock of quantforge")
        return descriptor

    def _names(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}

    def _start_holding(self) -> int:
        """Record this process as the holder and start the heartbeat; return what the last holder was publishing."""
        last_holder = _read_holder(self.descriptor) or Holder()
        self.record(last_holder.publishing)
        self._stop_heartbeat = threading.Event()
        threading.Thread(
            target=self._run_heartbeat, args=[self._stop_heartbeat], daemon=True
        ).start()
        return last_holder.publishing

    def _run_heartbeat(self, ends: threading.Event) -> None:
        """Update the modification time of the file every second until the lock is released."""
        while not ends.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # somebody has removed it
                os.utime(self._path, follow_symlinks=False)

    def _is_held(self) -> bool:
        """Return whether the locked file still has its name."""
        try:
            return os.path.samestat(self._path.lstat(), os.fstat(self.descriptor))
        except OSError:
            return False

    def _close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _not_ours_error(self, path: Path, message: str) -> RefusedError:
        hint = f"choose another --output, or, if no run is using it: rm -r {self.directory}"
        return RefusedError.at(path, message, hint)


def _read_holder(descriptor: int) -> Holder | None:
    """Read a lock file: a default `Holder` if it is empty (its run was killed), None if it is not a lock file."""
    data = os.pread(descriptor, _MAX_BYTES, 0).strip(b"\0")
    if not data:
        return Holder()
    try:
        document = json.loads(data)
        names = [field.name for field in fields(Holder)]  # another version may note more, or less
        holder = Holder(
            **{name: document[name] for name in names if name == "pid" or name in document}
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return holder if type(holder.publishing) is int else None


class ChangeTracker:
    """Track for how long values have been unchanged, with the monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[object, tuple[object, float]] = {}

    def seconds_unchanged(self, key: object, value: object) -> float:
        """Return for how many seconds this object has seen the same ``value`` for ``key``."""
        now = time.monotonic()
        last_value, since = self._seen.get(key, (None, now))
        if key not in self._seen or last_value != value:
            self._seen[key] = value, now
            return 0.0
        return now - since


class StaleLockMonitor:
    """Watch the holders of locks that this process waits for, and report each one that does not respond, once.

    The system releases a lock when its owner dies, but not when it is stopped: others would wait forever.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._tracker = note, ChangeTracker()
        self._reported: set[object] = set()

    def check(self, error: BusyError) -> None:
        """Check the holder of a lock that could not be taken."""
        if not isinstance(error, LockHeldError):
            return
        holder = error.holder
        holder_key = error.path, holder.pid, holder.host, holder.started
        if (
            holder_key in self._reported
            or self._tracker.seconds_unchanged(holder_key, error.heartbeat) < STALE_SECONDS
        ):
            return
        self._reported.add(holder_key)
        self._note(
            f"process {holder.pid} on {holder.host}, which holds {error.path}, has not responded for"
            f" {STALE_SECONDS:g} s: this one waits for it; if it was stopped, kill -CONT {holder.pid} lets it go on"
            f" there, and after kill -9 {holder.pid} another does its part"
        )
