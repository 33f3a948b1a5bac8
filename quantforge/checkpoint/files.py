"""Opening files of a model that somebody else made: regular, inside the model, and unchanged.

A model directory is untrusted input. A link in it could publish a private file as part of the
result, a FIFO would hang the run, and a file that is replaced while it is read would give tensors
of two models. Three rules:

* a file may be a link only into the model directory itself or, for a snapshot of the hub cache
  (``models--org--name/snapshots/<revision>/``), into the ``blobs/`` of the same repository;
* whatever the name leads to must be a regular file, checked on the open descriptor;
* device, inode, size and time of the open file make its `Stamp`; every later read compares it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantforge.errors import InputError, IntegrityError


@dataclass(frozen=True, slots=True)
class Stamp:
    """What identifies the content of an open file without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Stamp:
        """The stamp of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def real_file(path: Path, root: Path | None = None) -> Path:
    """Return where ``path`` really is, after checking that it may be read as part of a model.

    Args:
        path: a name inside the model directory.
        root: the model directory; the directory of ``path`` when it is left out.

    Raises:
        InputError: missing, a loop of links, a link out of the model, or no regular file.
    """
    home = Path(os.path.realpath(root or path.parent))
    try:
        real = Path(os.path.realpath(path, strict=True))
        regular = stat.S_ISREG(real.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from error
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise InputError(
            f"{path}: is a link to {real}, outside of the model",
            "a model may link to its own files (or a hub snapshot to its blobs); copy the file",
            file=str(path),
        )
    if not regular:
        raise InputError(f"{path}: not a regular file", "remove it from the model", file=str(path))
    return real


def listing(directory: Path) -> list[str]:
    """Return the names in a directory of a model, sorted.

    Raises:
        InputError: missing, not a directory, or unreadable.
    """
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise _unreadable(directory, error) from error


@contextmanager
def opened(path: Path, root: Path | None = None) -> Iterator[int]:
    """Open a file of a model for reading; errors as `real_file`. Yields the descriptor."""
    real = real_file(path, root)
    try:
        # O_NONBLOCK: a FIFO put there since the check must not block the open.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError(
                f"{path}: not a regular file", "remove it from the model", file=str(path)
            )
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def reopened(path: Path, stamp: Stamp | None, tensor: str | None = None) -> Iterator[int]:
    """Open a file that was read before; after the reading, check that it still is the same.

    Raises:
        IntegrityError: it was replaced, truncated or written to since its stamp was taken.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise changed(path, tensor) from error
    try:
        yield descriptor
        if stamp is not None and Stamp.of(descriptor) != stamp:
            raise changed(path, tensor)
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit: int, root: Path | None = None) -> bytes:
    """Read a small file of a model whole.

    Raises:
        InputError: as `real_file`, or larger than ``limit`` bytes.
    """
    with opened(path, root) as descriptor:
        if (size := os.fstat(descriptor).st_size) > limit:
            raise InputError(
                f"{path}: {size} bytes, more than {limit}",
                "no model needs a file of this kind that large",
                file=str(path),
            )
        return os.pread(descriptor, size, 0)


def changed(path: Path, tensor: str | None = None) -> IntegrityError:
    """The error for a file that is not what it was when the run opened it."""
    return IntegrityError(
        f"{path}: replaced or changed while it was being read",
        "let downloads and other writers finish, then run again",
        file=str(path),
        tensor=tensor,
    )


def _unreadable(path: Path, error: OSError) -> InputError:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    hint = "check the path" if missing else "check links and permissions"
    return InputError(f"{path}: {error.strerror}", hint, file=str(path))
