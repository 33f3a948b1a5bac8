"""The run: a plan carried out one block of the model at a time, straight into the preallocated files of a stage.

Methods without data read, round and write, tensor after tensor. For methods that look at data, calibration rows pass
the blocks of the source, and while they are in front of a block it is observed, transformed, rounded and written. The
next block reads what the source's block computes, not what the quantized one does: so one pass observes and advances.
If the plan tunes, which ``--effort medium`` sets for gptq at few bits, scales, norms and codes of a block are then
learned on the same rows and overwrite what rounding wrote (`quantforge.execution.run_tuning`).
Several runs of one source may share the pass (`execute`), if each reads a block only before it changes that.

A unit of work is done when its bytes are on the disk and the journal says so, with their checksums; the same command
resumes after the last of them, and the hidden states are brought there by running the blocks of the source again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantforge.events import Event
from quantforge.execution.calibrated_block import (
    BlockRounder,
    BlockTensors,
    observe,
    observe_head,
    observes_twice,
)
from quantforge.execution.data_free import DataFreeRounder
from quantforge.execution.guide import GuidedRounding, observe_gradients, token_weights
from quantforge.execution.journal import Journal, Record, events_of, figures_of, scaled_of
from quantforge.execution.progress import phase, progress_of
from quantforge.execution.rounding import MatrixRounding
from quantforge.execution.run_tuning import Tuning
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.units import GUIDE, HEAD, OUTER, block_unit, shares_of, units_of
from quantforge.files.writer import WeightsWriter
from quantforge.formats.storage import get_storage
from quantforge.numerics.threads import reproducible

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.execution.calibration import Calibrated
    from quantforge.execution.shared_run import FinishedUnit
    from quantforge.files.reader import Checkpoint
    from quantforge.model.hidden_states import HiddenStates
    from quantforge.model.stream import ModelStream
    from quantforge.planning.planner import Planned
    from quantforge.quantizers.tuning.tuning_stream import TuningStream
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample


def execute(runs: Sequence[Run]) -> None:
    """Do every unit that is not done yet: what reads no data, block after block, the head, then what is tuned later.

    Each block is observed once, with the rows in front of it; then it is rounded and written for each run, and tuned if
    the plan says so, before the rows pass on.

    Args:
        runs: of one source; several may share a pass (`shares_pass`) and have equal calibration options.

    Raises:
        InputError: a weight or an activation is not finite.
        IntegrityError: the source changed meanwhile, or a finished unit is not as it was written.
        RefusedError: more events than the policy allows, or the files cannot hold a value.
    """
    with reproducible(), phase("rounding", 0.95), _without_gradients(runs):
        for run in runs:
            run.resume(together=len(runs))
            run.round_without_data()
        last = max(run.last_block for run in runs)
        with _streaming(runs, last) as (stream, tuned):
            for block in islice(stream or (), last + 1):
                if tuned is not None:
                    tuned.begin_result()
                start, name = time.monotonic(), block_unit(block.index)
                # What the last block returns is read by nobody, unless it is tuned.
                advance = block.index != last or tuned is not None
                # Runs that change the block come last: each has to find it as the source has it.
                todo = [run for run in runs if run.missing([name])]
                todo.sort(key=lambda run: run.rounder.changes)
                seen = observe(block, [run.rounder for run in todo], advance=advance)
                changed = False
                for run, observed in zip(todo, seen, strict=True):
                    if changed:
                        block.restore()
                    with run.unit(name, start) as record:
                        rounded = run.rounder.round_block(
                            block, observed, run.do_expert, advance=advance
                        )
                        record.update(rounded)
                    start, changed = time.monotonic(), run.rounder.changes
                if advance and not block.advanced:  # a block that was done before
                    block.advance()
                if tuned is not None:
                    runs[0].tuning.learn_block(tuned, block)
            for run in runs:
                if stream is not None and run.late:
                    run.round_head(stream)
        for run in runs:
            run.finish()


@contextmanager
def _without_gradients(runs: Sequence[Run]) -> Iterator[None]:
    """Compute no gradients unless asked to; where no run tunes, nothing may ask."""
    learns = any(run.inputs.planned.plan.tune for run in runs)
    with torch.inference_mode(mode=not learns), torch.no_grad():
        yield


@contextmanager
def _streaming(
    runs: Sequence[Run], last: int
) -> Iterator[tuple[ModelStream | None, TuningStream | None]]:
    """Open the guides of the runs, and yield the blocks of the source with the rows that reach them.

    Where a run of its own tunes each block while the rows are there, the same stream carries those of the result, too,
    and is yielded as the second. Where ``last`` is -1 no block has to be run, and nothing is opened.
    """
    first, sample = runs[0], runs[0].inputs.sample
    with ExitStack() as stack:
        if sample is None or last < 0:
            yield None, None
            return
        for run in runs:
            if run.inputs.planned.plan.guide:
                stack.enter_context(run.guided(sample))
        if first.tuning.follows_any:
            tuned = stack.enter_context(first.tuning.stream(sample))
            yield tuned, tuned
        else:
            stream = first.inputs.stream(sample, first.journal.directory)
            yield stack.enter_context(stream), None


def shares_pass(planned: Planned) -> bool:
    """Return whether a run may share a pass: it reads a block only before it changes that."""
    plan = planned.plan
    stacks = any(kind.stacks for kind in planned.model_layout.layers)
    return not (stacks or plan.guide or observes_twice(plan))


@dataclass(frozen=True, slots=True, eq=False)
class RunInputs:
    """One result that is to be made, with all that decides its bytes, which was read before the run begins.

    Attributes:
        planned: what is to be done: the plan, its recipe and the matched checkpoint.
        settings: how to run.
        checkpoint: the source as the recipe changes all of it; its weights are compared with their digests when read.
        source: of the checkpoint, for the manifest.
        calibrated: calibration text, None where none is needed.
        importance: mean squares of columns that are known without calibration, by tensor.
        fingerprint: by which a resumed run is compared.
    """

    planned: Planned
    settings: Settings
    checkpoint: Checkpoint
    source: Mapping[str, Any]
    calibrated: Calibrated | None
    importance: Mapping[str, Tensor]
    fingerprint: Mapping[str, str]

    @property
    def sample(self) -> Sample | None:
        """Return the calibration rows that pass through the blocks."""
        return self.calibrated.sample if self.calibrated and self.planned.plan.needs else None

    def stream(
        self, sample: Sample, directory: Path, states: HiddenStates | None = None
    ) -> ModelStream:
        """Return the blocks of the source with the rows that reach them.

        Args:
            sample: the rows.
            directory: for hidden states, if they wait on disk.
            states: a store for those between blocks, wherever others wait.
        """
        from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

        options, settings = self.planned.recipe.calibration, self.settings
        on_disk = directory if settings.activations == "disk" else None
        return ModelStream(
            self.checkpoint, self.planned.model_layout, sample, micro_batch=options.micro_batch,
            device=settings.device, activations=states or on_disk, precision=options.precision,
        )  # fmt: skip


class Run:
    """One execution of a plan into the files of a writer, journalled.

    Attributes:
        inputs: what is made, and of what.
        journal: what is done.
        units: what is to be done, by name.
        output: of the present unit.
        rounding: rounds and writes the matrices of one input.
        rounder: rounds and writes blocks through which rows pass.
        tensors: of the plan, by block.
        tuning: what is learned after rounding.
    """

    def __init__(
        self,
        inputs: RunInputs,
        writer: WeightsWriter,
        journal: Journal,
        finished: Mapping[str, FinishedUnit],
    ) -> None:
        """Prepare a run.

        Args:
            inputs: what is to be made.
            writer: of the weight files in the stage.
            journal: of the run, or of the interrupted one that it resumes.
            finished: units that other processes have done, by name: they are only copied.
        """
        plan, blocks = inputs.planned.plan, inputs.planned.model_layout.blocks
        self.inputs, self.journal = inputs, journal
        self.units = {unit.name: unit for unit in units_of(plan, blocks)}
        self._shares = shares_of(self.units.values())
        self._finished = finished
        # Seconds of the experts that were done as units inside of the present one.
        self._inside = 0.0
        self.output = UnitOutput(get_storage(plan.format), writer)
        self.tensors = BlockTensors(plan, self.output)
        self.rounding = MatrixRounding(inputs, self.output)
        self.rounder = BlockRounder(self.rounding, self.tensors)
        self.tuning = Tuning(self)

    @property
    def late(self) -> bool:
        """Return whether a quantized head is still to be observed after the last block."""
        return bool(self.units[HEAD].tensors) and HEAD not in self.journal.done

    @property
    def last_block(self) -> int:
        """Return the last block that has to be run; -1 for none."""
        if self.inputs.sample is None:
            return -1
        blocks, done = self.inputs.planned.model_layout.blocks, self.journal.done
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
        for name in self.missing(self._finished):
            with self.unit(name) as record:
                record.update(self._finished[name].copy_to(self.output))

    def round_without_data(self) -> None:
        """Do what reads no rows: what is outside of the blocks, or everything where no rows are needed."""
        for name in self.missing([*self.units] if self.inputs.sample is None else [OUTER]):
            with self.unit(name) as record:
                record.update(DataFreeRounder(self.rounding).work(self.units[name]))

    def round_head(self, stream: ModelStream) -> None:
        """Round and write a quantized head for what it reads, when the rows are behind the last block."""
        with self.unit(HEAD) as record:
            statistics = observe_head(self.inputs.planned, stream)
            record.update(self.rounding.round_head(self.units[HEAD].tensors, statistics))

    def finish(self) -> None:
        """Tune what was not tuned while the rows were there; a head without tensors is done, too."""
        if self.inputs.planned.plan.tune and self.inputs.sample is not None:
            self.tuning.learn_missing(self.inputs.sample)
        for name in self.missing([HEAD]):
            with self.unit(name):
                pass

    @contextmanager
    def guided(self, sample: Sample) -> Iterator[None]:
        """Let blocks be rounded under guided Hessians; the weights of their tokens are made first."""
        planned, directory = self.inputs.planned, self.journal.directory
        record, strips = self.journal.done.get(GUIDE), planned.plan.guide
        with token_weights(planned, directory, sample.ids.shape, strips, record) as weights:
            if record is None:
                with self.unit(GUIDE) as made:
                    made.update(observe_gradients(weights, self.inputs, sample, directory))
            self.rounder.guided = GuidedRounding(strips, self.rounding, weights)
            yield

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the units that are not done."""
        return [name for name in names if name not in self.journal.done]

    @contextmanager
    def unit(self, name: str, start: float | None = None) -> Iterator[Record]:
        """Do a unit: the body writes its tensors and fills its record; then it is noted in the journal and reported.

        Args:
            name: of the unit.
            start: when it was begun, in seconds of the monotonic clock; now if left out.
        """
        start = time.monotonic() if start is None else start
        record: Record = {}
        self.output.begin()
        with phase("", self.share(name), name):
            yield record
        self.journal.commit(name, {**record, "sums": self.output.finish()})
        if name not in self._finished:
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
        """Return every event of the units so far, in their order."""
        return events_of(self._records())

    def all_events(self) -> tuple[Event, ...]:
        """Return the events of planning, of the calibration rows and of the units."""
        calibrated = self.inputs.calibrated
        rows = calibrated.events if calibrated else ()
        return (*self.inputs.planned.plan.substitutions, *rows, *self.events())

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
