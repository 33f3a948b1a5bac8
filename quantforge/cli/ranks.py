"""Ranks: processes that torchrun starts with one command, of which the first one speaks.

They share the run (`--join`), or a model that answers: each holds a part of it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from quantforge.checkpoint.disk import create
from quantforge.errors import UsageError
from quantforge.settings import under_torchrun

OWN_FILE = "TORCHELASTIC_ERROR_FILE"  # in a directory of its own, inside of one for all; torchrun removes them
VERBS = ("quantize", "release", "sweep", "generate")


def silent() -> bool:
    """Return whether another of the processes speaks for this one."""
    return under_torchrun() and os.environ["RANK"] != "0"


@contextmanager
def one_speaks() -> Iterator[None]:
    """Drop what processes write to stdout for which another one speaks."""
    if not silent():
        yield
        return
    with redirect_stdout(io.StringIO()):
        yield


def said_already(text: str) -> bool:
    """Return whether another of the processes on this machine has said the same; from now on this one has."""
    if not under_torchrun() or OWN_FILE not in os.environ:
        return False
    name = f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        os.close(create(Path(os.environ[OWN_FILE]).parents[1] / name))
    except FileExistsError:
        return True
    except (OSError, IndexError):
        pass
    return False


def own_device(asked: str) -> str:
    """Return the device of this process: of several GPUs in a machine each has its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if under_torchrun() and asked == "cuda" else asked


def check_ranks(arguments: Sequence[str]) -> None:
    """Refuse what the processes of torchrun would each do anew.

    Raises:
        UsageError: another verb than those that are shared.
    """
    if under_torchrun() and arguments[0] not in VERBS:
        raise UsageError(
            f"torchrun: its processes share nothing of '{arguments[0]}'",
            f"torchrun is for {', '.join(VERBS)}",
        )
