"""Carry out a plan block by block, writing directly to the preallocated files of a stage.

Data-free methods read, round and write tensor after tensor. For calibrated methods, calibration rows pass through the
blocks of the source; each block is observed, transformed, rounded and written while its inputs are available. The next
block reads the outputs of the *source's* block, not of the quantized one, so a single pass both observes and advances.
If the plan includes tuning (``--effort medium`` enables it for gptq at few bits), scales, norms and codes of a block
are then tuned on the same rows and overwrite the rounded ones (`quantforge.execution.run_tuning`).
Several runs of one source may share the pass (`execute`) if each reads a block only before it changes it.

A unit of work is done when its bytes are on disk and the journal contains its line with their checksums. The same
command resumes after the last finished unit; hidden states are recomputed by running the blocks of the source again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch

from quantforge.execution.block_tensors import BlockTensors
from quantforge.execution.calibrated_block import BlockRounder, observe
from quantforge.execution.data_free import DataFreeRounder
from quantforge.execution.guide import GuidedRounding, compute_token_weights, open_token_weights
from quantforge.execution.journal import (
    Journal,
)
from quantforge.execution.observation import observe_head, observes_after_transforms
from quantforge.execution.rounding import MatrixRounder
from quantforge.execution.run_tuning import TuningStep
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.unit_recorder import UnitRecorder
from quantforge.execution.units import (
    GUIDE,
    HEAD,
    OUTSIDE_BLOCKS,
    block_unit,
)
from quantforge.files.writer import WeightsWriter
from quantforge.formats.storage import get_storage
from quantforge.numerics.threads import reproducible
from quantforge.progress import phase

if TYPE_CHECKING:
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.execution.shared_run import FinishedUnit
    from quantforge.model.stream import ModelStream
    from quantforge.planning.planner import Planned
    from quantforge.quantizers.tuning.tuning_stream import TuningStream
    from quantforge_calibration.sampler import Sample


def execute(runs: Sequence[Run]) -> None:
    """Process all unfinished units: data-free ones, block after block, the head, then remaining tuning.

    Each block is observed once, with the rows that reach it; then it is rounded and written for each run, and tuned if
    the plan says so, before the rows pass on.

    Args:
        runs: runs of one source; several may share a pass (`can_share_pass`) if their calibration options are equal.

    Raises:
        InputError: a weight or an activation is not finite.
        IntegrityError: the source changed in the meantime, or a finished unit differs from its recorded checksums.
        RefusedError: more events than the policy allows, or the files cannot hold a value.
    """
    with reproducible(), phase("rounding", 0.95), _without_gradients(runs):
        for run in runs:
            run.resume(run_count=len(runs))
            run.round_data_free_units()
        last = max(run.last_block for run in runs)
        with _open_stream(runs, last) as (stream, tuning_stream):
            for block in islice(stream or (), last + 1):
                if tuning_stream is not None:
                    tuning_stream.begin_result()
                start, name = time.monotonic(), block_unit(block.index)
                # The outputs of the last block are not needed, unless it is tuned.
                advance = block.index != last or tuning_stream is not None
                # Runs that transform the block come last: each needs the block of the source.
                unfinished_runs = [run for run in runs if run.recorder.unfinished([name])]
                unfinished_runs.sort(key=lambda run: run.rounder.has_transforms)
                observations = observe(
                    block, [run.rounder for run in unfinished_runs], advance=advance
                )
                is_changed = False
                for run, observation in zip(unfinished_runs, observations, strict=True):
                    if is_changed:
                        block.reload_source_weights()
                    with run.recorder.record_unit(name, start) as record:
                        block_record = run.rounder.round_block(
                            block, observation, run.recorder.process_expert, advance=advance
                        )
                        record.update(block_record)
                    start, is_changed = time.monotonic(), run.rounder.has_transforms
                if advance and not block.advanced:  # a block that was already done
                    block.advance()
                if tuning_stream is not None:
                    runs[0].tuning.tune_block_and_pass(tuning_stream, block)
            for run in runs:
                if stream is not None and run.head_pending:
                    run.round_head(stream)
        for run in runs:
            run.finish()


@contextmanager
def _without_gradients(runs: Sequence[Run]) -> Iterator[None]:
    """Disable gradients; use inference mode if no run needs gradients for tuning."""
    any_tuning = any(run.inputs.planned.plan.tune for run in runs)
    with torch.inference_mode(mode=not any_tuning), torch.no_grad():
        yield


@contextmanager
def _open_stream(
    runs: Sequence[Run], last: int
) -> Iterator[tuple[ModelStream | None, TuningStream | None]]:
    """Open token weights and streams for the runs; yield the block stream and the tuning stream, each possibly None.

    If a single run tunes each block right after rounding it, one stream also carries the hidden states of the quantized
    model and is yielded twice. If ``last`` is -1 no block has to run, and nothing is opened.

    Args:
        runs: runs that share the pass.
        last: index of the last block that has to run.
    """
    first, sample = runs[0], runs[0].inputs.sample
    with ExitStack() as stack:
        if sample is None or last < 0:
            yield None, None
            return
        for run in runs:
            if run.inputs.planned.plan.guided_hessians:
                stack.enter_context(run.guided_rounding(sample))
        if first.tuning.tunes_any_while_rounding:
            tuning_stream = stack.enter_context(first.tuning.stream(sample))
            yield tuning_stream, tuning_stream
        else:
            stream = first.inputs.stream(sample, first.journal.directory)
            yield stack.enter_context(stream), None


def can_share_pass(planned: Planned) -> bool:
    """Return whether a run can share a pass with others: it reads a block only before it changes it."""
    plan = planned.plan
    stacks = any(kind.stacks for kind in planned.model_layout.layers)
    return not (stacks or plan.guided_hessians or observes_after_transforms(plan))


class Run:
    """Execution of one plan, writing weight files and a journal.

    Attributes:
        inputs: inputs of the run.
        journal: records of finished units.
        output: writer of the current unit.
        recorder: journals and reports the units.
        rounding: rounds and writes the matrices of one shared input.
        rounder: rounds and writes calibrated blocks.
        tuning: tuning after rounding.
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
            inputs: inputs of the run.
            writer: writer of the weight files in the stage.
            journal: journal of the run, or of the interrupted run that it resumes.
            finished: units that other processes finished, by name: they are only copied.
        """
        plan = inputs.planned.plan
        self.inputs, self.journal, self._finished = inputs, journal, finished
        self.output = UnitOutput(get_storage(plan.format), writer)
        self.recorder = UnitRecorder(inputs, journal, self.output, finished)
        tensors = BlockTensors(plan, self.output)
        self.rounding = MatrixRounder(inputs, self.output)
        self.rounder = BlockRounder(self.rounding, tensors)
        self.tuning = TuningStep(inputs, self.recorder, tensors)

    @property
    def head_pending(self) -> bool:
        """Return whether a quantized head has yet to be rounded after the last block."""
        return bool(self.recorder.units[HEAD].tensors) and HEAD not in self.journal.done

    @property
    def last_block(self) -> int:
        """Return the index of the last block that has to run; -1 for none."""
        if self.inputs.sample is None:
            return -1
        blocks, finished_units = self.inputs.planned.model_layout.blocks, self.journal.done
        if self.head_pending:
            return blocks
        unfinished_blocks = (
            i
            for i in range(blocks)
            if block_unit(i) not in finished_units or self.tuning.tunes_while_rounding(i)
        )
        return max(unfinished_blocks, default=-1)

    def resume(self, *, run_count: int) -> None:
        """Verify finished units, and copy units that other processes finished.

        Args:
            run_count: number of runs that share the pass.

        Raises:
            IntegrityError: the checksum of a tensor does not match.
        """
        self.recorder.share_progress(run_count)
        self.tuning.rewrite_learned(own_pass=run_count == 1)
        sums: dict[str, int] = {}  # later records win: tuning rewrites tensors
        for record in self.journal.done.values():
            sums |= record["checksums"]
        for name, expected in sums.items():
            self.output.check(name, expected, f"start afresh: rm -r {self.journal.directory}")
        for name in self.recorder.unfinished(self._finished):
            with self.recorder.record_unit(name) as record:
                record.update(self._finished[name].copy_to(self.output))

    def round_data_free_units(self) -> None:
        """Process units that need no calibration rows: tensors outside of the blocks, or all in a data-free run."""
        for name in self.recorder.unfinished(
            [*self.recorder.units] if self.inputs.sample is None else [OUTSIDE_BLOCKS]
        ):
            with self.recorder.record_unit(name) as record:
                record.update(DataFreeRounder(self.rounding).round_unit(self.recorder.units[name]))

    def round_head(self, stream: ModelStream) -> None:
        """Round and write a quantized head for the final hidden states, after all blocks have run."""
        with self.recorder.record_unit(HEAD) as record:
            statistics = observe_head(self.inputs.planned, stream)
            record.update(self.rounding.round_head(self.recorder.units[HEAD].tensors, statistics))

    def finish(self) -> None:
        """Tune units not yet tuned during the pass, and mark a head without tensors as done."""
        if self.inputs.planned.plan.tune and self.inputs.sample is not None:
            self.tuning.tune_unfinished(self.inputs.sample)
        for name in self.recorder.unfinished([HEAD]):
            with self.recorder.record_unit(name):
                pass

    @contextmanager
    def guided_rounding(self, sample: Sample) -> Iterator[None]:
        """Round blocks under guided Hessians inside this context; compute token weights first if missing."""
        planned, directory = self.inputs.planned, self.journal.directory
        record, strips = self.journal.done.get(GUIDE), planned.plan.guided_hessians
        with open_token_weights(planned, directory, sample.ids.shape, strips, record) as weights:
            if record is None:
                with self.recorder.record_unit(GUIDE) as guide_record:
                    guide_record.update(
                        compute_token_weights(weights, self.inputs, sample, directory)
                    )
            self.rounder.guided_rounding = GuidedRounding(strips, self.rounding, weights)
            yield
