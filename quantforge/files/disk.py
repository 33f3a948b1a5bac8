"""The system calls that write to a disk, and the error that each failure becomes.

`writer` and `stage` write through `Disk`. Tests pass one whose calls fail at a chosen moment; nothing else in the
project replaces it. A failure becomes a `DeniedError` if this user may not write (EACCES, EPERM, EROFS), otherwise a
`ResourceError` that says how many bytes were needed and how many are free. A full disk can show as ENOSPC, EDQUOT,
EFBIG (a limit of the user or of the file system) or a short write; the error then advises to free space.

Nothing else in the project opens a file for writing (a test checks), because names beside an output may have been
planted: a link leads to somebody's file, and existing files belong to somebody.
`create_file` makes a new file or fails, `open_existing` opens a regular file that `create_file` made before,
`make_directory` makes a directory or accepts an existing one, and `save_file` writes a file that a person has named:
completely or not at all, and over an existing one only on request.
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
    """The system calls, see `quantforge_files.system`; tests replace them."""

    allocate: Callable[[int, int], None] = system.allocate
    pwrite: Callable[[int, memoryview, int], int] = os.pwrite
    fsync: Callable[[int], None] = system.sync_file
    rename: Callable[[Path, Path], None] = os.rename
    exchange: Callable[[Path, Path], None] = system.swap_paths

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``; a write without progress is treated as a full disk."""
        num_written = 0
        while num_written < len(data):
            count = self.pwrite(descriptor, data[num_written:], offset + num_written)
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            num_written += count

    def sync(self, path: Path) -> None:
        """Make the content of a file, or the names in a directory, durable."""
        descriptor = system.open_nofollow(path, system.READ_FLAGS)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()
_DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PERMISSION_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def create_file(path: Path, mode: int = 0o666) -> int:
    """Create a new file (``mode`` is reduced by the umask) and return its descriptor, for reading and writing.

    Raises:
        FileExistsError: the name is taken, possibly by a broken link.
    """
    return system.open_nofollow(path, system.CREATE_FLAGS, mode)


def recreate_file(path: Path) -> int:
    """Create a new file, replacing one of the same name that an interrupted run left."""
    path.unlink(missing_ok=True)
    return create_file(path)


def open_existing(path: Path, access: int = os.O_WRONLY) -> int:
    """Open a file that `create_file` made before; refuse anything else at that name.

    Raises:
        OSError: it is missing, a link, not a regular file, or has a second name elsewhere.
    """
    descriptor = system.open_nofollow(path, access | system.EXISTING_FLAGS)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        if not status.st_nlink:  # it was removed while it was being opened
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        raise OSError(errno.EINVAL, "is no file that was made here", str(path))
    return descriptor


@contextmanager
def atomic_file(
    path: Path, part_name: str, disk: Disk | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[int]:
    """Create a file that is called ``part_name`` until it is complete and durable, and yield its descriptor.

    ``check`` is called before the file gets its final name, and may raise. After an error the partial file is removed.
    """
    disk = disk or DISK
    unfinished = path.with_name(part_name)
    descriptor = recreate_file(unfinished)
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
    """Open a file that QuantForge made for appending, or create it; errors as `open_existing`."""
    if not os.path.lexists(path):
        os.close(create_file(path))
    return open_existing(path, os.O_WRONLY | os.O_APPEND)


def append_to_file(path: Path, data: bytes) -> None:
    """Append to a file that QuantForge made, or create it.

    Raises:
        InputError, ResourceError: it cannot be written, see `write_errors`.
    """
    with write_errors(path, len(data)):
        descriptor = open_to_append(path)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def run_folder(out: Path) -> Path:
    """Return the hidden working directory of a run, beside its output; it is removed when the run ends."""
    return out.with_name(f".{out.name}.qf")


def make_directory(path: Path) -> None:
    """Create a directory unless it exists.

    Raises:
        OSError: the name is taken by something else, such as a link.
    """
    try:
        path.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise


def save_file(
    path: Path, data: bytes | memoryview, *, overwrite: bool = False, disk: Disk | None = None
) -> None:
    """Write a file that a person has named: durably, and completely or not at all.

    Raises:
        InputError, RefusedError: see `check_new_file`.
        DeniedError: this user may not write there.
        ResourceError: the disk is full or fails.
    """
    disk = disk or DISK
    part_name = f".{path.name[:200]}.{os.urandom(4).hex()}.part"
    check = partial(check_new_file, path, overwrite=overwrite)
    with write_errors(path, len(data)), atomic_file(path, part_name, disk, check) as descriptor:
        disk.write_at(descriptor, memoryview(data), 0)


def check_name(path: Path, option: str) -> None:
    """Refuse a name for a new file or directory that contains control characters or line separators.

    Raises:
        UsageError: the last part of the path has such a character; the message names ``option``.
    """
    if any(unicodedata.category(c) in {"Cc", "Zl", "Zp"} for c in path.name):
        raise UsageError(
            f"{option} {path.name!a}: a control character in a name", "a name without it"
        )


def check_new_file(
    path: Path, option: str = "", *, overwrite: bool = False, appends: bool = False
) -> None:
    """Refuse a path for a new file that is taken or not writable; call it before the work as well.

    Args:
        path: the file to write.
        option: the option that names it, for messages.
        overwrite: whether an existing file may be replaced.
        appends: whether the file is appended to, so that the file, not its directory, must be writable.

    Raises:
        UsageError: as `check_name`.
        InputError: its directory is missing.
        DeniedError: this user may not write there.
        RefusedError: it exists and must not be replaced, or it is a link, or not a file.
    """
    label = f"{option} {path}".strip()
    check_name(path, option or "output")
    if not path.parent.is_dir():
        raise InputError(f"{label}: no directory {path.parent}", f"mkdir -p {path.parent}")
    written_to = path if appends and path.is_file() else path.parent
    if not os.access(written_to, os.W_OK):
        raise denied_error(path, f"no permission to write to {written_to}", label)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{label}: {error.strerror}", "choose another name") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "is a link" if stat.S_ISLNK(status.st_mode) else "is no file"
        raise RefusedError(f"{label}: {kind}", "choose another name", file=str(path))
    if not overwrite:
        hint = "replace it with --overwrite, or choose another name"
        raise RefusedError(f"{label}: exists", hint, file=str(path))


def free_bytes(directory: Path) -> int:
    """Return how many bytes are free for this user in a directory, or in its nearest existing parent."""
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    return shutil.disk_usage(directory).free


@contextmanager
def write_errors(path: Path, needed: int) -> Iterator[None]:
    """Convert an OSError while writing ``needed`` bytes at ``path`` to `DeniedError` or `ResourceError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _PERMISSION_ERRORS:
            raise denied_error(path, reason) from error
        other = "check the path and the disk, then run the command again"
        hint = "" if error.errno in _DISK_FULL_ERRORS else other
        raise no_space_error(path, needed, reason, hint) from error


def denied_error(path: Path, reason: str, label: str = "") -> DeniedError:
    """Return the error for missing write permission; ``label`` is the place as the user named it."""
    return DeniedError(
        f"{label or path}: cannot be written: {reason}",
        "choose a place that you may write to, or change its permissions",
        file=str(path),
    )


def no_space_error(path: Path, needed: int, reason: str, hint: str = "") -> ResourceError:
    """Return the error for a full disk with the bytes needed and free; ``hint`` replaces the advice to free space."""
    directory = path if path.is_dir() else path.parent
    num_free = free_bytes(directory)
    # What is beside a result is removed when the run ends.
    runs = [
        ancestor.parent
        for ancestor in (directory, *directory.parents)
        if re.fullmatch(r"\..+\.qf", ancestor.name)
    ]
    directory = [directory, *runs][-1]
    in_gigabytes = f" ({needed / 1e9:.3g} GB, {num_free / 1e9:.3g} GB)" if needed >= 1e8 else ""
    free_hint = (
        f"free space in {directory} (or raise its quota or `ulimit -f`), then run the command again"
    )
    return ResourceError.at(
        path, f"{reason}; {needed} bytes needed, {num_free} free{in_gigabytes}", hint or free_hint
    )
