"""Shared runs: several processes each work on different units, and one of them assembles the result.

Units are claimed by renaming directories (`quantforge.execution.claims`), and each is written to files of its claim.
When all are done, the process that gets the lock of the output runs the plan as usual, but copies finished units
instead of computing them.

Processes started with the same command share a run without calibration (``--join``), because its units are
independent. Ranks of torchrun can also share a calibrated run. A calibrated block reads what the preceding blocks of
the *source* compute, never what another rank has rounded. Ranks therefore follow one another through the blocks and
pass on the hidden states of each micro-batch: while one rank observes a block, another observes the next, and
observed blocks are rounded in the meantime.

Hidden states are passed on in one file per micro-batch and block. A rank reads the output of the preceding block for a
micro-batch, possibly while the next micro-batch is still being computed, and writes the output of its own block. The
contents of a file depend only on the source and the rows: it does not matter which rank writes it, or how often. Files
are written by a background thread, one after the other, while the rank continues: other ranks rely on them only after
the block is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from quantforge.errors import BusyError, InputError, IntegrityError, ResourceError
from quantforge.execution import claims as claiming
from quantforge.execution.block_tensors import BlockTensors
from quantforge.execution.calibrated_block import BlockRounder, observe
from quantforge.execution.data_free import DataFreeRounder
from quantforge.execution.journal import (
    Record,
    events_of,
    read_records,
    recorded_fingerprint,
    written,
)
from quantforge.execution.observation import observe_head
from quantforge.execution.rounding import MatrixRounder
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.units import HEAD, OUTSIDE_BLOCKS, Unit, block_unit, claimable_units
from quantforge.files.disk import make_directory, save_file, write_errors
from quantforge.files.lock import ChangeTracker, StaleLockMonitor
from quantforge.files.opener import FILES
from quantforge.files.safetensors import TensorEntry
from quantforge.files.writer import WeightsWriter
from quantforge.formats.storage import get_storage
from quantforge.plans import FilePlan, StoredTensor
from quantforge.progress import progress_of, report_step
from quantforge_files.roles import HIDDEN_STATES

if TYPE_CHECKING:
    from quantforge.execution.claims import Claim, Claims
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.files.stage import Stage
    from quantforge.model.block import DecoderBlock
    from quantforge.model.stream import ModelStream
    from quantforge_calibration.sampler import Sample

Result = TypeVar("Result")
POLL_SECONDS = 0.2  # between attempts to get a lock
STATE_POLL_SECONDS = 0.02  # between checks for states that other ranks compute
# For the process that assembles the result: digests of large files take minutes.
LOCK_TIMEOUT_SECONDS = 900.0
CHECKSUM_BYTES = 8  # at the end of a file of hidden states
NESTED_RECORDS = "inside"  # key in the record of a block: the records of its experts
ALREADY_DONE = "kept"  # key in the record of a unit that is already in the journal of the output


class Worker:
    """A process that works on units of a shared run.

    Args:
        claims: claims of the units.
        units: units of the run.
        inputs: inputs of the run.
        already_done: names of units that the journal already contains: rows pass through them, and nothing is written.
    """

    def __init__(
        self,
        claims: Claims,
        units: Sequence[Unit],
        inputs: RunInputs,
        already_done: Collection[str] = (),
    ) -> None:
        self._claims, self._units = claims, {unit.name: unit for unit in units}
        self._inputs, self._already_done = inputs, already_done
        self._records: list[Record] = []

    def run_until_done(self) -> None:
        """Process unclaimed units until all are done or the run is over.

        Raises:
            InputError: a weight or an activation is not finite.
            IntegrityError: the source changed meanwhile.
            RefusedError: more events of this worker's units than the policy allows.
        """
        sample, reads_rows = self._inputs.sample, bool(self._inputs.planned.plan.needs)
        rows = [
            name
            for name, unit in self._units.items()
            if reads_rows and name != OUTSIDE_BLOCKS and unit.tensors
        ]
        without_rows = [name for name in self._units if name not in rows]
        while self._claims.exists and len(self._claims.finished_directories()) < len(self._units):
            claim = self._claims.claim(without_rows)
            with torch.no_grad(), torch.inference_mode():
                if claim is not None:
                    unit = self._units[self._claims.names[claim.unit]]
                    self._process_unit(claim, partial(self._round_without_data, unit))
                elif sample is not None and self._claims.has_claimable(rows):
                    try:
                        self._process_blocks(sample)
                    except ResourceError:
                        if (
                            self._claims.exists
                        ):  # else it is over, and the place of the rows is gone
                            raise
                else:
                    time.sleep(claiming.HEARTBEAT_SECONDS)

    def _process_blocks(self, sample: Sample) -> None:
        """Process claimable blocks one after another, starting from the hidden states written by other ranks."""
        if self._claims.run is None:
            return
        shared_states = SharedStates(self._claims.run / "states")
        blocks = [block_unit(index) for index in range(self._inputs.planned.model_layout.blocks)]
        names = [name for name in [*blocks, HEAD] if self._units[name].tensors]
        directory = self._claims.directory
        with (
            closing(shared_states),
            self._inputs.stream(sample, directory, shared_states) as stream,
        ):
            stream.embed()
            while (claim := self._claims.claim(names)) is not None:
                name = self._claims.names[claim.unit]
                shared_states.block = blocks.index(name) if name in blocks else len(blocks)
                earlier_units = blocks[: shared_states.block]
                shared_states.on_missing = partial(self._wait_for_states, claim, earlier_units)
                shared_states.is_complete = partial(self._all_finished, earlier_units[-1:])
                with suppress(WaitAbortedError):
                    if name == HEAD:
                        self._process_unit(claim, partial(self._round_head, stream))
                    else:
                        block = stream.block(shared_states.block)

                        def passes(block: DecoderBlock = block) -> None:
                            block.advance()
                            shared_states.flush()

                        try:
                            self._process_unit(
                                claim, partial(self._round_block, block, shared_states), passes
                            )
                        finally:
                            block.release()
                    if not claim.lost:
                        shared_states.delete(shared_states.block)
                shared_states.block = -1

    def _all_finished(self, names: Collection[str]) -> bool:
        return self._claims.finished_directories().keys() >= {*names}

    def _wait_for_states(self, claim: Claim, earlier_units: Sequence[str]) -> None:
        """Sleep briefly while another rank computes the hidden states.

        Raises:
            WaitAbortedError: an earlier block has to be claimed first, or this claim was lost.
        """
        if not claim.directory.is_dir() or self._claims.has_claimable(earlier_units):
            raise WaitAbortedError
        time.sleep(STATE_POLL_SECONDS)

    def _process_unit(
        self,
        claim: Claim,
        work: Callable[[MatrixRounder], Record],
        passes: Callable[[], object] = tuple,
    ) -> None:
        """Process a unit and write its file; for a unit that is already in the journal, only pass the rows through it.

        Args:
            claim: claim of the unit.
            work: rounds the unit and returns its record.
            passes: runs the rows through the block.
        """
        start, total = time.monotonic(), len(self._units)
        unit = self._units[self._claims.names[claim.unit]]
        record: Record = {"unit": unit.name, ALREADY_DONE: True}
        with claim:
            report_step(unit.name, len(self._claims.finished_directories()), total)
            if unit.name in self._already_done:
                passes()
            else:
                record = self._write_unit(claim, unit, work)
            claim.finish(record)
        if not claim.lost:
            self._records += [record, *record.get(NESTED_RECORDS, {}).values()]
            progress = progress_of(
                unit.name, record, len(self._claims.finished_directories()), total, start
            )
            self._inputs.settings.progress(progress)
            self._inputs.settings.policy.check(events_of(self._records))

    def _write_unit(
        self, claim: Claim, unit: Unit, work: Callable[[MatrixRounder], Record]
    ) -> Record:
        """Write the tensors of a unit; return its record including checksums."""
        layout, size = file_layout(unit)
        files = [FilePlan(claim.file("data"), size, (), layout)] if size else []
        with WeightsWriter(claim.directory, files) as writer:
            output = UnitOutput(get_storage(self._inputs.planned.plan.format), writer)
            record = work(MatrixRounder(self._inputs, output))
            return {**record, "unit": unit.name, "checksums": output.finish()}

    def _round_without_data(self, unit: Unit, rounding: MatrixRounder) -> Record:
        return DataFreeRounder(rounding).round_unit(unit)

    def _round_block(
        self, block: DecoderBlock, shared_states: SharedStates, rounding: MatrixRounder
    ) -> Record:
        planned, output = self._inputs.planned, rounding.output
        last = block.index == planned.model_layout.blocks - 1
        advance = not last or bool(self._units[HEAD].tensors)
        nested_units: dict[str, Record] = {}

        def process_expert(name: str, work: Callable[[], Record]) -> bool:
            with output.nested_unit():
                nested_units[name] = {**work(), "unit": name, "checksums": output.sums}
            return True

        rounder = BlockRounder(rounding, BlockTensors(planned.plan, output))
        (observation,) = observe(block, [rounder], advance=advance)
        advance_early = advance and block.experts is not None
        if advance_early:  # other ranks wait: run the unquantized experts once more
            block.advance_with_collected_tokens()
        record = rounder.round_block(
            block, observation, process_expert, advance=advance and not advance_early
        )
        if not block.advanced and advance:
            block.advance()
        shared_states.flush()
        return {**record, NESTED_RECORDS: nested_units} if nested_units else record

    def _round_head(self, stream: ModelStream, rounding: MatrixRounder) -> Record:
        statistics = observe_head(self._inputs.planned, stream)
        return rounding.round_head(self._units[HEAD].tensors, statistics)


@dataclass(frozen=True, slots=True)
class FinishedUnit:
    """A unit finished by some worker: its record and the tensors in its file."""

    record: Record
    file: Path
    entries: tuple[TensorEntry, ...]

    def copy_to(self, output: UnitOutput) -> Record:
        """Copy the tensors to the output; return the record.

        Raises:
            IntegrityError: the checksums differ from those that the worker recorded.
        """
        for entry in self.entries:
            output.copy(entry.name, entry)
        if output.sums != self.record["checksums"]:
            raise IntegrityError.at(
                self.file,
                f"{self.record['unit']} is not what a worker had written",
                f"start afresh: rm -r {self.file.parents[2]}",
            )
        return {
            key: value for key, value in self.record.items() if key not in {"unit", "checksums"}
        }


def finished_units(claims: Claims, units: Sequence[Unit]) -> dict[str, FinishedUnit]:
    """Return the finished units of a shared run by name; errors as `Claims.finished_records`."""
    finished: dict[str, FinishedUnit] = {}
    records = claims.finished_records()
    outputs_by_unit = {unit.name: unit.outputs for unit in units}
    for unit in claimable_units(units):
        if unit.name not in records or ALREADY_DONE in records[unit.name][0]:
            continue
        record, file = records[unit.name]
        entries = {
            output.name: TensorEntry(
                output.name, output.dtype, output.shape, file, start, start + output.nbytes
            )
            for output, start in file_layout(unit)[0]
        }
        nested_units: dict[str, Record] = record.pop(NESTED_RECORDS, {})
        for name, unit_record in {unit.name: record, **nested_units}.items():
            own_entries = tuple(entries[output.name] for output in outputs_by_unit[name])
            finished[name] = FinishedUnit(unit_record, file, own_entries)
    return finished


def units_finished_before_sharing(
    stage: Stage, units: Iterable[Unit], fingerprint: Mapping[str, str]
) -> set[str]:
    """Return the names of units that a single process finished before the run became a shared one.

    Args:
        stage: stage of the output.
        units: units that processes claim.
        fingerprint: fingerprint of the run.

    Raises:
        IntegrityError: the journal is damaged.
    """
    if recorded_fingerprint(stage.journal) != fingerprint:
        return set()
    finished_names = {*read_records(stage.journal)[0]}
    return {unit.name for unit in units if finished_names >= {unit.name, *unit.nested_units}}


def file_layout(unit: Unit) -> tuple[tuple[tuple[StoredTensor, int], ...], int]:
    """Return the stored tensors of a unit with their byte offsets in its file, and the size of the file."""
    file_layout, offset = [], 0
    for output in unit.outputs:
        file_layout.append((output, offset))
        offset += output.nbytes
    return tuple(file_layout), offset


def run_locked(
    stage: Stage, work: Callable[[], Result], note: Callable[[str], None],
    skip_if: Callable[[], bool] = lambda: False, wait_forever: bool = False,
) -> Result | None:  # fmt: skip
    """Call ``work`` while holding the lock of an output, waiting until no other process holds it.

    Args:
        stage: stage of the output.
        work: called once the lock is held.
        note: called with a message if the process holding the lock does not respond.
        skip_if: if this returns True while waiting, return None without calling ``work``.
        wait_forever: wait however long the other process takes: tuning a large block may take hours.

    Raises:
        BusyError: another process has the lock, and its journal has not grown for `LOCK_TIMEOUT_SECONDS`.
        QuantForgeError: as entering the stage, or ``work``.
    """
    watch, monitor = ChangeTracker(), StaleLockMonitor(note)
    while not skip_if():
        try:
            with stage:
                return work()
        except BusyError as error:
            monitor.check(error)
            unchanged_seconds = watch.seconds_unchanged("journal", written(stage.journal))
            if unchanged_seconds > LOCK_TIMEOUT_SECONDS and not wait_forever:
                raise
        time.sleep(POLL_SECONDS)
    return None


class WaitAbortedError(Exception):
    """Raised to stop waiting for hidden states that will not arrive unless this rank processes another unit first."""


class SharedStates:
    """Hidden states of the current block in files: its inputs are read, its outputs are written for the next block.

    Args:
        directory: directory of the files; created if missing.

    Attributes:
        block: index of the block whose inputs are read; -1 while rows are embedded.
        on_missing: called repeatedly while a file is missing.
        is_complete: returns whether all inputs of the block have been written.
    """

    def __init__(self, directory: Path) -> None:
        self.block = -1
        self.on_missing: Callable[[], None] = lambda: None
        self.is_complete: Callable[[], bool] = lambda: False
        self._directory = directory
        self._shape: tuple[int, ...] = ()
        self._writer = ThreadPoolExecutor(1)
        self._pending_write: Future[None] | None = None
        with write_errors(directory, 0):
            make_directory(directory)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the input rows ``start:stop`` of the block, one micro-batch, waiting until they are available.

        Raises:
            IntegrityError: the checksum of the file does not match.
            WaitAbortedError: see `on_missing`.
        """
        path = self._file(self.block, start)
        states = torch.empty(stop - start, *self._shape)
        size = states.nbytes + CHECKSUM_BYTES
        data, is_final = bytearray(), False
        while not (data or is_final):
            is_final = self.is_complete()
            with suppress(InputError):  # deleted as soon as another rank finishes the block
                data = bytearray(FILES.read_start(path, HIDDEN_STATES, size + 1, self._directory))
            if not data:
                self.on_missing()
        if len(data) == size:
            flat_states = torch.frombuffer(data, dtype=torch.float32, count=states.numel())
            if _checksum(flat_states) == data[-CHECKSUM_BYTES:]:
                return flat_states.view_as(states)
        raise IntegrityError.at(
            path,
            "is not what a worker had written",
            f"start afresh: rm -r {self._directory.parents[1]}",
        )

    def write(self, start: int, states: Tensor) -> None:
        """Write the output rows of one micro-batch in the background, unless their file exists; see `flush`.

        Raises:
            ResourceError: as `flush`, for the preceding write.
        """
        self.flush()  # one micro-batch at a time waits in memory
        self._shape = tuple(states.shape[1:])
        path = self._file(self.block + 1, start)
        if not path.exists():
            flat_states = states.detach().to("cpu", torch.float32).contiguous()
            data = flat_states.numpy().tobytes() + _checksum(flat_states)
            self._pending_write = self._writer.submit(save_file, path, data, overwrite=True)

    def flush(self) -> None:
        """Wait until all pending writes are finished.

        Raises:
            ResourceError: the disk is full, or the run has ended and its directory was removed.
        """
        if self._pending_write is not None:
            self._pending_write.result()

    def delete(self, block: int) -> None:
        """Delete the input states of a finished block."""
        for path in self._directory.glob(f"{block}.*"):
            with suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Stop the background thread; keep the files for other ranks."""
        self._writer.shutdown()

    def _file(self, block: int, start: int) -> Path:
        return self._directory / f"{block}.{start}"


def _checksum(states: Tensor) -> bytes:
    """Return a checksum of float32 states, the sum of their words; detects accidents, ten times as fast as a CRC."""
    flat_states = states.reshape(-1).view(torch.int32 if states.numel() % 2 else torch.int64)
    total = int(flat_states.sum(dtype=torch.int64))
    return (total % (1 << 8 * CHECKSUM_BYTES)).to_bytes(CHECKSUM_BYTES, "big")
