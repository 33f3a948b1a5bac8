"""The opener of this package (see `quantforge_files`), whose refusals are `InputError`, and reading a file again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from quantforge.errors import InputError, IntegrityError
from quantforge_files import Opener, Stamp
from quantforge_files.stamp import reopened as opened_again

FILES = Opener(lambda message, hint, file: InputError(message, hint, file=file))


def reopened(
    path: Path, stamp: Stamp | None, tensor: str | None = None
) -> AbstractContextManager[int]:
    """Open a file that was read before; `IntegrityError` if it is not the same before and after the reading."""
    return opened_again(path, stamp, lambda: changed(path, tensor))


def changed(path: Path, tensor: str | None = None) -> IntegrityError:
    """Return the error for a file that is not what it was when the run opened it."""
    return IntegrityError(
        f"{path}: replaced or changed while it was being read",
        "let downloads and other writers finish, then run again",
        file=str(path),
        tensor=tensor,
    )
