"""The `Opener` of this package (see `quantforge_files`), whose errors are `InputError`; open a file again."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantforge.errors import InputError, IntegrityError
from quantforge_files import roles, system
from quantforge_files.opener import Opener, Stamp
from quantforge_files.roles import FileRole

FILES = Opener(
    lambda detail, hint, subject, file: InputError(detail, hint, subject=subject, file=file)
)


@contextmanager
def reopen(path: Path, stamp: Stamp | None, tensor: str | None = None) -> Iterator[int]:
    """Open a file that was read before, and yield the descriptor.

    Raises:
        IntegrityError: it was replaced, truncated or written to since its stamp was taken, or during the block.
    """
    try:
        descriptor = os.open(path, system.READ_FLAGS)
    except OSError as error:
        raise changed_error(path, tensor) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise changed_error(path, tensor)
        yield descriptor
        if stamp is not None and Stamp.of(descriptor) != stamp:
            raise changed_error(path, tensor)
    finally:
        os.close(descriptor)


def changed_error(path: Path, tensor: str | None = None) -> IntegrityError:
    """Return the error for a file that has changed since the run opened it."""
    return IntegrityError(
        "replaced or changed while it was being read",
        "let downloads and other writers finish, then run again",
        file=str(path),
        tensor=tensor,
        subject=str(path),
    )


def parse_object(
    data: bytes, path: Path | str, role: FileRole = roles.CONFIG, *, loose: bool = False
) -> dict[str, Any]:
    """Parse one JSON object, the whole content of ``path``; errors as `Opener.parse_object`."""
    return FILES.parse_object(data, path, role, loose=loose)


def read_object(
    path: Path, role: FileRole, inside: Path | None, *, loose: bool = False
) -> dict[str, Any]:
    """Read a JSON file whose top level is an object; errors as `Opener.read` and `parse_object`."""
    return parse_object(FILES.read(path, role, inside), path, role, loose=loose)
