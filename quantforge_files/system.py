"""System calls that Linux and macOS offer differently.

    needed                     Linux               macOS
    space for a file           posix_fallocate     ftruncate: a disk that fills up later fails the write
    durable content            fsync               fcntl(F_FULLFSYNC), past the cache of the drive
    swap of two names          renameat2           renamex_np
    peak memory                getrusage, in KiB   getrusage, in bytes
    cache directory            ~/.cache            ~/Library/Caches

Only Linux is tested as a whole. Other systems are not supported.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

# O_NONBLOCK: a pipe that was put there must not block the open.
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK
CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL
EXISTING_FLAGS = os.O_NONBLOCK

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that ask a process to stop

_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_EXCHANGE = 2  # linux/fs.h, and RENAME_SWAP of macOS's sys/stdio.h


def open_nofollow(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file unless its last path component is a link, and return the descriptor.

    Raises:
        OSError: it is a link (ELOOP), or as `os.open`.
    """
    return os.open(path, flags | os.O_NOFOLLOW, mode)


def read_into(descriptor: int, buffer: memoryview, offset: int) -> bool:
    """Fill a buffer from an offset of a file; return False if the file ends first."""
    while buffer and (count := os.preadv(descriptor, [buffer], offset)):
        buffer, offset = buffer[count:], offset + count
    return not buffer


def allocate(descriptor: int, length: int) -> None:
    """Reserve space for ``length`` bytes of a file.

    macOS reserves nothing and only grows the file: a disk that fills up later fails the write.

    Raises:
        OSError: the disk is full (ENOSPC), or fails.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)
    elif length > os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, length)


def sync_file(descriptor: int) -> None:
    """Make the content of a file durable, on macOS past the cache of the drive."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError:  # a network file system has no such call
            pass
        else:
            return
    os.fsync(descriptor)


def swap_paths(first: Path, second: Path) -> None:
    """Swap two paths of one file system in one step (Linux 3.15 with glibc 2.28; macOS 10.12).

    Raises:
        OSError: the system or the file system cannot (ENOSYS, EINVAL), or either path is missing.
    """
    library: Any = ctypes.CDLL(None, use_errno=True)
    a, b = os.fsencode(first), os.fsencode(second)
    if hasattr(library, "renameat2"):
        status = library.renameat2(_AT_FDCWD, a, _AT_FDCWD, b, _RENAME_EXCHANGE)
    elif hasattr(library, "renamex_np"):
        status = library.renamex_np(a, b, _RENAME_EXCHANGE)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(first))


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss << 10


def user_cache_directory() -> Path:
    """Return this user's cache directory: in ``XDG_CACHE_HOME``, else the default of the system."""
    default = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / default) / "quantforge"
