"""Tuning of a run: learn scales, norms and codes of rounded blocks on calibration rows, and overwrite what was written.

A run of its own tunes a block as soon as it is rounded, while the rows are there; else the rows pass the source once
more when all blocks are done. The results are the same, to the bit.

What was learned of a block is kept in a file beside the journal before the journal says that the unit is done, and is
only then written into the weight files. A run that is resumed later writes it again: a kill in between loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.errors import IntegrityError
from quantforge.events import Event
from quantforge.execution.journal import Record, merge, write_durably
from quantforge.execution.progress import phase, tell
from quantforge.execution.unit_output import checksum
from quantforge.execution.units import TUNE, tune_unit
from quantforge.files.opener import FILES
from quantforge.files.safetensors import torch_dtype
from quantforge.quantizers.tuning import whole_epochs
from quantforge.quantizers.tuning.tuned_matrix import CODES
from quantforge_files.roles import TUNED

if TYPE_CHECKING:
    from quantforge.execution.execute import Run
    from quantforge.model.block import DecoderBlock
    from quantforge.quantizers.tuning.tuned_block import TunedBlock, Written
    from quantforge.quantizers.tuning.tuning_stream import Tuned, TuningStream
    from quantforge_calibration.sampler import Sample

LISTED = 8  # experts that an event names


class Tuning:
    """Tuning of what the blocks of a run have written."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._planned, self._settings = run.inputs.planned, run.inputs.settings
        self._journal, self._output = run.journal, run.output
        self._alone = False

    @property
    def units(self) -> list[str]:
        """Return the names of its units, in order: the blocks, then the whole model where there are epochs for it."""
        epochs = self._planned.plan.tune
        blocks = [tune_unit(index) for index in range(self._planned.model_layout.blocks)]
        return [*blocks, *([TUNE] if whole_epochs(epochs) else [])] if epochs else []

    @property
    def missing(self) -> list[str]:
        """Return the names of those that are not done yet."""
        return [name for name in self.units if name not in self._journal.done]

    def begin(self, *, alone: bool) -> None:
        """Write what was learned before the run was interrupted; ``alone``: no other run shares its pass.

        Raises:
            IntegrityError: what was learned is damaged.
        """
        self._alone = alone
        for name in self.units:
            if name in self._journal.done:
                self._write(name, self._journal.done[name])

    def follows(self, index: int) -> bool:
        """Return whether a block is to be tuned right after its rounding.

        Where products are in float32, the rows pass the source only once so. Experts run their tokens in other parts
        while they are rounded.
        """
        plain = self._planned.recipe.calibration.precision == "float32"
        mixed = any(kind.stacks for kind in self._planned.model_layout.layers)
        return self._alone and plain and not mixed and tune_unit(index) in self.missing

    @property
    def follows_any(self) -> bool:
        """Return whether blocks are to be tuned, each right after its rounding."""
        return any(map(self.follows, range(self._planned.model_layout.blocks)))

    def stream(self, sample: Sample) -> TuningStream:
        """Return the blocks with the rows that reach them, in the source and in the result."""
        # With transformers, which takes seconds.
        from quantforge.quantizers.tuning.tuning_stream import TuningStream

        settings = self._settings
        return TuningStream(
            self._run.inputs.checkpoint, self._planned.model_layout, sample, device=settings.device,
            micro_batch=self._planned.recipe.calibration.micro_batch,
            activations=self._journal.directory if settings.activations == "disk" else None,
        )  # fmt: skip

    def learn_block(self, stream: TuningStream, part: DecoderBlock) -> None:
        """Tune a block that the rows have just passed in the source, unless that is done; errors as `learn_missing`.

        The rows of the result pass it then. All earlier blocks were handed over, too.
        """
        name, start = tune_unit(part.index), time.monotonic()
        with phase("", self._run.share(name), TUNE):
            if self._planned.plan.transforms:
                part.restore()
            if name not in self._journal.done:
                seed = self._planned.recipe.calibration.seed
                self._block_done(stream.tune_block(part, self._read, seed, _tell_share), start)
            stream.pass_result(part, self._read)

    def learn_missing(self, sample: Sample) -> None:
        """Learn what is missing, one unit after the other.

        Raises:
            InputError: a weight, an activation or a gradient is not finite, or there is one row only.
            RefusedError: the model is one that cannot be tuned.
        """
        missing, start = self.missing, time.monotonic()
        if not missing:
            return
        seed = self._planned.recipe.calibration.seed
        with phase("", sum(map(self._run.share, missing)), TUNE):
            if missing != [TUNE]:
                with self.stream(sample) as stream:
                    for tuned in stream.tune_blocks(self._read, self._is_done, seed, _tell_share):
                        self._block_done(tuned, start)
            if whole := whole_epochs(self._planned.plan.tune):
                with self.stream(sample) as stream:
                    tuned = stream.tune(self._read, whole, seed, _tell_share)
                    about = {"divergence": {"before": tuned.before, "after": tuned.after}}
                    self._done(TUNE, tuned.blocks, about, start)

    def _is_done(self, index: int) -> bool:
        return tune_unit(index) in self._journal.done

    def _block_done(self, tuned: Tuned, start: float) -> None:
        about = {"error": {"before": tuned.before, "after": tuned.after}}
        self._done(tune_unit(tuned.blocks[0].part.index), tuned.blocks, about, start)

    def _done(self, name: str, blocks: Sequence[TunedBlock], about: Record, start: float) -> None:
        """Keep what was learned in a unit, say in the journal that it is done, and write it."""
        record = self._store_learned(name, blocks, about)
        self._journal.commit(name, record)
        self._write(name, record)
        self._run.report(name, record, start)
        self._settings.policy.check(self._run.events())

    def _store_learned(self, unit: str, blocks: Sequence[TunedBlock], about: Record) -> Record:
        """Keep what was learned of blocks beside the journal, and return the record of that."""
        record: Record = {"tuned": [], "sums": {}, "figures": {}, "events": [], **about}
        values: list[Tensor] = []
        for block in blocks:
            if unit != TUNE:  # told of its block already
                record["events"] += [event.to_json() for event in _missed_experts(block)]
            for name, value in self._changed_tensors(block, record):
                record["tuned"].append(name)
                record["sums"][name] = checksum(value, 0)
                values.append(value.cpu().contiguous().reshape(-1).view(torch.uint8))
        whole = torch.cat(values) if values else torch.empty(0, dtype=torch.uint8)
        write_durably(self._path(unit), whole.numpy().tobytes())
        return record

    def _path(self, unit: str) -> Path:
        """Return the file of what was learned in a unit, in the directory of the journal."""
        return self._journal.directory / f"{unit.replace(' ', '-')}.bin"

    def _write(self, unit: str, record: Record) -> None:
        """Write what was learned in a unit into the weight files.

        Raises:
            IntegrityError: the file of results is not as it was written.
        """
        path = self._path(unit)
        there = path.exists()
        with FILES.stream(path, TUNED, self._journal.directory) if there else BytesIO() as file:
            for name in record["tuned"]:
                stored = self._output.entry(name)
                data = file.read(stored.nbytes)
                value = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
                if len(data) == stored.nbytes:
                    value = value.view(torch_dtype(stored.dtype)).reshape(stored.shape)
                if checksum(value, 0) != record["sums"][name]:
                    raise IntegrityError(
                        f"{path}: what was tuned of {name} is not what the interrupted run had written",
                        f"start afresh: rm -r {self._journal.directory}",
                        file=str(path),
                    )
                self._output.rewrite(name, value)
        self._output.finish()

    def _read(self, part: DecoderBlock) -> Written:
        """Return what was written of a block."""
        from quantforge.quantizers.tuning.tuned_block import Written

        tensors = {
            name: self._output.storage.unpack(tensor, self._output.read(tensor))
            for name, tensor in self._run.tensors.quantized(part).items()
        }
        if self._planned.plan.transforms:  # gains go on from what these have left
            self._run.tensors.load_kept(part)
        kept = self._run.tensors.kept(part)

        def stored(local: str) -> Tensor:
            plan = kept[local]
            (value,) = self._output.read(plan).values()
            as_stored = replace(plan, dtype=plan.outputs[0].dtype)  # not rounded to the source's
            return self._output.storage.restore_unquantized(as_stored, value)

        return Written(tensors, stored)

    def _changed_tensors(self, block: TunedBlock, record: Record) -> list[tuple[str, Tensor]]:
        """Return the stored tensors of a block that have changed, and note by how much."""
        found: list[tuple[str, Tensor]] = []
        for linear, tensor in self._run.tensors.quantized(block.part).items():
            before = self._output.read(tensor)
            matrix = block.matrices[linear]
            after = self._output.storage.pack(tensor, matrix.result().to(torch.device("cpu")))
            found += [(name, v) for name, v in after.items() if not torch.equal(v, before[name])]
            factors = [float(one.factor.abs().max()) for one in matrix.scales.values()]
            figures = {"tuned": max(factors)} if factors else {}
            if CODES in matrix.codes:
                changes = matrix.codes[CODES].snapshot()
                figures["recoded"] = float(changes.count_nonzero()) / changes.numel()
            merge(record, {"figures": {tensor.name: figures}})
        kept = self._run.tensors.kept(block.part)
        for name, gains in block.gains.items():
            tensor = kept[name]
            (before_,) = self._output.read(tensor).values()
            value = self._output.storage.convert_unquantized(tensor, gains.stored().cpu())
            if not torch.equal(value, before_):
                found.append((tensor.outputs[0].name, value))
                change = float(gains.factor.abs().max())
                merge(record, {"figures": {tensor.name: {"tuned": change}}})
        return found


def _tell_share(share: float, what: str) -> None:
    tell(f"tuning, {what}", share=share)


def _missed_experts(block: TunedBlock) -> list[Event]:
    """Return the event for experts of a block to which no token was sent while it learned."""
    if block.experts is None or not (missed := block.experts.missed):
        return []
    listed = ", ".join(map(str, missed[:LISTED]))
    more = ", ..." if len(missed) > LISTED else ""
    detail = f"{len(missed)} of {len(block.experts.numbers)} experts got no token: {listed}{more}"
    return [Event("tune-blind", block.experts.name, detail)]
