"""A run that several processes share: each does units that no other does, and one of them puts the result together.

Units are claimed by renames (`quantforge.execution.claims`), and each is written into files of its claim. When all are
done, whoever gets the lock of the output runs the plan as ever, but copies what was finished instead of computing it.

Processes that give the same command share a run without calibration, whose units need no other (``--join``). Ranks of
torchrun share a calibrated one, too. A calibrated block reads what the source's blocks before it compute, never what
another rank has rounded. So ranks follow one another through the blocks, and hand on the hidden states of each
micro-batch: while one observes a block, the next is already observed by another, and what is observed is rounded
meanwhile.

Hidden states are handed on in a file for every micro-batch in front of every block. A rank reads what the block before
its own makes of a micro-batch, possibly while the next is still being made, and writes what its own block makes of it.
What is in a file depends on the source and the rows alone: it does not matter who writes it, or how often. Files are
written on a thread of their own, one after the other, while the rank goes on: until a block is handed in nobody relies
on them.
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
from quantforge.execution.calibrated_block import (
    BlockRounder,
    BlockTensors,
    observe,
    observe_head,
)
from quantforge.execution.data_free import DataFreeRounder
from quantforge.execution.journal import (
    Record,
    events_of,
    recorded_fingerprint,
    records_of,
    written,
)
from quantforge.execution.progress import progress_of, tell
from quantforge.execution.rounding import MatrixRounding
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.units import HEAD, OUTER, Unit, block_unit, claimed_units
from quantforge.files.disk import make_folder, save, writing
from quantforge.files.lock import StaleLockMonitor, Watch
from quantforge.files.opener import FILES
from quantforge.files.safetensors import TensorEntry
from quantforge.files.writer import WeightsWriter
from quantforge.formats.storage import get_storage
from quantforge.plans import FilePlan, StoredTensor
from quantforge_files.roles import STATES

if TYPE_CHECKING:
    from quantforge.execution.claims import Claim, Claims
    from quantforge.execution.execute import RunInputs
    from quantforge.files.stage import Stage
    from quantforge.model.block import DecoderBlock
    from quantforge.model.stream import ModelStream
    from quantforge_calibration.sampler import Sample

Result = TypeVar("Result")
POLL_SECONDS = 0.2  # between two tries to get a lock
WAIT_SECONDS = 0.02  # for states that others compute
# With a process that puts the result together: digests of large files take minutes.
PATIENCE_SECONDS = 900.0
SUM_BYTES = 8  # at the end of a file of hidden states
INSIDE = "inside"  # in the record of a unit: those of the units that went with it
KEPT = "kept"  # in the record of a unit that one process alone had finished: it is in the journal of the output


class Worker:
    """A process that works on units of a shared run.

    Args:
        claims: which units are whose.
        units: of the run.
        inputs: what is to be made.
        kept: names of the units that the journal has: rows pass them, and nothing else is done.
    """

    def __init__(
        self,
        claims: Claims,
        units: Sequence[Unit],
        inputs: RunInputs,
        kept: Collection[str] = (),
    ) -> None:
        self._claims, self._units = claims, {unit.name: unit for unit in units}
        self._inputs, self._kept = inputs, kept
        self._records: list[Record] = []

    def work_off(self) -> None:
        """Process unclaimed units until all are done or the run is over.

        Raises:
            InputError: a weight or an activation is not finite.
            IntegrityError: the source changed meanwhile.
            RefusedError: more events of this worker's units than the policy allows.
        """
        sample, looks = self._inputs.sample, bool(self._inputs.planned.plan.needs)
        rows = [
            name for name, unit in self._units.items() if looks and name != OUTER and unit.tensors
        ]
        alone = [name for name in self._units if name not in rows]
        while self._claims.there and len(self._claims.done()) < len(self._units):
            claim = self._claims.take(alone)
            with torch.no_grad(), torch.inference_mode():
                if claim is not None:
                    unit = self._units[self._claims.names[claim.unit]]
                    self._do(claim, partial(self._without_data, unit))
                elif sample is not None and self._claims.is_open(rows):
                    try:
                        self._follow(sample)
                    except ResourceError:
                        if self._claims.there:  # else it is over, and the place of the rows is gone
                            raise
                else:
                    time.sleep(claiming.BEAT_SECONDS)

    def _follow(self, sample: Sample) -> None:
        """Process claimable blocks one after another, on the states that earlier ranks pass on."""
        if self._claims.run is None:
            return
        handed = HandedStates(self._claims.run / "states")
        blocks = [block_unit(index) for index in range(self._inputs.planned.model_layout.blocks)]
        names = [name for name in [*blocks, HEAD] if self._units[name].tensors]
        place = self._claims.directory
        with closing(handed), self._inputs.stream(sample, place, handed) as stream:
            stream.embed()
            while (claim := self._claims.take(names)) is not None:
                name = self._claims.names[claim.unit]
                handed.block = blocks.index(name) if name in blocks else len(blocks)
                before = blocks[: handed.block]
                handed.wait = partial(self._wait, claim, before)
                handed.whole = partial(self._are_done, before[-1:])
                with suppress(SteppedBackError):
                    if name == HEAD:
                        self._do(claim, partial(self._head, stream))
                    else:
                        block = stream.block(handed.block)

                        def passes(block: DecoderBlock = block) -> None:
                            block.advance()
                            handed.flush()

                        try:
                            self._do(claim, partial(self._block, block, handed), passes)
                        finally:
                            block.close()
                    if not claim.lost:
                        handed.forget(handed.block)
                handed.block = -1

    def _are_done(self, names: Collection[str]) -> bool:
        return self._claims.done().keys() >= {*names}

    def _wait(self, claim: Claim, before: Sequence[str]) -> None:
        """Wait a moment for states that others compute.

        Raises:
            SteppedBackError: a block before that one is to be claimed first, or the claim is lost.
        """
        if not claim.directory.is_dir() or self._claims.is_open(before):
            raise SteppedBackError
        time.sleep(WAIT_SECONDS)

    def _do(
        self,
        claim: Claim,
        work: Callable[[MatrixRounding], Record],
        passes: Callable[[], object] = tuple,
    ) -> None:
        """Process a unit and write its file; for a unit in the journal, only pass the rows through (``passes``)."""
        start, total = time.monotonic(), len(self._units)
        unit = self._units[self._claims.names[claim.unit]]
        record: Record = {"unit": unit.name, KEPT: True}
        with claim:
            tell(unit.name, len(self._claims.done()), total)
            if unit.name in self._kept:
                passes()
            else:
                record = self._written(claim, unit, work)
            claim.finish(record)
        if not claim.lost:
            self._records += [record, *record.get(INSIDE, {}).values()]
            told = progress_of(unit.name, record, len(self._claims.done()), total, start)
            self._inputs.settings.progress(told)
            self._inputs.settings.policy.check(events_of(self._records))

    def _written(
        self, claim: Claim, unit: Unit, work: Callable[[MatrixRounding], Record]
    ) -> Record:
        """Write the tensors of a unit; return its record with the checksums."""
        layout, size = places(unit)
        files = [FilePlan(claim.file("data"), size, (), layout)] if size else []
        with WeightsWriter(claim.directory, files) as writer:
            output = UnitOutput(get_storage(self._inputs.planned.plan.format), writer)
            record = work(MatrixRounding(self._inputs, output))
            return {**record, "unit": unit.name, "sums": output.finish()}

    def _without_data(self, unit: Unit, rounding: MatrixRounding) -> Record:
        return DataFreeRounder(rounding).work(unit)

    def _block(self, block: DecoderBlock, handed: HandedStates, rounding: MatrixRounding) -> Record:
        planned, output = self._inputs.planned, rounding.output
        last = block.index == planned.model_layout.blocks - 1
        advance = not last or bool(self._units[HEAD].tensors)
        inside: dict[str, Record] = {}

        def do_expert(name: str, work: Callable[[], Record]) -> bool:
            with output.apart():
                inside[name] = {**work(), "unit": name, "sums": output.sums}
            return True

        rounder = BlockRounder(rounding, BlockTensors(planned.plan, output))
        (observed,) = observe(block, [rounder], advance=advance)
        early = advance and block.experts is not None
        if early:  # others wait: the experts run once more, as they are in the source
            block.advance_seen()
        record = rounder.round_block(block, observed, do_expert, advance=advance and not early)
        if not block.advanced and advance:
            block.advance()
        handed.flush()
        return {**record, INSIDE: inside} if inside else record

    def _head(self, stream: ModelStream, rounding: MatrixRounding) -> Record:
        statistics = observe_head(self._inputs.planned, stream)
        return rounding.round_head(self._units[HEAD].tensors, statistics)


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


def finished_units(claims: Claims, units: Sequence[Unit]) -> dict[str, FinishedUnit]:
    """Return the units of a run that are finished, by name; errors as `Claims.finished`."""
    found: dict[str, FinishedUnit] = {}
    records = claims.finished()
    own = {unit.name: unit.outputs for unit in units}
    for unit in claimed_units(units):
        if unit.name not in records or KEPT in records[unit.name][0]:
            continue
        record, file = records[unit.name]
        entries = {
            output.name: TensorEntry(
                output.name, output.dtype, output.shape, file, start, start + output.nbytes
            )
            for output, start in places(unit)[0]
        }
        inside: dict[str, Record] = record.pop(INSIDE, {})
        for name, one in {unit.name: record, **inside}.items():
            mine = tuple(entries[output.name] for output in own[name])
            found[name] = FinishedUnit(one, file, mine)
    return found


def finished_alone(stage: Stage, units: Iterable[Unit], fingerprint: Mapping[str, str]) -> set[str]:
    """Return the names of units that a single process finished before the run was shared.

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
    """Return where the tensors of a unit lie in its file, one after the other, and the size of the file."""
    places, offset = [], 0
    for output in unit.outputs:
        places.append((output, offset))
        offset += output.nbytes
    return tuple(places), offset


def locked(
    stage: Stage, work: Callable[[], Result], note: Callable[[str], None],
    unless: Callable[[], bool] = lambda: False, waits: bool = False,
) -> Result | None:  # fmt: skip
    """Call ``work`` under the lock of an output, as soon as no other process holds it.

    Args:
        stage: of the output.
        work: what to do.
        note: called with a sentence about a process that has the lock and does not respond.
        unless: whether it need not be done any more; None is returned then.
        waits: however long the other process takes: a large block may be tuned for hours.

    Raises:
        BusyError: another process has the lock, and its journal has not grown for `PATIENCE_SECONDS`.
        QuantForgeError: as entering the stage, or ``work``.
    """
    watch, monitor = Watch(), StaleLockMonitor(note)
    while not unless():
        try:
            with stage:
                return work()
        except BusyError as error:
            monitor.check(error)
            still = watch.seconds_unchanged("journal", written(stage.journal))
            if still > PATIENCE_SECONDS and not waits:
                raise
        time.sleep(POLL_SECONDS)
    return None


class SteppedBackError(Exception):
    """The states that a rank waits for will not arrive unless it does another unit first."""


class HandedStates:
    """Hidden states in front of one block, which are read, and after it, which are written.

    Args:
        directory: of the files; made where it is missing.

    Attributes:
        block: in front of which states are read; -1 while rows are embedded.
        wait: called again and again while a file is missing.
        whole: tells whether all states in front of the block have been written.
    """

    def __init__(self, directory: Path) -> None:
        self.block = -1
        self.wait: Callable[[], None] = lambda: None
        self.whole: Callable[[], bool] = lambda: False
        self._directory = directory
        self._shape: tuple[int, ...] = ()
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        with writing(directory, 0):
            make_folder(directory)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the rows of one micro-batch in front of the block, as soon as they are there.

        Raises:
            IntegrityError: the file is not what a rank had written.
            SteppedBackError: see `wait`.
        """
        path = self._file(self.block, start)
        states = torch.empty(stop - start, *self._shape)
        size = states.nbytes + SUM_BYTES
        data, whole = bytearray(), False
        while not (data or whole):
            whole = self.whole()
            with suppress(InputError):  # it is removed as soon as the block is done by another
                data = bytearray(FILES.head(path, STATES, size + 1, self._directory))
            if not data:
                self.wait()
        if len(data) == size:
            found = torch.frombuffer(data, dtype=torch.float32, count=states.numel())
            if _checksum(found) == data[-SUM_BYTES:]:
                return found.view_as(states)
        raise IntegrityError.at(
            path,
            "is not what a worker had written",
            f"start afresh: rm -r {self._directory.parents[1]}",
        )

    def write(self, start: int, states: Tensor) -> None:
        """Hand on the rows of one micro-batch after the block, unless that was done; see `flush`.

        Raises:
            ResourceError: as `flush`, for what was written before.
        """
        self.flush()  # one micro-batch at a time waits in memory
        self._shape = tuple(states.shape[1:])
        path = self._file(self.block + 1, start)
        if not path.exists():
            words = states.detach().to("cpu", torch.float32).contiguous()
            data = words.numpy().tobytes() + _checksum(words)
            self._written = self._writer.submit(save, path, data, overwrite=True)

    def flush(self) -> None:
        """Wait until everything is in its file.

        Raises:
            ResourceError: the disk is full, or the run is over and its directory gone.
        """
        if self._written is not None:
            self._written.result()

    def forget(self, block: int) -> None:
        """Remove the states in front of a finished block."""
        for path in self._directory.glob(f"{block}.*"):
            with suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Leave the files to others."""
        self._writer.shutdown()

    def _file(self, block: int, start: int) -> Path:
        return self._directory / f"{block}.{start}"


def _checksum(states: Tensor) -> bytes:
    """Return the sum of the words of float32 states: against accidents, in a tenth of the time of a CRC."""
    words = states.reshape(-1).view(torch.int32 if states.numel() % 2 else torch.int64)
    total = int(words.sum(dtype=torch.int64))
    return (total % (1 << 8 * SUM_BYTES)).to_bytes(SUM_BYTES, "big")
