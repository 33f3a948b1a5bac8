"""Tuning of a run: units behind its blocks, which learn block after block and write that over what was written.

A run of its own tunes a block as soon as it is rounded, while the rows are there; else the rows pass the source once
more when all blocks are done. The results are the same, to the bit.

What was learned of a block lies in a file beside the journal before the journal says that it is done, and is only then
written into the weight files. A run that goes on later writes it again: a kill in between loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.safetensors import torch_dtype
from quantforge.errors import IntegrityError
from quantforge.events import Event
from quantforge.execution.journal import write_durably
from quantforge.execution.progress import tell
from quantforge.execution.record import Record, checksum, merge
from quantforge.execution.units import TUNE, tune_unit
from quantforge.model.tuned_matrix import CODES
from quantforge.model.tuning_bounds import whole_epochs
from quantforge_files.roles import TUNED

if TYPE_CHECKING:
    from quantforge.execution.block_tensors import BlockTensors
    from quantforge.execution.journal import Workspace
    from quantforge.execution.unit_output import UnitOutput
    from quantforge.model.block import BlockPart
    from quantforge.model.block_tuning import BlockTuned
    from quantforge.model.tuned_block import TunedBlock, Written
    from quantforge.model.tuning import TuningStream
    from quantforge.planning.planner import Planned

After = Callable[[str, Record], None]
LISTED = 8  # experts that an event names


class Tuning:
    """Tuning of what the blocks of a run have written."""

    def __init__(
        self, planned: Planned, output: UnitOutput, tensors: BlockTensors, work: Workspace
    ) -> None:
        """Tune under a plan, into a journal."""
        self._planned, self._output, self._tensors = planned, output, tensors
        self._work = work

    @property
    def place(self) -> Path:
        """Return the directory of its files."""
        return self._work.directory

    @property
    def names(self) -> list[str]:
        """Return the names of its units, in order: the blocks, then the whole model where there are epochs for it."""
        epochs = self._planned.plan.tune
        blocks = [tune_unit(index) for index in range(self._planned.matched.blocks)]
        return [*blocks, *([TUNE] if whole_epochs(epochs) else [])] if epochs else []

    @property
    def missing(self) -> list[str]:
        """Return the names of those that are not done yet."""
        return [name for name in self.names if name not in self._work.done]

    def block(self, stream: TuningStream, part: BlockPart, after: After) -> None:
        """Tune a block that the rows have just passed in the source, unless that is done; errors as `learn`.

        The rows of the result go on behind it. All earlier blocks were handed over, too.
        """
        name, seed = tune_unit(part.index), self._planned.recipe.calibration.seed
        if self._planned.plan.transforms:
            part.restore()
        if name not in self._work.done:
            one = stream.tune_block(part, self._read, 1, seed, _told)
            self._done(name, [one.block], _errors(one), after)
        stream.pass_result(part, self._read)

    def learn(self, streaming: Callable[[], TuningStream], after: After) -> None:
        """Learn what is missing, one unit after the other, write it, and tell ``after`` its name and record.

        ``streaming`` returns the blocks with the rows that reach them.

        What was learned of a unit is kept beside the journal, then the journal says that it is done, and then it is
        written. The record has checksums of what was learned.

        Raises:
            InputError: a weight, an activation or a gradient is not finite, or there is one row only.
            RefusedError: the model is one that cannot be tuned.
        """
        seed = self._planned.recipe.calibration.seed

        def has(index: int) -> bool:
            return tune_unit(index) in self._work.done

        with torch.inference_mode(mode=False), torch.no_grad():
            if self.missing != [TUNE]:
                with streaming() as stream:
                    for one in stream.tune_blocks(self._read, has, 1, seed, _told):
                        name = tune_unit(one.block.part.index)
                        self._done(name, [one.block], _errors(one), after)
            if whole := whole_epochs(self._planned.plan.tune):
                with streaming() as stream:
                    tuned = stream.tune(self._read, whole, seed, _told)
                    about = {"divergence": {"before": tuned.before, "after": tuned.after}}
                    self._done(TUNE, tuned.blocks, about, after)

    def _done(self, name: str, blocks: Sequence[TunedBlock], about: Record, after: After) -> None:
        record = self._kept(name, blocks, about)
        self._work.commit(name, record)
        self._write(name, record)
        after(name, record)

    def write_again(self) -> None:
        """Write what was learned before the run was interrupted; errors as `IntegrityError` of damaged results."""
        for name in self.names:
            if name in self._work.done:
                self._write(name, self._work.done[name])

    def _kept(self, unit: str, blocks: Sequence[TunedBlock], about: Record) -> Record:
        """Keep what was learned of blocks beside the journal, and return the record of that."""
        record: Record = {"tuned": [], "sums": {}, "figures": {}, "events": [], **about}
        values: list[Tensor] = []
        for block in blocks:
            if unit != TUNE:  # told of its block already
                record["events"] += [event.to_json() for event in _blind(block)]
            for name, value in self._changed(block, record):
                record["tuned"].append(name)
                record["sums"][name] = checksum(value, 0)
                values.append(value.cpu().contiguous().reshape(-1).view(torch.uint8))
        whole = torch.cat(values) if values else torch.empty(0, dtype=torch.uint8)
        write_durably(self._path(unit), whole.numpy().tobytes())
        return record

    def _path(self, unit: str) -> Path:
        """Return the file of what was learned in a unit, in the directory of the journal."""
        return self._work.directory / f"{unit.replace(' ', '-')}.bin"

    def _write(self, unit: str, record: Record) -> None:
        """Write what was learned in a unit into the weight files.

        Raises:
            IntegrityError: the file of results is not as it was written.
        """
        path = self._path(unit)
        there = path.exists()
        with FILES.stream(path, TUNED, self._work.directory) if there else BytesIO() as file:
            for name in record["tuned"]:
                stored = self._output.entry(name)
                data = file.read(stored.nbytes)
                value = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
                if len(data) == stored.nbytes:
                    value = value.view(torch_dtype(stored.dtype)).reshape(stored.shape)
                if checksum(value, 0) != record["sums"][name]:
                    raise IntegrityError(
                        f"{path}: what was tuned of {name} is not what the interrupted run had written",
                        f"start afresh: rm -r {self._work.directory}",
                        file=str(path),
                    )
                self._output.rewrite(name, value)
        self._output.finish()

    def _read(self, part: BlockPart) -> Written:
        from quantforge.model.tuned_block import Written

        tensors = {
            name: self._output.storage.unpack(tensor, self._output.read(tensor))
            for name, tensor in self._tensors.targets(part).items()
        }
        if self._planned.plan.transforms:  # gains go on from what these have left
            self._tensors.load_kept(part)
        kept = self._tensors.kept(part)

        def stored(local: str) -> Tensor:
            plan = kept[local]
            (value,) = self._output.read(plan).values()
            as_stored = replace(plan, dtype=plan.stored[0].dtype)  # not rounded to the source's
            return self._output.storage.kept(as_stored, value)

        return Written(tensors, stored)

    def _changed(self, block: TunedBlock, record: Record) -> list[tuple[str, Tensor]]:
        """Return the stored tensors of a block that have changed, and note by how much."""
        found: list[tuple[str, Tensor]] = []
        for linear, tensor in self._tensors.targets(block.part).items():
            before = self._output.read(tensor)
            matrix = block.matrices[linear]
            after = self._output.storage.pack(tensor, matrix.result().to(torch.device("cpu")))
            found += [(name, v) for name, v in after.items() if not torch.equal(v, before[name])]
            factors = [float(one.factor.abs().max()) for one in matrix.scales.values()]
            figures = {"tuned": max(factors)} if factors else {}
            if CODES in matrix.steps:
                steps = matrix.steps[CODES].snapshot()
                figures["recoded"] = float(steps.count_nonzero()) / steps.numel()
            merge(record, {"figures": {tensor.name: figures}})
        kept = self._tensors.kept(block.part)
        for name, gains in block.gains.items():
            tensor = kept[name]
            (before_,) = self._output.read(tensor).values()
            value = self._output.storage.keep(tensor, gains.stored().cpu())
            if not torch.equal(value, before_):
                found.append((tensor.stored[0].name, value))
                change = float(gains.factor.abs().max())
                merge(record, {"figures": {tensor.name: {"tuned": change}}})
        return found


def _told(share: float, what: str) -> None:
    tell(f"tuning, {what}", share=share)


def _errors(one: BlockTuned) -> Record:
    return {"error": {"before": one.before, "after": one.after}}


def _blind(block: TunedBlock) -> list[Event]:
    """Return the event for experts of a block to which no token was sent while it learned."""
    if block.experts is None or not (missed := block.experts.missed):
        return []
    listed = ", ".join(map(str, missed[:LISTED]))
    more = ", ..." if len(missed) > LISTED else ""
    detail = f"{len(missed)} of {len(block.experts.numbers)} experts got no token: {listed}{more}"
    return [Event("tune-blind", block.experts.name, detail)]
