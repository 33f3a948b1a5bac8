"""Sharing a run: processes claim its units, and one of them puts together what all have finished.

A worker writes the tensors of a unit into a file of its claim. When all units are done, whoever gets the lock of the
output runs the plan as ever, but copies what was finished instead of computing it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quantforge.checkpoint.lock import StaleLockMonitor, Watch
from quantforge.checkpoint.safetensors import TensorEntry
from quantforge.errors import BusyError, IntegrityError
from quantforge.execution.journal import recorded_fingerprint, records_of, written
from quantforge.execution.record import Record
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.units import claimed_units
from quantforge.plans import Plan, StoredTensor

if TYPE_CHECKING:
    from quantforge.checkpoint.stage import Stage
    from quantforge.execution.claims import Claims
    from quantforge.execution.units import Unit


Result = TypeVar("Result")
POLL_SECONDS = 0.2
INSIDE = "inside"  # in the record of a unit: those of the units that went with it
KEPT = "kept"  # in the record of a unit that one process alone had finished: it is in the journal of the output
PATIENCE_SECONDS = (
    900.0  # with a process that puts the result together: digests of large files take minutes
)


@dataclass(frozen=True, slots=True)
class FinishedUnit:
    """A unit that some worker has finished: its record, and the tensors in its file."""

    record: Record
    file: Path
    entries: tuple[TensorEntry, ...]

    def copy_to(self, output: UnitOutput) -> Record:
        """Write the tensors, and return the record.

        Raises:
            IntegrityError: they are not what the worker had written.
        """
        for entry in self.entries:
            output.copy(entry.name, entry)
        if output.sums != self.record["sums"]:
            raise IntegrityError.at(
                self.file,
                f"{self.record['unit']} is not what a worker had written",
                f"start afresh: rm -r {self.file.parents[2]}",
            )
        return {key: value for key, value in self.record.items() if key not in {"unit", "sums"}}


def locked(
    stage: Stage, work: Callable[[], Result], note: Callable[[str], None],
    unless: Callable[[], bool] = lambda: False, patience: float | None = None,
) -> Result | None:  # fmt: skip
    """Do something under the lock of an output, as soon as no other process has it.

    Args:
        stage: of the output.
        work: what to do.
        note: is told of a process that has the lock and does not respond.
        unless: whether it need not be done any more; None is returned then.
        patience: seconds in which the journal of whoever has the lock has to grow; `PATIENCE_SECONDS` by default.

    Raises:
        BusyError: another process has the lock, and its journal has not grown.
        QuantForgeError: as entering the stage, or ``work``.
    """
    patience = PATIENCE_SECONDS if patience is None else patience
    watch, monitor = Watch(), StaleLockMonitor(note)
    while not unless():
        try:
            with stage:
                return work()
        except BusyError as error:
            monitor.meet(error)
            if watch.still("journal", written(stage.journal)) > patience:
                raise
        time.sleep(POLL_SECONDS)
    return None


def patience(plan: Plan) -> float:
    """Return the seconds to wait for whoever puts a result together: a large block may be tuned for hours."""
    return math.inf if plan.tune else PATIENCE_SECONDS


def finished_units(claims: Claims, units: Sequence[Unit]) -> dict[str, FinishedUnit]:
    """Return the units of a run that are finished, by name; errors as `Claims.finished`."""
    found: dict[str, FinishedUnit] = {}
    records = claims.finished()
    own = {unit.name: unit.stored for unit in units}
    for unit in claimed_units(units):
        if unit.name not in records or KEPT in records[unit.name][0]:
            continue
        record, file = records[unit.name]
        entries = {entry.name: entry for entry in _entries(unit, file)}
        inside: dict[str, Record] = record.pop(INSIDE, {})
        for name, one in {unit.name: record, **inside}.items():
            mine = tuple(entries[stored.name] for stored in own[name])
            found[name] = FinishedUnit(one, file, mine)
    return found


def finished_alone(stage: Stage, units: Iterable[Unit], fingerprint: Mapping[str, str]) -> set[str]:
    """Return the names of the units that one process finished whole before others shared the run.

    Args:
        stage: of the output.
        units: that processes claim.
        fingerprint: of the run.

    Raises:
        IntegrityError: the journal is damaged.
    """
    if recorded_fingerprint(stage.journal) != fingerprint:
        return set()
    done = {*records_of(stage.journal)[0]}
    return {unit.name for unit in units if done >= {unit.name, *unit.inside}}


def places(unit: Unit) -> tuple[tuple[tuple[StoredTensor, int], ...], int]:
    """Return where the tensors of a unit lie in its file, one behind the other, and the size of the file."""
    places, offset = [], 0
    for stored in unit.stored:
        places.append((stored, offset))
        offset += stored.nbytes
    return tuple(places), offset


def _entries(unit: Unit, file: Path) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(stored.name, stored.dtype, stored.shape, file, start, start + stored.nbytes)
        for stored, start in places(unit)[0]
    )
