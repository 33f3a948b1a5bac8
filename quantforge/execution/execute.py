"""The run: a plan carried out one block of the model at a time, straight into the preallocated files of a stage.

Methods without data read, round and write, tensor after tensor. For methods that look at data, calibration rows pass
the blocks of the source, and while they are in front of a block it is observed, transformed, rounded and written. The
next block reads what the source's block computes, not what the quantized one does: so one pass observes and advances.
Several runs of one source may share the pass (`execute`), if each reads a block only before it changes that.

A unit of work is done when its bytes are on the disk and the journal says so, with their checksums; the same command
resumes after the last of them, and the hidden states are brought there by running the blocks of the source again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from quantforge.checkpoint.writer import WeightsWriter
from quantforge.events import Event
from quantforge.execution.calibrated_block import (
    BlockTensors,
    CalibratedBlock,
    observe,
    observe_head,
    observes_twice,
)
from quantforge.execution.data_free import DataFree
from quantforge.execution.guide import GuidedRounding, observe_gradients, token_weights
from quantforge.execution.journal import Record, Workspace, events_of, figures_of, scaled_of
from quantforge.execution.progress import phase, progress_of
from quantforge.execution.rounding import MatrixRounding
from quantforge.execution.tuning import Tuning
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.units import GUIDE, HEAD, OUTER, block_unit, shares_of, units_of
from quantforge.formats.storage import storage_of

if TYPE_CHECKING:
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.execution.shared_run import FinishedUnit
    from quantforge.model.stream import ModelStream
    from quantforge.planning.planner import Planned
    from quantforge_calibration.sampler import Sample


def execute(runs: Sequence[Run], sample: Sample | None) -> None:
    """Do every unit that is not done yet; of several runs, which share the pass of the rows, those of each.

    Args:
        runs: of one source; several may share a pass (`shares_pass`) and have equal calibration options.
        sample: the calibration rows, None for plans that need none.

    Raises:
        InputError: a weight or an activation is not finite.
        IntegrityError: the source changed meanwhile, or a finished unit is not as it was written.
        RefusedError: more events than the policy allows, or the files cannot hold a value.
    """
    learns = any(run.inputs.planned.plan.tune for run in runs)
    with torch.inference_mode(mode=not learns), torch.no_grad():
        for run in runs:
            run.resume(together=len(runs))
            for unit in run.units.values():
                if sample is None or unit.name == OUTER:
                    run.do(unit.name, partial(run.data_free.work, unit))
        if sample is None:
            return
        _pass_blocks(runs, sample)
        for run in runs:
            run.tuning.learn_missing(sample)
        for run in runs:
            run.do(HEAD, dict)  # one without tensors: others were done after the last block


def _pass_blocks(runs: Sequence[Run], sample: Sample) -> None:
    """Pass the calibration rows through the blocks, as far as a unit of any run needs them."""
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(run.guided(sample))
        last = max(run.last_block for run in runs)
        if last < 0:
            return
        # A run of its own tunes each block while the rows are there.
        tuned = runs[0].tuning.stream(sample) if runs[0].tuning.follows_any else None
        directory = runs[0].journal.directory
        stream = stack.enter_context(tuned or runs[0].inputs.stream(sample, directory))
        for part in stream:
            if tuned is not None:
                tuned.begin_result()
            start, unit = time.monotonic(), block_unit(part.index)
            advance = part.index != last or tuned is not None  # else nobody reads what it returns
            missing = [run for run in runs if unit not in run.journal.done]
            # Runs that change the block come last: each has to find it as the source has it.
            missing.sort(key=lambda run: run.block.changes)
            seen = observe(part, [run.block for run in missing], advance=advance) if missing else []
            changed = False
            for run, observed in zip(missing, seen, strict=True):
                if changed:
                    part.restore()
                work = partial(run.block.work, part, observed, run.do_expert, advance=advance)
                run.do(unit, work, start)
                start, changed = time.monotonic(), run.block.changes
            if advance and not part.advanced:
                part.advance()
            if tuned is not None:
                runs[0].tuning.learn_block(tuned, part)
            if part.index == last:
                break
        for run in runs:
            if run.late:
                run.do(HEAD, partial(_round_head, run, stream))


def _round_head(run: Run, stream: ModelStream) -> Record:
    """Observe, round and write a quantized head, when the rows are behind the last block; return its record."""
    return run.data_free.head(run.units[HEAD], observe_head(run.inputs.planned, stream))


def shares_pass(planned: Planned) -> bool:
    """Return whether a run may share a pass: it reads a block only before it changes that."""
    plan = planned.plan
    stacks = any(kind.stacks for kind in planned.matched.layers)
    return not (stacks or plan.guide or observes_twice(plan))


class Run:
    """One execution of a plan into the files of a writer, journalled.

    Attributes:
        inputs: what is made, and of what.
        journal: what is done.
        units: what is to be done, by name.
        output: of the present unit.
        data_free: the work on units that look at no data.
        block: the work on blocks through which rows pass.
        tensors: of the plan, by block.
        tuning: what is learned after that.
    """

    def __init__(
        self,
        inputs: RunInputs,
        writer: WeightsWriter,
        journal: Workspace,
        finished: Mapping[str, FinishedUnit],
    ) -> None:
        """Prepare a run.

        Args:
            inputs: what is to be made.
            writer: of the weight files in the stage.
            journal: of the run, or of the interrupted one that it resumes.
            finished: units that other processes have done, by name: they are only copied.
        """
        plan, blocks = inputs.planned.plan, inputs.planned.matched.blocks
        self.inputs, self.journal = inputs, journal
        self.units = {unit.name: unit for unit in units_of(plan, blocks)}
        self._shares = shares_of(self.units.values())
        self._finished = finished
        self._inside = 0.0  # seconds of the experts that were done as units inside of the present one
        self.output = UnitOutput(storage_of(plan.format), writer)
        self.tensors = BlockTensors(plan, self.output)
        self._rounding = MatrixRounding(inputs, self.output)
        self.data_free = DataFree(self._rounding)
        self.block = CalibratedBlock(self.data_free, self.tensors)
        self.tuning = Tuning(self)

    @property
    def late(self) -> bool:
        """Return whether a quantized head is still to be observed after the last block."""
        return bool(self.units[HEAD].tensors) and HEAD not in self.journal.done

    @property
    def last_block(self) -> int:
        """Return the last block that has to be run; -1 for none."""
        blocks, done = self.inputs.planned.matched.blocks, self.journal.done
        if self.late:
            return blocks
        missing = (i for i in range(blocks) if block_unit(i) not in done or self.tuning.follows(i))
        return max(missing, default=-1)

    def resume(self, *, together: int) -> None:
        """Check what is done, and copy what other processes did; ``together``: as one of so many runs.

        Raises:
            IntegrityError: a tensor is not as it was written.
        """
        self._shares = {name: share / together for name, share in self._shares.items()}
        self.tuning.begin(alone=together == 1)
        sums: dict[str, int] = {}  # of a tensor that was tuned later, that of the later record
        for record in self.journal.done.values():
            sums |= record["sums"]
        for name, expected in sums.items():
            self.output.check(name, expected, f"start afresh: rm -r {self.journal.directory}")
        for name in self._finished:
            self.do(name, dict)

    @contextmanager
    def guided(self, sample: Sample) -> Iterator[None]:
        """Let blocks be rounded under guided Hessians, where the plan wants that: their weights are made first."""
        planned, directory = self.inputs.planned, self.journal.directory
        if not planned.plan.guide:
            yield
            return
        record, strips = self.journal.done.get(GUIDE), planned.plan.guide
        with token_weights(planned, directory, sample.ids.shape, strips, record) as weights:
            self.do(GUIDE, partial(observe_gradients, weights, self.inputs, sample, directory))
            self.block.guided = GuidedRounding(strips, self._rounding, weights)
            yield

    def do(self, name: str, work: Callable[[], Record], start: float | None = None) -> None:
        """Do a unit that is not done yet, note it in the journal, and report it.

        Args:
            name: of the unit.
            work: writes its tensors, and returns its record.
            start: when it was begun, in seconds of the monotonic clock; now if left out.
        """
        if name in self.journal.done:
            return
        start = time.monotonic() if start is None else start
        self.output.begin()
        finished = self._finished.get(name)
        with phase("", self.share(name), name):
            record = finished.copy_to(self.output) if finished else work()
        self.journal.commit(name, {**record, "sums": self.output.finish()})
        if finished is None:
            self.report(name, record, start + self._inside)
        self._inside = 0.0
        self.inputs.settings.policy.check(self.events())

    def do_expert(self, name: str, work: Callable[[], Record]) -> bool:
        """Do an expert's unit inside of its block's, unless it is done already; return whether it was done now."""
        if name in self.journal.done:
            return False
        start = time.monotonic()
        with self.output.apart():
            record = work()
            self.journal.commit(name, {**record, "sums": self.output.finish()})
        self.report(name, record, start)
        self._inside += time.monotonic() - start
        return True

    def share(self, name: str) -> float:
        """Return which share of the work a unit is."""
        return self._shares.get(name, 0.0)

    def report(self, name: str, record: Record, start: float) -> None:
        """Tell the caller that a unit is done which was begun at ``start``."""
        done, total = len(self.journal.done), len(self.units)
        self.inputs.settings.progress(progress_of(name, record, done, total, start))

    def events(self) -> list[Event]:
        """Return every event so far, in the order of the units."""
        return events_of(self._records())

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the figures of every rounded tensor, by name."""
        return figures_of(self._records())

    def scaled(self) -> tuple[int, int] | None:
        """Return for how many activations factors were found, see `scaled_of`."""
        return scaled_of(self._records())

    def _records(self) -> Iterator[Record]:
        for name in self.units:
            if name in self.journal.done:
                yield self.journal.done[name]
