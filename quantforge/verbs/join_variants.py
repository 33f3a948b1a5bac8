"""Join variants: processes that give the same command share them, each making some that no other makes.

A variant is made by one process at a time, and the lock of its output says so: where that process dies, the next one
that looks for work goes on with it. Whoever looks for work takes half of what can share a pass of the rows, so that the
others find some too. One process at a time looks, and one puts together what all have made (`turn`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from quantforge.checkpoint.disk import place_of_run, writing
from quantforge.checkpoint.lock import Lock, StaleLockMonitor
from quantforge.errors import BusyError, RefusedError
from quantforge.execution.progress import followed, phase, tell
from quantforge.execution.resumption import check_versions
from quantforge.settings import Settings
from quantforge.verbs.asked_result import Variant
from quantforge.verbs.quantize_variants import (
    AskedVariant,
    ReadyVariant,
    asked_variants,
    carry_out,
    together,
)
from quantforge.verbs.run_inputs import RunInputs

POLL_SECONDS = 0.2


def join_variants(
    model: str | Path,
    variants: Sequence[Variant],
    is_there: Callable[[int], bool],
    place: Path,
    settings: Settings,
) -> list[int]:
    """Make variants that no other process makes, until all are there; torch's defaults are the caller's.

    Args:
        model: as of `quantize`.
        variants: what is wanted, each with an output of its own.
        is_there: whether a variant, by its number, is finished.
        place: of what the processes share, for `turn`.
        settings: how to run.

    Returns:
        The numbers of those that this process made.

    Raises:
        QuantForgeError: as `quantize_variants`.
    """
    made: list[int] = []
    settings = replace(settings, join=False)  # each variant is made by one process
    with followed(settings.progress):
        asked = asked_variants(model, variants, settings)
        monitor = StaleLockMonitor(settings.note)
        vacancies = _Vacancies(dict(enumerate(asked)), is_there, monitor)
        while vacancies.missing:
            with ExitStack() as stages:
                with turn(place, settings.note):
                    group = vacancies.taken(stages)
                # Of what this process has made the share is told already.
                elsewhere = len(variants) - len(vacancies.missing) - len(group)
                tell(share=elsewhere / len(variants))
                if group:
                    with phase("", 0.94 * len(group) / len(variants)):
                        made += carry_out(group)
                    continue
            if vacancies.missing:
                tell(
                    f"made by other processes: {len(vacancies.missing)} of {len(variants)} variants",
                    waits=True,
                )
                time.sleep(POLL_SECONDS)
    return sorted(made)


@contextmanager
def turn(place: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process does what is inside, for the same place.

    Args:
        place: which.
        note: is told of a process that does it and does not respond.

    Raises:
        RefusedError: what lies there is no lock.
        ResourceError: it cannot be made.
    """
    lock, monitor = Lock(place_of_run(place)), StaleLockMonitor(note)
    try:  # a signal may come between the lock and what is inside
        while True:
            try:
                with writing(place.parent, 0):
                    lock.take()
                break
            except BusyError as error:
                monitor.meet(error)
                time.sleep(POLL_SECONDS)
        yield
    finally:
        lock.release()


class _Vacancies:
    """Variants that are not there, of which nobody may be making some."""

    def __init__(
        self,
        missing: dict[int, AskedVariant],
        is_there: Callable[[int], bool],
        monitor: StaleLockMonitor,
    ) -> None:
        self.missing, self._count = missing, len(missing)
        self._is_there, self._monitor = is_there, monitor
        self._read: dict[int, RunInputs] = {}

    def taken(self, stages: ExitStack) -> list[ReadyVariant]:
        """Enter the stages of half of the variants that are free and share a pass; none when all are taken."""
        for asked in self.missing.values():
            check_versions(asked.wanted.stage)
        group: list[ReadyVariant] = []
        for number, asked in [*self.missing.items()]:
            held = stages.enter_context(ExitStack())
            if not self._enter(number, asked, held):
                continue
            if number not in self._read:
                with phase("", 0.05 / self._count):
                    self._read[number] = asked.wanted.read(asked.settings)
            ready = ReadyVariant(number, asked, self._read[number], held)
            if group and not together(group[0], ready):
                held.close()
                continue
            group.append(ready)
        kept = (len(group) + 1) // 2
        for ready in group[kept:]:
            ready.held.close()
        for ready in group[:kept]:
            del self.missing[ready.number]
        return group[:kept]

    def _enter(self, number: int, asked: AskedVariant, held: ExitStack) -> bool:
        """Enter the stage of a variant, unless it is there or another process makes it."""
        if self._is_there(number):
            del self.missing[number]
            return False
        try:
            held.enter_context(asked.wanted.stage)
        except BusyError as error:
            self._monitor.meet(error)
            return False
        except RefusedError:
            if not self._is_there(number):  # else it was published just now
                raise
            del self.missing[number]
            return False
        return True
