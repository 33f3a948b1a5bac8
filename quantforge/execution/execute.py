"""The run: a plan executed one part of the model at a time, straight into the preallocated files of a stage.

For methods that look at data a part is a decoder block: observe what its linears read while the hidden states pass,
transform, round, write, forget it. Methods without data only read, round and write. The next block reads what the
source's block computes, not what the quantized one does: so one pass observes and advances.
A part is done when its bytes are on the disk and the journal says so, with their checksums; the same command goes on
after the last of them, and the hidden states are brought there by running the blocks of the source again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.events import Event
from quantforge.execution.block_tensors import BlockTensors
from quantforge.execution.calibrated_block import CalibratedBlock
from quantforge.execution.data_free import DataFree
from quantforge.execution.guide import observe_gradients, token_weights
from quantforge.execution.guided_rounding import GuidedRounding
from quantforge.execution.journal import Workspace
from quantforge.execution.lockstep import execute_together
from quantforge.execution.passing_rows import observe_head, stream_of
from quantforge.execution.progress import phase
from quantforge.execution.journal import Record, events_of, figures_of, scaled_of
from quantforge.execution.progress import progress_of
from quantforge.execution.rounding import MatrixRounding
from quantforge.execution.source_tensors import SourceTensors
from quantforge.execution.tuning import Tuning
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.units import (
    GUIDE,
    HEAD,
    OUTER,
    Unit,
    block_unit,
    shares_of,
    units_of,
)
from quantforge.formats.storage import storage_of
from quantforge.planning.planner import Planned
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.execution.lockstep import SeenTogether
    from quantforge.execution.shared_run import FinishedUnit
    from quantforge.model.block import BlockPart
    from quantforge.model.stream import ModelStream
    from quantforge_calibration.sampler import Sample


class Run:
    """One execution of a plan into the files of a writer, journalled in a workspace.

    Attributes:
        tuned: what is tuned of it.
    """

    def __init__(
        self,
        planned: Planned,
        checkpoint: Checkpoint,
        writer: WeightsWriter,
        work: Workspace,
        settings: Settings,
        importance: Mapping[str, Tensor],
        finished: Mapping[str, FinishedUnit] | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            planned: what is to be done.
            checkpoint: the source.
            writer: of the weight files in the stage.
            work: the journal.
            settings: how to run.
            importance: mean squares of columns that are known without calibration, by tensor.
            finished: units that other processes have done, by name: they are only copied.
        """
        self._finished = finished or {}
        self._inside = 0.0  # seconds of units that were done as parts of the present one
        plan, matched = planned.plan, planned.matched
        self._planned, self._checkpoint = planned, checkpoint
        self._work, self._settings = work, settings
        self._units = {unit.name: unit for unit in units_of(plan, matched.blocks)}
        self._shares = shares_of(self._units.values())
        self._output = UnitOutput(storage_of(plan.format), writer)
        source = SourceTensors(checkpoint, matched, settings.device)
        rounding = MatrixRounding(planned, source, self._output, settings, importance)
        self._rounding = rounding
        self._data_free = DataFree(plan, rounding)
        tensors = BlockTensors(plan, self._output)
        self.tuned = Tuning(
            planned, checkpoint, self._output, tensors, work, settings, self._tuned, self._share
        )
        self._block = CalibratedBlock(planned, rounding, self._data_free, tensors)

    def execute(self, sample: Sample | None) -> None:
        """Do every part that is not done yet.

        Raises:
            InputError: a weight or an activation is not finite.
            IntegrityError: the source changed meanwhile, or a finished part is not as it was written.
            RefusedError: more events than the policy allows, or the files cannot hold a value.
        """
        execute_together([self], sample)

    @property
    def late(self) -> bool:
        """Return whether a quantized head is still to be observed behind the last block."""
        return bool(self._units[HEAD].tensors) and HEAD not in self._work.done

    @property
    def last(self) -> int:
        """Return the last block that has to be run; -1 for none."""
        blocks = self._planned.matched.blocks
        if self.late:
            return blocks
        missing = (i for i in range(blocks) if not self.has(i) or self.tuned.follows(i))
        return max(missing, default=-1)

    def has(self, block: int) -> bool:
        """Return whether a block is done."""
        return block_unit(block) in self._work.done

    def begin(self, *, calibrated: bool, runs: int) -> None:
        """Check what is done, copy what others did, do what blocks need, as one of ``runs``; errors as `execute`."""
        self._shares = {name: share / runs for name, share in self._shares.items()}
        self.tuned.begin(alone=runs == 1)
        self._check_finished()
        for name in self._finished:
            self._do(self._units[name], dict)
        if calibrated:
            self._do(self._units[OUTER], partial(self._data_free.work, self._units[OUTER]))

    def _check_finished(self) -> None:
        """Check the finished parts of an interrupted run against the checksums of its journal.

        Raises:
            IntegrityError: a tensor is not as it was written.
        """
        sums: dict[str, int] = {}  # of a tensor that was tuned later, that of the later record
        for record in self._work.done.values():
            sums |= record["sums"]
        for name, expected in sums.items():
            self._output.check(name, expected, f"start afresh: rm -r {self._work.directory}")

    def finish(self, *, calibrated: bool) -> None:
        """Do every unit that is left and needs no calibration rows."""
        if calibrated:  # a head with tensors was done behind the last block
            self._do(self._units[HEAD], dict)
            return
        for unit in self._units.values():
            self._do(unit, partial(self._data_free.work, unit))

    @contextmanager
    def guided(self, sample: Sample) -> Iterator[None]:
        """Let blocks be rounded under guided Hessians, where the plan wants that: their weights are made first."""
        strips = self._planned.plan.guide
        if not strips:
            yield
            return
        directory, record = self._work.directory, self._work.done.get(GUIDE)
        with token_weights(self._planned, directory, sample.ids.shape, strips, record) as weights:
            given = (weights, self._checkpoint, self._planned, sample, self._settings, directory)
            self._do(self._units[GUIDE], partial(observe_gradients, *given))
            self._block.guided = GuidedRounding(strips, self._rounding, weights)
            yield

    def streaming(self, sample: Sample) -> ModelStream:
        """Return the blocks with the calibration rows that reach them."""
        return stream_of(
            self._checkpoint, self._planned, sample, self._settings, self._work.directory
        )

    @property
    def block(self) -> CalibratedBlock:
        """Return the worker on blocks."""
        return self._block

    def pass_block(self, part: BlockPart, seen: SeenTogether | None, *, ends: bool) -> None:
        """Do a block unless it is done; ``seen`` was observed of it already."""
        unit = self._units[block_unit(part.index)]
        self._do(unit, partial(self._block.work, part, self._do_inside, ends=ends, seen=seen))

    def pass_head(self, stream: ModelStream) -> None:
        """Observe and round a quantized head behind the last block."""
        head = self._units[HEAD]
        self._do(head, lambda: self._data_free.head(head, observe_head(self._planned, stream)))

    def _do(self, unit: Unit, work: Callable[[], Record]) -> None:
        """Do a unit that is not done yet, note it in the journal, and tell of it."""
        if unit.name in self._work.done:
            return
        start = time.monotonic()
        self._output.begin()
        finished = self._finished.get(unit.name)
        with phase("", self._shares.get(unit.name, 0.0), unit.name):
            record = finished.copy_to(self._output) if finished else work()
        self._work.commit(unit.name, {**record, "sums": self._output.finish()})
        if finished is None:
            self._tell(unit.name, record, start + self._inside)
        self._inside = 0.0
        self._settings.policy.check(self.events())

    def _do_inside(self, name: str, work: Callable[[], Record]) -> None:
        """Do a unit that is done as a part of another, unless it is done already, and note it in the journal."""
        if name not in self._work.done:
            start = time.monotonic()
            with self._output.apart():
                record = work()
                self._work.commit(name, {**record, "sums": self._output.finish()})
            self._tell(name, record, start)
            self._inside += time.monotonic() - start

    def _tuned(self, name: str, record: Record, start: float) -> None:
        """Tell of a unit that was tuned."""
        self._tell(name, record, start)
        self._settings.policy.check(self.events())

    def _share(self, name: str) -> float:
        return self._shares.get(name, 0.0)

    def _tell(self, name: str, record: Record, start: float) -> None:
        done, total = len(self._work.done), len(self._units)
        self._settings.progress(progress_of(name, record, done, total, start))

    def events(self) -> list[Event]:
        """Return every event so far, in the order of the parts."""
        return events_of(self._records())

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the figures of every rounded tensor, by name."""
        return figures_of(self._records())

    def scaled(self) -> tuple[int, int] | None:
        """Return for how many activations factors were found, see `scaled_of`."""
        return scaled_of(self._records())

    def _records(self) -> Iterator[Record]:
        for name in self._units:
            if name in self._work.done:
                yield self._work.done[name]
