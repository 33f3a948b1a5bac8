"""Record the units of a run: each is timed, journaled and reported, and events are checked against the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quantforge.events import Event
from quantforge.execution.journal import (
    Journal,
    Record,
    count_scaled_activations,
    events_of,
    figures_of,
)
from quantforge.execution.units import list_units, work_shares
from quantforge.progress import phase, progress_of

if TYPE_CHECKING:
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.execution.unit_output import UnitOutput


class UnitRecorder:
    """Journals and reports the units of a run.

    Args:
        inputs: inputs of the run.
        journal: journal of the run, or of the interrupted run that it resumes.
        output: writer of the current unit.
        copied: names of the units that are only copied, and not reported, because other processes finished them.

    Attributes:
        journal: records of the finished units.
        output: writer of the current unit.
        units: all units of the run, by name.
    """

    def __init__(
        self, inputs: RunInputs, journal: Journal, output: UnitOutput, copied: Collection[str]
    ) -> None:
        self._inputs, self.journal, self.output, self._copied = inputs, journal, output, copied
        plan, blocks = inputs.planned.plan, inputs.planned.model_layout.blocks
        self.units = {unit.name: unit for unit in list_units(plan, blocks)}
        self._work_shares = work_shares(self.units.values())
        # Seconds spent on experts that were units nested in the current one.
        self._expert_seconds = 0.0

    def share_progress(self, run_count: int) -> None:
        """Divide the units' shares of the total work by the number of runs that share a pass."""
        self._work_shares = {name: share / run_count for name, share in self._work_shares.items()}

    def unfinished(self, names: Iterable[str]) -> list[str]:
        """Return those of the given units that are not done."""
        return [name for name in names if name not in self.journal.done]

    @contextmanager
    def record_unit(self, name: str, start: float | None = None) -> Iterator[Record]:
        """Run a unit: the body writes its tensors and fills the yielded record, which is then journaled and reported.

        Args:
            name: name of the unit.
            start: when the unit began, in seconds of the monotonic clock; default: now.
        """
        start = time.monotonic() if start is None else start
        record: Record = {}
        self.output.begin_unit()
        with phase("", self.work_share(name), name):
            yield record
        self.journal.commit(name, {**record, "checksums": self.output.finish()})
        if name not in self._copied:
            self.report(name, record, start + self._expert_seconds)
        self._expert_seconds = 0.0
        self._inputs.settings.policy.check(self.events())

    def process_expert(self, name: str, work: Callable[[], Record]) -> bool:
        """Run the unit of an expert inside that of its block unless it is already done; return whether it ran."""
        if name in self.journal.done:
            return False
        start = time.monotonic()
        with self.output.nested_unit():
            record = work()
            self.journal.commit(name, {**record, "checksums": self.output.finish()})
        self.report(name, record, start)
        self._expert_seconds += time.monotonic() - start
        return True

    def work_share(self, name: str) -> float:
        """Return a unit's share of the total work."""
        return self._work_shares.get(name, 0.0)

    def report(self, name: str, record: Record, start: float) -> None:
        """Report to the caller that a unit which began at ``start`` is done."""
        num_finished, total = len(self.journal.done), len(self.units)
        self._inputs.settings.progress(progress_of(name, record, num_finished, total, start))

    def events(self) -> list[Event]:
        """Return the events of all finished units, in order."""
        return events_of(self._records())

    def all_events(self) -> tuple[Event, ...]:
        """Return the events of planning, of the calibration data and of the units."""
        calibrated = self._inputs.calibrated
        rows = calibrated.events if calibrated else ()
        return (*self._inputs.planned.plan.substitutions, *rows, *self.events())

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the figures of every rounded tensor, by name."""
        return figures_of(self._records())

    def scaled_activations(self) -> tuple[int, int] | None:
        """Return the number of activations with scale factors, see `count_scaled_activations`."""
        return count_scaled_activations(self._records())

    def _records(self) -> Iterator[Record]:
        for name in self.units:
            if name in self.journal.done:
                yield self.journal.done[name]
