"""Units that processes share: each does those that it can claim, into files of its claims, until all are done.

A calibrated block reads what the source's blocks before it compute, never what another worker has rounded. So workers
follow one another through the blocks, and hand on the hidden states of each micro-batch (`HandedStates`): while one
observes a block, the next is already observed by another, and what is observed is rounded meanwhile.

Where a block returns more than hidden states, or a method looks at them over and over, every worker brings the rows
through the model by itself instead, and runs the blocks that others hold as the source has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import ResourceError
from quantforge.execution import leases
from quantforge.execution.block_tensors import BlockTensors
from quantforge.execution.calibrated_block import CalibratedBlock
from quantforge.execution.data_free import DataFree
from quantforge.execution.handed_states import HandedStates, SteppedBackError
from quantforge.execution.passing_rows import observe_head, stream_of
from quantforge.execution.progress import tell
from quantforge.execution.record import Record, events_of, progress_of
from quantforge.execution.rounding import MatrixRounding
from quantforge.execution.sharing import INSIDE, KEPT, places
from quantforge.execution.source_tensors import SourceTensors
from quantforge.execution.unit_output import UnitOutput
from quantforge.execution.units import HEAD, OUTER, Unit, block_unit
from quantforge.formats.storage import storage_of
from quantforge.plans import FilePlan

if TYPE_CHECKING:
    from quantforge.execution.claims import Claims
    from quantforge.execution.leases import Claim
    from quantforge.model.block import BlockPart
    from quantforge.model.stream import ModelStream
    from quantforge.settings import Settings
    from quantforge.verbs.run_inputs import RunInputs
    from quantforge_calibration.sampler import Sample

WAIT_SECONDS = 0.02


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
        self._flush: Callable[[], None] = lambda: None

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
        architecture = self._planned.matched.architecture
        images = sample is not None and sample.images is not None
        alone_each = images or (architecture is not None and architecture.replayed)
        passing = self._pass_blocks if alone_each else self._follow
        while self._claims.there and self._claims.count() < len(self._units):
            claim = self._claims.take(alone)
            with torch.no_grad(), torch.inference_mode():
                if claim is not None:
                    unit = self._units[self._claims.names[claim.unit]]
                    self._do(claim, partial(DataFree.work, unit=unit))
                elif sample is not None and self._claims.is_open(rows):
                    try:
                        passing(sample)
                    except ResourceError:
                        if self._claims.there:  # else it is over, and the place of the rows is gone
                            raise
                else:
                    time.sleep(leases.BEAT_SECONDS)

    def _follow(self, sample: Sample) -> None:
        """Do blocks that can be claimed, one after the other, on the states that the workers before them hand on."""
        if self._claims.run is None:
            return
        keeps = self._settings.activations == "memory"
        handed = HandedStates(self._claims.run / "states", keeps=keeps)
        blocks = [block_unit(index) for index in range(self._planned.matched.blocks)]
        names = [name for name in [*blocks, HEAD] if self._units[name].tensors]
        self._flush = handed.flush
        with closing(handed), self._stream(sample, handed) as stream:
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
                        try:
                            self._do(claim, partial(self._block, part), part.advance)
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

    def _stream(self, sample: Sample, states: HandedStates | None = None) -> ModelStream:
        place = self._claims.directory
        return stream_of(self._checkpoint, self._planned, sample, self._settings, place, states)

    def _pass_blocks(self, sample: Sample) -> None:
        """Pass the rows through the blocks once, as far as units are open, and do those that can be claimed."""
        blocks = self._planned.matched.blocks
        with self._stream(sample) as stream:
            for part in stream:
                claim = self._claims.take([block_unit(part.index)])
                if claim is not None:
                    self._do(claim, partial(self._block, part))
                    if claim.lost:  # the block is half changed
                        return
                later = [block_unit(index) for index in range(part.index + 1, blocks)]
                if not self._claims.is_open([*later, HEAD]):
                    return
                if not part.advanced:
                    tell(f"block {part.index}: running it, which another process rounds")
                    part.advance()
            claim = self._claims.take([HEAD])
            if claim is not None:
                self._do(claim, partial(self._head, stream))

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
            self._flush()
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

    def _block(self, part: BlockPart, free: DataFree) -> Record:
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
        return {**record, INSIDE: inside} if inside else record

    def _head(self, stream: ModelStream, free: DataFree) -> Record:
        return free.head(self._units[HEAD], observe_head(self._planned, stream))
