"""Ranks: processes that torchrun starts with one command. They share the run (`--join`), and the first one speaks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from quantforge.errors import UsageError

STARTED = (
    "TORCHELASTIC_RUN_ID"  # which torchrun alone sets; the other names are set by more launchers
)
SHARED = "quantize"


class Rank(NamedTuple):
    """One of the processes: its number among all, and among those of its machine."""

    number: int
    local: int

    def device(self, asked: str) -> str:
        """Return the device of this process: with several GPUs each has its own."""
        return f"{asked}:{self.local}" if asked == "cuda" else asked


def rank_of_process() -> Rank | None:
    """Return which of the processes of torchrun this is; None if it was started by itself."""
    if STARTED not in os.environ:
        return None
    return Rank(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))


def check_ranks(arguments: Sequence[str]) -> None:
    """Refuse what the processes of torchrun would each do anew.

    Raises:
        UsageError: another verb than the one that is shared.
    """
    if rank_of_process() is not None and arguments[0] != SHARED:
        raise UsageError(
            f"torchrun: its processes share nothing of '{arguments[0]}'",
            f"torchrun is for {SHARED}",
        )
