"""The system calls that put bytes on a disk, in one place, with one meaning for every failure.

`Disk` is what `writer` and `stage` write through. Tests hand in one whose calls fail at a chosen
moment; nothing else in the project replaces it. A failure becomes an `DeniedError` where this user may not
write (EACCES, EPERM, EROFS), else a `ResourceError` that says how much was needed and how much is free: a
full disk has many faces (ENOSPC, EDQUOT, EFBIG: a limit of the user or of the file system, or a short
write), for which it advises to free space.

Nothing else in the project opens a file for writing (a test looks for it), because names beside an
output may be planted: a link leads to somebody's file, and what is there already is not ours.
`create` makes a new file or fails, `open_existing` opens a regular file that was made by `create` before,
`make_folder` makes a directory or takes a real one, and `save` writes a file that a person has named:
whole or not at all, and over an earlier one only when that was asked for.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantforge.errors import DeniedError, InputError, RefusedError, ResourceError, UsageError
from quantforge_files import system


@dataclass(frozen=True, slots=True)
class Disk:
    """The calls themselves, see `quantforge_files.system`."""

    allocate: Callable[[int, int], None] = system.allocate
    pwrite: Callable[[int, memoryview, int], int] = os.pwrite
    fsync: Callable[[int], None] = system.sync
    rename: Callable[[Path, Path], None] = os.rename
    exchange: Callable[[Path, Path], None] = system.exchange

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
        descriptor = system.open_nofollow(path, system.READ)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def create(path: Path, mode: int = 0o666) -> int:
    """Make a new file (its mode is less the umask) and return its descriptor, for reading and writing.

    Raises:
        FileExistsError: something has that name, be it a link that leads nowhere.
    """
    return system.open_nofollow(path, system.NEW, mode)


def create_fresh(path: Path) -> int:
    """Make a new file, replacing one that an interrupted run left at this name of its own."""
    path.unlink(missing_ok=True)
    return create(path)


def open_existing(path: Path, access: int = os.O_WRONLY) -> int:
    """Open a file that `create` made before; refuse anything else at that name.

    Raises:
        OSError: it is missing, a link, no regular file, or has a second name somewhere else.
    """
    descriptor = system.open_nofollow(path, access | system.EXISTING)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        if not found.st_nlink:  # it was removed while it was being opened
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        raise OSError(errno.EINVAL, "is no file that was made here", str(path))
    return descriptor


@contextmanager
def whole_file(
    path: Path, part: str, disk: Disk | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[int]:
    """Make a file that is called ``part`` until it is whole and durable, and yield the descriptor.

    ``check`` is called before it gets its name, and may refuse that. After an error the unfinished file is removed.
    """
    disk = disk or DISK
    unfinished = path.with_name(part)
    descriptor = create_fresh(unfinished)
    try:
        try:
            yield descriptor
            disk.fsync(descriptor)
        finally:
            os.close(descriptor)
        check()
        disk.rename(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def open_to_append(path: Path) -> int:
    """Open a file that was made here, or make it, and return the descriptor; errors as `open_existing`."""
    if not os.path.lexists(path):
        os.close(create(path))
    return open_existing(path, os.O_WRONLY | os.O_APPEND)


def append(path: Path, data: bytes) -> None:
    """Add to a file that was made here, or make it.

    Raises:
        InputError, ResourceError: it cannot be written, see `writing`.
    """
    with writing(path, len(data)):
        descriptor = open_to_append(path)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def run_folder(out: Path) -> Path:
    """Return the hidden working directory of a run, beside its output; it is removed when the run ends."""
    return out.with_name(f".{out.name}.qf")


def make_folder(path: Path) -> None:
    """Make a directory unless it exists.

    Raises:
        OSError: something else has that name, a link included.
    """
    try:
        path.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise


def save(
    path: Path, data: bytes | memoryview, *, overwrite: bool = False, disk: Disk | None = None
) -> None:
    """Write a file that a person has named: durable, whole or not at all.

    Raises:
        InputError, RefusedError: see `check_new`.
        DeniedError: this user may not write there.
        ResourceError: the disk is full or fails.
    """
    disk = disk or DISK
    part = f".{path.name[:200]}.{os.urandom(4).hex()}.part"
    check = partial(check_new, path, overwrite=overwrite)
    with writing(path, len(data)), whole_file(path, part, disk, check) as descriptor:
        disk.write_at(descriptor, memoryview(data), 0)


def check_name(path: Path, option: str) -> None:
    """Refuse a name for a new file or directory that contains control characters or line separators.

    Raises:
        UsageError: its last part holds a control character or a separator of lines; ``option`` names it.
    """
    if any(unicodedata.category(c) in {"Cc", "Zl", "Zp"} for c in path.name):
        raise UsageError(
            f"{option} {path.name!a}: a control character in a name", "a name without it"
        )


def check_new(path: Path, option: str = "", *, overwrite: bool = False, adds: bool = False) -> None:
    """Refuse to write to a path that a person named if it is taken or not writable; call it before the work too.

    Args:
        path: what is to be written.
        option: that names it.
        overwrite: whether an earlier file may be replaced.
        adds: whether it is added to, for which the file and not its directory has to be writable.

    Raises:
        UsageError: as `check_name`.
        InputError: its directory is missing; DeniedError: this user may not write there.
        RefusedError: it is there and not to be replaced, or a link, or no file.
    """
    said = f"{option} {path}".strip()
    check_name(path, option or "output")
    if not path.parent.is_dir():
        raise InputError(f"{said}: no directory {path.parent}", f"mkdir -p {path.parent}")
    changed = path if adds and path.is_file() else path.parent
    if not os.access(changed, os.W_OK):
        raise denied(path, f"no permission to write to {changed}", said)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{said}: {error.strerror}", "choose another name") from error
    if not stat.S_ISREG(found.st_mode):
        what = "is a link" if stat.S_ISLNK(found.st_mode) else "is no file"
        raise RefusedError(f"{said}: {what}", "choose another name", file=str(path))
    if not overwrite:
        hint = "replace it with --overwrite, or choose another name"
        raise RefusedError(f"{said}: exists", hint, file=str(path))


def free_bytes(directory: Path) -> int:
    """Return the free bytes for this user in a directory, or in its nearest parent that exists."""
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    return shutil.disk_usage(directory).free


@contextmanager
def writing(path: Path, needed: int) -> Iterator[None]:
    """Convert an OSError while writing ``needed`` bytes at ``path`` to `DeniedError` or `ResourceError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _DENIED:
            raise denied(path, reason) from error
        other = "check the path and the disk, then run the command again"
        hint = "" if error.errno in _FULL else other
        raise no_space(path, needed, reason, hint) from error


def denied(path: Path, reason: str, said: str = "") -> DeniedError:
    """Return the error for missing write permission; ``said``: how the user named the place."""
    return DeniedError(
        f"{said or path}: cannot be written: {reason}",
        "choose a place that you may write to, or change its permissions",
        file=str(path),
    )


def no_space(path: Path, needed: int, reason: str, hint: str = "") -> ResourceError:
    """Return the error for a full disk with the bytes needed and free; ``hint`` replaces the advice to free space."""
    place = path if path.is_dir() else path.parent
    free = free_bytes(place)
    # What is beside a result is removed when the run ends.
    runs = [one.parent for one in (place, *place.parents) if re.fullmatch(r"\..+\.qf", one.name)]
    place = [place, *runs][-1]
    large = f" ({needed / 1e9:.3g} GB, {free / 1e9:.3g} GB)" if needed >= 1e8 else ""
    full = f"free space in {place} (or raise its quota or `ulimit -f`), then run the command again"
    return ResourceError.at(
        path, f"{reason}; {needed} bytes needed, {free} free{large}", hint or full
    )
