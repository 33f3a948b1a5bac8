"""The system calls that put bytes on a disk, in one place, with one meaning for every failure.

`Disk` is what `writer` and `publish` write through. Tests hand in one whose calls fail at a chosen
moment; nothing else in the project replaces it. Any failure becomes a `ResourceError` that says how
much was needed and how much is free, because a full disk has many faces: ENOSPC, EDQUOT, EFBIG (a
limit of the user or of the file system), or a short write.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantforge.errors import ResourceError

_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_EXCHANGE = 2  # linux/fs.h


def _exchange(first: Path, second: Path) -> None:
    """Swap two paths of one file system in one step (Linux renameat2, since 3.15; glibc 2.28).

    Raises:
        OSError: the system or the file system cannot (ENOSYS, EINVAL), or either path is missing.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, bytes(first), _AT_FDCWD, bytes(second), _RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(first))


@dataclass(frozen=True, slots=True)
class Disk:
    """The calls themselves, with the signatures of `os`."""

    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    pwrite: Callable[[int, memoryview, int], int] = os.pwrite
    fsync: Callable[[int], None] = os.fsync
    rename: Callable[[Path, Path], None] = os.rename
    exchange: Callable[[Path, Path], None] = _exchange

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``; a write that makes no progress is a full disk."""
        done = 0
        while done < len(data):
            count = self.pwrite(descriptor, data[done:], offset + done)
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count

    def sync(self, path: Path) -> None:
        """Make a file or the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()


def create(path: Path) -> int:
    """Open an empty file for writing (mode 0666 less the umask) and return its descriptor."""
    return os.open(path, _NEW_FILE, 0o666)


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write in a directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


@contextmanager
def writing(path: Path, needed: int) -> Iterator[None]:
    """Turn a failure to write ``needed`` bytes at ``path`` into a `ResourceError`."""
    try:
        yield
    except OSError as error:
        raise no_space(path, needed, error.strerror or str(error)) from error


def no_space(path: Path, needed: int, reason: str) -> ResourceError:
    """The error for bytes that do not fit, with what is needed and what is free."""
    place = path if path.is_dir() else path.parent
    return ResourceError(
        f"{path}: {reason}; {needed} bytes needed, {free_bytes(place)} free",
        f"free space in {place} (or raise its quota or `ulimit -f`), then run the command again",
        file=str(path),
    )
