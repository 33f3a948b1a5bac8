"""Calls of the operating system for files, locks and memory, where Linux, macOS and Windows differ: they are all here.

Every call looks up what there is when it is made, so that one that is missing has its stand-in here, and nowhere else:

    needed               Linux                 macOS                 Windows
    read, write at       pread, preadv, pwrite pread, pwrite         a seek under a lock of this process
    new, existing file   O_NOFOLLOW            O_NOFOLLOW            a look at the name before it is opened
    room for a file      posix_fallocate       ftruncate             ftruncate
    durable content      fsync                 fcntl(F_FULLFSYNC)    fsync, which is FlushFileBuffers
    durable names        fsync of a directory  fsync of a directory  left to NTFS, which keeps a log of names
    lock                 flock                 flock                 msvcrt.locking
    swap of two names    renameat2             renamex_np            none: an overwrite of a directory is refused
    peak of memory       getrusage, in KiB     getrusage, in bytes   unknown

`quantforge doctor` prints `lacks`, what is missing where it runs. Only Linux is tested as a whole; the stand-ins are
tested there by taking the calls away.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_SEEKING = threading.Lock()  # two threads share the position of a descriptor
_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_EXCHANGE = 2  # linux/fs.h, and RENAME_SWAP of macOS's sys/stdio.h
_LOCKED_BYTE = (
    1 << 30
)  # of a lock file, behind all that is written into it: what Windows locks nobody else can read


def _flag(*names: str) -> int:
    """Return flags of `os.open`, of those names that this system has."""
    found = 0
    for name in names:
        found |= getattr(os, name, 0)
    return found


# O_NONBLOCK: a pipe that was put there must not block the open; O_BINARY: Windows would translate ends of lines.
READ = os.O_RDONLY | _flag("O_CLOEXEC", "O_NONBLOCK", "O_BINARY")
UNLINKED = _flag("O_NOFOLLOW")
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | UNLINKED | _flag("O_CLOEXEC", "O_BINARY")
EXISTING = UNLINKED | _flag("O_CLOEXEC", "O_NONBLOCK", "O_BINARY")


def module(name: str) -> Any:
    """Return a module that only some systems have, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def open_unlinked(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file whose last name is no link, and return the descriptor.

    Raises:
        OSError: it is a link (ELOOP), or as `os.open`.
    """
    if not UNLINKED and not flags & os.O_EXCL and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags, mode)


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Read at most ``count`` bytes at an offset; none at the end of the file."""
    call = getattr(os, "pread", None)
    if call is not None:
        data: bytes = call(descriptor, count, offset)
        return data
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, count)


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Read into a buffer of bytes what is at an offset; return how many bytes came, 0 at the end of the file."""
    call = getattr(os, "preadv", None)
    if call is not None:
        count: int = call(descriptor, [view], offset)
        return count
    data = read_at(descriptor, len(view), offset)
    view[: len(data)] = data
    return len(data)


def fill(descriptor: int, view: memoryview, offset: int) -> bool:
    """Fill a buffer of bytes from an offset on; return whether the file has so many."""
    while view and (count := read_into(descriptor, view, offset)):
        view, offset = view[count:], offset + count
    return not view


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write at an offset; return how many bytes were written."""
    call = getattr(os, "pwrite", None)
    if call is not None:
        count: int = call(descriptor, data, offset)
        return count
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def free_bytes(directory: Path) -> int:
    """Return how many bytes this user may still write in a directory."""
    return shutil.disk_usage(directory).free


def allocate(descriptor: int, offset: int, length: int) -> None:
    """Give a file room for ``length`` bytes at an offset.

    Where the system cannot reserve them it only grows the file: a disk that fills up later fails the write.

    Raises:
        OSError: the disk is full (ENOSPC), or fails.
    """
    call = getattr(os, "posix_fallocate", None)
    if call is not None:
        call(descriptor, offset, length)
        return
    size = os.fstat(descriptor).st_size
    if offset + length > size:
        os.ftruncate(descriptor, offset + length)


def sync(descriptor: int) -> None:
    """Make the content of a file durable, past the cache of the drive where the system tells the two apart."""
    fcntl = module("fcntl")
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError:  # a file system of a network has no such call
            pass
        else:
            return
    os.fsync(descriptor)


def open_to_sync(path: Path) -> int | None:
    """Open a file or a directory to make it durable; None for a directory where the system opens none."""
    if os.name == "nt":
        return None if path.is_dir() else open_unlinked(path, os.O_RDWR | EXISTING)
    return open_unlinked(path, READ | UNLINKED)


def lock(descriptor: int) -> None:
    """Lock a file for this process until the descriptor is closed; the system does that when the process ends.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: this system has no locks (ENOSYS), or the file system has none.
    """
    fcntl, msvcrt = module("fcntl"), module("msvcrt")
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    if msvcrt is None:
        raise OSError(errno.ENOSYS, "this system has no locks of files")
    with _SEEKING:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EDEADLK}:
                raise BlockingIOError(error.errno, str(error)) from error
            raise


def removes_open_files() -> bool:
    """Return whether the name of a file can be removed while it is open; Windows refuses that."""
    return os.name != "nt"


def exchange(first: Path, second: Path) -> None:
    """Swap two paths of one file system in one step (Linux 3.15 with glibc 2.28; macOS 10.12).

    Raises:
        OSError: the system or the file system cannot (ENOSYS, EINVAL), or either path is missing.
    """
    swap, swap_at = _c_function("renamex_np"), _c_function("renameat2")
    a, b = os.fsencode(first), os.fsencode(second)
    if swap_at is not None:
        failed = swap_at(_AT_FDCWD, a, _AT_FDCWD, b, _RENAME_EXCHANGE)
    elif swap is not None:
        failed = swap(a, b, _RENAME_EXCHANGE)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(first))


def _c_function(name: str) -> Any:
    """Return a function of the C library, or None."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library without a name
        return None


def peak_bytes() -> int | None:
    """Return the most memory that this process has held at once, or None where the system does not tell."""
    resource = module("resource")
    if resource is None:
        return None
    mark: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mark if sys.platform == "darwin" else mark << 10


def stopping() -> list[signal.Signals]:
    """Return the signals that ask a process to stop; Windows has no SIGHUP."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def lacks() -> list[str]:
    """Return what this system does not offer, in words: what then happens instead."""
    has = {
        "reserved room: a full disk is noticed when it is written to": hasattr(
            os, "posix_fallocate"
        ),
        "locks: nothing is written without one": bool(module("fcntl") or module("msvcrt")),
        "a swap of directories: --overwrite of a directory is refused": bool(
            _c_function("renameat2") or _c_function("renamex_np")
        ),
        "durable names: a power cut may undo the last rename": os.name != "nt",
        "opening without following links: names are looked at first": bool(UNLINKED),
        "limits of memory for a chat template: its time alone is limited": bool(module("resource")),
        "the peak of memory": bool(module("resource")),
    }
    return [what for what, there in has.items() if not there]


def user_cache() -> Path:
    """Return the directory for what this user may lose: ``XDG_CACHE_HOME``, else where the system has such files."""
    if stated := os.environ.get("XDG_CACHE_HOME"):
        return Path(stated) / "quantforge"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "quantforge"
    place = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / place / "quantforge"
