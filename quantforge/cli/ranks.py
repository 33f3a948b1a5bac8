"""Ranks: processes that torchrun starts with one command, of which the first one speaks.

They share the run (`--join`), or a model that answers: each holds a part of it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from quantforge.errors import UsageError

STARTED = (
    "TORCHELASTIC_RUN_ID"  # which torchrun alone sets; the other names are set by more launchers
)
VERBS = ("quantize", "release", "sweep", "generate")


def shared() -> bool:
    """Return whether this is one of the processes of torchrun."""
    return STARTED in os.environ


def silent() -> bool:
    """Return whether another of the processes speaks for this one."""
    return shared() and os.environ["RANK"] != "0"


@contextmanager
def one_speaks() -> Iterator[None]:
    """Drop what processes write to stdout for which another one speaks."""
    if not silent():
        yield
        return
    with redirect_stdout(io.StringIO()):
        yield


def own_device(asked: str) -> str:
    """Return the device of this process: of several GPUs in a machine each has its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if shared() and asked == "cuda" else asked


def check_ranks(arguments: Sequence[str]) -> None:
    """Refuse what the processes of torchrun would each do anew.

    Raises:
        UsageError: another verb than those that are shared.
    """
    if shared() and arguments[0] not in VERBS:
        raise UsageError(
            f"torchrun: its processes share nothing of '{arguments[0]}'",
            f"torchrun is for {', '.join(VERBS)}",
        )
