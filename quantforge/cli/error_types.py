"""Errors of the system and of libraries under us as errors of ours, each with its exit code."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from quantforge.checkpoint.disk import create
from quantforge.cli import usage_errors
from quantforge.errors import InputError, QuantForgeError, ResourceError


def as_ours(error: Exception, arguments: list[str], group: Any) -> QuantForgeError | None:
    """Return an error as one of ours, or None for a bug; ``group`` is the command that has the verbs."""
    if isinstance(error, QuantForgeError):
        return error
    if isinstance(error, usage_errors.CLICK):
        return usage_errors.in_our_words(error, arguments, group)
    if (
        isinstance(error, OSError) and error.errno
    ):  # what no reader has foreseen: a name too long, a bad disk
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE}
        kind = ResourceError if full else InputError
        return kind(f"{where}{error.strerror}", "check the path, its permissions and the disk")
    # torch reports a failed allocation as a RuntimeError, on a GPU as a class of its own
    if (
        isinstance(error, MemoryError)
        or "DefaultCPUAllocator" in str(error)
        or (type(error).__name__ == "OutOfMemoryError")
    ):
        return ResourceError(
            "out of memory",
            "see what `quantforge plan` predicts; --activations disk and fewer --samples need less",
        )
    return None


def saved() -> str:
    """Save the traceback of the present error; return the file."""
    place = Path(tempfile.gettempdir()) / f"quantforge-{os.urandom(8).hex()}.traceback"
    with os.fdopen(create(place, 0o600), "wb") as file:
        file.write(
            f"{shlex.join(sys.argv)}\n\n{traceback.format_exc()}".encode(
                "utf-8", "backslashreplace"
            )
        )
    return str(place)
