"""A run that several processes share: each does units that no other does, and one of them puts the result together.

Units are claimed by renames (`quantforge.execution.claims`), and each is written into files of its claim. When all are
done, whoever gets the lock of the output runs the plan as ever, but copies what was finished instead of computing it.

Processes that give the same command share a run without calibration, whose units need no other (``--join``). Ranks of
torchrun share a calibrated one, too. A calibrated block reads what the source's blocks before it compute, never what
another rank has rounded. So ranks follow one another through the blocks, and hand on the hidden states of each
micro-batch (`HandedStates`): while one observes a block, the next is already observed by another, and what is observed
is rounded meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from quantforge.checkpoint.lock import StaleLockMonitor, Watch
from quantforge.checkpoint.safetensors import TensorEntry
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import BusyError, IntegrityError, ResourceError
from quantforge.execution import claims as claiming
from quantforge.execution.block_tensors import BlockTensors
from quantforge.execution.calibrated_block import CalibratedBlock
from quantforge.execution.data_free import DataFree
from quantforge.execution.handed_states import HandedStates, SteppedBackError
from quantforge.execution.journal import recorded_fingerprint, records_of, written
from quantforge.execution.passing_rows import observe_head, stream_of
from quantforge.execution.progress import tell
from quantforge.execution.journal import Record, events_of
from quantforge.execution.progress import progress_of
from quantforge.execution.rounding import MatrixRounding
from quantforge.execution.source_tensors import SourceTensors
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.units import HEAD, OUTER, Unit, block_unit, claimed_units
from quantforge.formats.storage import storage_of
from quantforge.plans import FilePlan, StoredTensor

if TYPE_CHECKING:
    from quantforge.checkpoint.stage import Stage
    from quantforge.execution.claims import Claim, Claims
    from quantforge.model.block import BlockPart
    from quantforge.model.stream import ModelStream
    from quantforge.settings import Settings
    from quantforge.verbs.job import RunInputs
    from quantforge_calibration.sampler import Sample

Result = TypeVar("Result")
POLL_SECONDS = 0.2  # between two tries to get a lock
WAIT_SECONDS = 0.02  # for states that others compute
# With a process that puts the result together: digests of large files take minutes.
PATIENCE_SECONDS = 900.0
INSIDE = "inside"  # in the record of a unit: those of the units that went with it
KEPT = "kept"  # in the record of a unit that one process alone had finished: it is in the journal of the output


class Worker:
    """A process that does units of a shared run.

    Args:
        claims: which units are whose.
        units: of the run.
        prepared: the run.
        settings: how it runs.
        kept: names of the units that the journal has: rows pass them, and nothing else is done.
    """

    def __init__(
        self,
        claims: Claims,
        units: Sequence[Unit],
        prepared: RunInputs,
        settings: Settings,
        kept: Collection[str] = (),
    ) -> None:
        self._claims, self._units = claims, {unit.name: unit for unit in units}
        self._kept = kept
        self._planned, self._checkpoint = prepared.planned, prepared.checkpoint
        self._settings, self._importance = settings, prepared.importance
        self._source = SourceTensors(self._checkpoint, self._planned.matched, settings.device)
        self._records: list[Record] = []

    def work_off(self, sample: Sample | None) -> None:
        """Do units that no other process does, until all are done or the run is over.

        Args:
            sample: calibration rows that pass the blocks.

        Raises:
            InputError: a weight or an activation is not finite.
            IntegrityError: the source changed meanwhile.
            RefusedError: more events of this worker's units than the policy allows.
        """
        looks = bool(self._planned.plan.needs)
        rows = [
            name for name, unit in self._units.items() if looks and name != OUTER and unit.tensors
        ]
        alone = [name for name in self._units if name not in rows]
        while self._claims.there and self._claims.count() < len(self._units):
            claim = self._claims.take(alone)
            with torch.no_grad(), torch.inference_mode():
                if claim is not None:
                    unit = self._units[self._claims.names[claim.unit]]
                    self._do(claim, partial(DataFree.work, unit=unit))
                elif sample is not None and self._claims.is_open(rows):
                    try:
                        self._follow(sample)
                    except ResourceError:
                        if self._claims.there:  # else it is over, and the place of the rows is gone
                            raise
                else:
                    time.sleep(claiming.BEAT_SECONDS)

    def _follow(self, sample: Sample) -> None:
        """Do blocks that can be claimed, one after the other, on the states that the ranks before them hand on."""
        if self._claims.run is None:
            return
        handed = HandedStates(self._claims.run / "states")
        blocks = [block_unit(index) for index in range(self._planned.matched.blocks)]
        names = [name for name in [*blocks, HEAD] if self._units[name].tensors]
        given = (self._checkpoint, self._planned, sample, self._settings, self._claims.directory)
        with closing(handed), stream_of(*given, handed) as stream:
            stream.embed()
            while (claim := self._claims.take(names)) is not None:
                name = self._claims.names[claim.unit]
                handed.block = blocks.index(name) if name in blocks else len(blocks)
                before = blocks[: handed.block]
                handed.wait = partial(self._wait, claim, before)
                handed.whole = partial(self._claims.are_done, before[-1:])
                with suppress(SteppedBackError):
                    if name == HEAD:
                        self._do(claim, partial(self._head, stream))
                    else:
                        part = stream.block(handed.block)

                        def passes(part: BlockPart = part) -> None:
                            part.advance()
                            handed.flush()

                        try:
                            self._do(claim, partial(self._block, part, handed), passes)
                        finally:
                            part.close()
                    if not claim.lost:
                        handed.forget(handed.block)
                handed.block = -1

    def _wait(self, claim: Claim, before: Sequence[str]) -> None:
        """Wait a moment for states that others compute.

        Raises:
            SteppedBackError: a block before that one is to be claimed first, or the claim is lost.
        """
        if not claim.directory.is_dir() or self._claims.is_open(before):
            raise SteppedBackError
        time.sleep(WAIT_SECONDS)

    def _do(
        self, claim: Claim, work: Callable[[DataFree], Record], passes: Callable[[], object] = tuple
    ) -> None:
        """Do a unit into the file of its claim; of one that the journal has, only what ``passes`` the rows."""
        start, total = time.monotonic(), len(self._units)
        unit = self._units[self._claims.names[claim.unit]]
        record: Record = {"unit": unit.name, KEPT: True}
        with claim:
            tell(unit.name, self._claims.count(), total)
            if unit.name in self._kept:
                passes()
            else:
                record = self._written(claim, unit, work)
            claim.finish(record)
        if not claim.lost:
            self._records += [record, *record.get(INSIDE, {}).values()]
            told = progress_of(unit.name, record, self._claims.count(), total, start)
            self._settings.progress(told)
            self._settings.policy.check(events_of(self._records))

    def _written(self, claim: Claim, unit: Unit, work: Callable[[DataFree], Record]) -> Record:
        """Write the tensors of a unit; return its record with the checksums."""
        stored, size = places(unit)
        files = [FilePlan(claim.file("data"), size, (), stored)] if size else []
        with WeightsWriter(claim.directory, files) as writer:
            output = UnitOutput(storage_of(self._planned.plan.format), writer)
            rounding = MatrixRounding(
                self._planned, self._source, output, self._settings, self._importance
            )
            record = work(DataFree(self._planned.plan, rounding))
            return {**record, "unit": unit.name, "sums": output.finish()}

    def _block(self, part: BlockPart, handed: HandedStates, free: DataFree) -> Record:
        last = part.index == self._planned.matched.blocks - 1
        ends = last and not self._units[HEAD].tensors
        output, inside = free.rounding.output, {}
        tensors = BlockTensors(self._planned.plan, output)
        block = CalibratedBlock(self._planned, free.rounding, free, tensors)

        def do(name: str, work: Callable[[], Record]) -> None:
            with output.apart():
                inside[name] = {**work(), "unit": name, "sums": output.sums}

        block.early = True
        record = block.work(part, do, ends=ends)
        if not part.advanced and not ends:
            part.advance()
        handed.flush()
        return {**record, INSIDE: inside} if inside else record

    def _head(self, stream: ModelStream, free: DataFree) -> Record:
        return free.head(self._units[HEAD], observe_head(self._planned, stream))


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
    own = {unit.name: unit.stored for unit in units}
    for unit in claimed_units(units):
        if unit.name not in records or KEPT in records[unit.name][0]:
            continue
        record, file = records[unit.name]
        entries = {
            stored.name: TensorEntry(
                stored.name, stored.dtype, stored.shape, file, start, start + stored.nbytes
            )
            for stored, start in places(unit)[0]
        }
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
    """Return where the tensors of a unit lie in its file, one after the other, and the size of the file."""
    places, offset = [], 0
    for stored in unit.stored:
        places.append((stored, offset))
        offset += stored.nbytes
    return tuple(places), offset


def locked(
    stage: Stage, work: Callable[[], Result], note: Callable[[str], None],
    unless: Callable[[], bool] = lambda: False, waits: bool = False,
) -> Result | None:  # fmt: skip
    """Do something under the lock of an output, as soon as no other process has it.

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
            monitor.meet(error)
            still = watch.still("journal", written(stage.journal))
            if still > PATIENCE_SECONDS and not waits:
                raise
        time.sleep(POLL_SECONDS)
    return None
