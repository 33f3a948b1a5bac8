"""Quiet holders: processes that have a lock and are not heard of, so that somebody has to say what becomes of them.

A lock of the system dies with its owner, but not with one that was stopped: whoever waits would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from quantforge.checkpoint.lock import HeldError
from quantforge.errors import BusyError
from quantforge.execution.leases import Watch

QUIET_SECONDS = 10.0


class QuietHolders:
    """Watcher of those for whose locks this process waits; ``note`` is told once of each that is not heard of."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._watch = note, Watch()
        self._told: set[object] = set()

    def meet(self, error: BusyError) -> None:
        """Look at the holder of a lock that was not to be had."""
        if not isinstance(error, HeldError):
            return
        who = error.path, error.pid, error.host, error.started
        if who in self._told or self._watch.still(who, error.beat) < QUIET_SECONDS:
            return
        self._told.add(who)
        self._note(
            f"nothing is heard of process {error.pid} on {error.host}, which holds {error.path}: this one waits for it;"
            f" if it was stopped, kill -CONT {error.pid} lets it go on there, and after kill -9 {error.pid} another"
            " does its part"
        )
