"""Tuning step of a run: optimize scales, norms and codes of rounded blocks on calibration rows, and overwrite them.

A run that has the pass to itself tunes each block right after rounding it, while its rows are available; otherwise the
rows pass through the source once more after all blocks are rounded. The results are bitwise identical.

Tuned values of a block are saved in a file next to the journal before the journal marks the unit as done, and only then
written to the weight files. A resumed run writes them again, so an interruption in between loses nothing.
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
from quantforge.execution.journal import Record, merge_records, write_durably
from quantforge.execution.unit_output import checksum
from quantforge.execution.units import TUNE, tune_unit
from quantforge.files.opener import FILES
from quantforge.files.safetensors import torch_dtype
from quantforge.progress import phase, report_step
from quantforge.quantizers.tuning import whole_model_epochs
from quantforge.quantizers.tuning.tuned_matrix import CODES
from quantforge_files.roles import TUNING_RESULTS

if TYPE_CHECKING:
    from quantforge.execution.block_tensors import BlockTensors
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.execution.unit_recorder import UnitRecorder
    from quantforge.model.block import DecoderBlock
    from quantforge.quantizers.tuning.tuned_block import TunedBlock, WrittenBlock
    from quantforge.quantizers.tuning.tuning_stream import TuningResult, TuningStream
    from quantforge_calibration.sampler import Sample

MAX_LISTED_EXPERTS = 8  # in the text of an event


class TuningStep:
    """Tunes the written blocks of a run.

    Args:
        inputs: inputs of the run.
        recorder: journals and reports the units.
        tensors: planned tensors, by block.
    """

    def __init__(self, inputs: RunInputs, recorder: UnitRecorder, tensors: BlockTensors) -> None:
        self._inputs, self._recorder, self._tensors = inputs, recorder, tensors
        self._planned, self._settings = inputs.planned, inputs.settings
        self._journal, self._output = recorder.journal, recorder.output
        self._has_own_pass = False

    @property
    def units(self) -> list[str]:
        """Return the names of the tuning units: one per block, then one for the whole model if it has epochs."""
        epochs = self._planned.plan.tune
        blocks = [tune_unit(index) for index in range(self._planned.model_layout.blocks)]
        return [*blocks, *([TUNE] if whole_model_epochs(epochs) else [])] if epochs else []

    @property
    def unfinished(self) -> list[str]:
        """Return the names of the tuning units that are not done."""
        return [name for name in self.units if name not in self._journal.done]

    def rewrite_learned(self, *, own_pass: bool) -> None:
        """Write the values tuned before an interruption to the weight files.

        Args:
            own_pass: whether no other run shares the pass.

        Raises:
            IntegrityError: the saved values are damaged.
        """
        self._has_own_pass = own_pass
        for name in self.units:
            if name in self._journal.done:
                self._write_learned(name, self._journal.done[name])

    def tunes_while_rounding(self, index: int) -> bool:
        """Return whether a block is tuned right after it is rounded.

        This saves a pass through the source, but needs float32 products, and blocks without experts, whose tokens are
        batched differently while they are rounded.
        """
        is_float32 = self._planned.recipe.calibration.precision == "float32"
        has_experts = any(kind.stacks for kind in self._planned.model_layout.layers)
        return (
            self._has_own_pass
            and is_float32
            and not has_experts
            and tune_unit(index) in self.unfinished
        )

    @property
    def tunes_any_while_rounding(self) -> bool:
        """Return whether any block is tuned right after it is rounded."""
        return any(map(self.tunes_while_rounding, range(self._planned.model_layout.blocks)))

    def stream(self, sample: Sample) -> TuningStream:
        """Return an iterator over the blocks with the rows that reach them in the source and in the quantized model."""
        # With transformers, which takes seconds.
        from quantforge.quantizers.tuning.tuning_stream import TuningStream

        settings = self._settings
        return TuningStream(
            self._inputs.checkpoint, self._planned.model_layout, sample, device=settings.device,
            micro_batch=self._planned.recipe.calibration.micro_batch,
            activations=self._journal.directory if settings.activations == "disk" else None,
        )  # fmt: skip

    def tune_block_and_pass(self, stream: TuningStream, decoder_block: DecoderBlock) -> None:
        """Tune a block that the rows have just passed, unless done; then run the quantized model's rows through it.

        All earlier blocks must have been passed to this method too. Errors as `tune_unfinished`.
        """
        name, start = tune_unit(decoder_block.index), time.monotonic()
        with phase("", self._recorder.work_share(name), TUNE):
            if self._planned.plan.transforms:
                decoder_block.reload_source_weights()
            if name not in self._journal.done:
                seed = self._planned.recipe.calibration.seed
                self._finish_block(
                    stream.tune_block(
                        decoder_block, self._read_written, seed, _report_tuning_progress
                    ),
                    start,
                )
            stream.pass_result(decoder_block, self._read_written)

    def tune_unfinished(self, sample: Sample) -> None:
        """Tune all unfinished units, one after the other.

        Raises:
            InputError: a weight, an activation or a gradient is not finite, or there is only one row.
            RefusedError: the model does not support tuning.
        """
        unfinished, start = self.unfinished, time.monotonic()
        if not unfinished:
            return
        seed = self._planned.recipe.calibration.seed
        with phase("", sum(map(self._recorder.work_share, unfinished)), TUNE):
            if unfinished != [TUNE]:
                with self.stream(sample) as stream:
                    for tuned in stream.tune_blocks(
                        self._read_written, self._is_done, seed, _report_tuning_progress
                    ):
                        self._finish_block(tuned, start)
            if epochs_of_model := whole_model_epochs(self._planned.plan.tune):
                with self.stream(sample) as stream:
                    tuned = stream.tune(
                        self._read_written, epochs_of_model, seed, _report_tuning_progress
                    )
                    details = {"divergence": {"before": tuned.before, "after": tuned.after}}
                    self._finish_unit(TUNE, tuned.blocks, details, start)

    def _is_done(self, index: int) -> bool:
        return tune_unit(index) in self._journal.done

    def _finish_block(self, tuned: TuningResult, start: float) -> None:
        details = {"error": {"before": tuned.before, "after": tuned.after}}
        self._finish_unit(
            tune_unit(tuned.blocks[0].decoder_block.index), tuned.blocks, details, start
        )

    def _finish_unit(
        self, name: str, blocks: Sequence[TunedBlock], details: Record, start: float
    ) -> None:
        """Save the tuned values of a unit, journal the unit as done, and write the values to the weight files."""
        record = self._save_learned(name, blocks, details)
        self._journal.commit(name, record)
        self._write_learned(name, record)
        self._recorder.report(name, record, start)
        self._settings.policy.check(self._recorder.events())

    def _save_learned(self, unit: str, blocks: Sequence[TunedBlock], details: Record) -> Record:
        """Save the tuned values of blocks in a file next to the journal; return the record of the unit."""
        record: Record = {
            "tuned_tensors": [],
            "checksums": {},
            "metrics": {},
            "events": [],
            **details,
        }
        values: list[Tensor] = []
        for block in blocks:
            if unit != TUNE:  # tuning units of blocks have already reported them
                record["events"] += [event.to_json() for event in _missed_expert_events(block)]
            for name, value in self._changed_tensors(block, record):
                record["tuned_tensors"].append(name)
                record["checksums"][name] = checksum(value, 0)
                values.append(value.cpu().contiguous().reshape(-1).view(torch.uint8))
        data = torch.cat(values) if values else torch.empty(0, dtype=torch.uint8)
        write_durably(self._path(unit), data.numpy().tobytes())
        return record

    def _path(self, unit: str) -> Path:
        """Return the path of the tuned values of a unit, in the directory of the journal."""
        return self._journal.directory / f"{unit.replace(' ', '-')}.bin"

    def _write_learned(self, unit: str, record: Record) -> None:
        """Write the saved tuned values of a unit to the weight files.

        Raises:
            IntegrityError: the saved file does not match its checksums.
        """
        path = self._path(unit)
        exists = path.exists()
        with (
            FILES.stream(path, TUNING_RESULTS, self._journal.directory)
            if exists
            else BytesIO() as file
        ):
            for name in record["tuned_tensors"]:
                stored = self._output.entry(name)
                data = file.read(stored.nbytes)
                value = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
                if len(data) == stored.nbytes:
                    value = value.view(torch_dtype(stored.dtype)).reshape(stored.shape)
                if checksum(value, 0) != record["checksums"][name]:
                    raise IntegrityError(
                        f"what was tuned of {name} is not what the interrupted run had written",
                        f"start afresh: rm -r {self._journal.directory}",
                        file=str(path),
                        subject=str(path),
                    )
                self._output.rewrite(name, value)
        self._output.finish()

    def _read_written(self, decoder_block: DecoderBlock) -> WrittenBlock:
        """Read back the written tensors of a block."""
        from quantforge.quantizers.tuning.tuned_block import WrittenBlock

        tensors = {
            name: self._output.storage.unpack(tensor, self._output.read(tensor))
            for name, tensor in self._tensors.quantized_linears(decoder_block).items()
        }
        if self._planned.plan.transforms:  # norm gains start from the transformed ones
            self._tensors.load_written_parameters(decoder_block)
        unquantized = self._tensors.unquantized(decoder_block)

        def stored(local: str) -> Tensor:
            plan = unquantized[local]
            (value,) = self._output.read(plan).values()
            # Stored type, not that of the source
            as_stored = replace(plan, dtype=plan.outputs[0].dtype)
            return self._output.storage.restore_unquantized(as_stored, value)

        return WrittenBlock(tensors, stored)

    def _changed_tensors(self, block: TunedBlock, record: Record) -> list[tuple[str, Tensor]]:
        """Return the stored tensors of a block that tuning changed, and record by how much."""
        changed: list[tuple[str, Tensor]] = []
        for linear, tensor in self._tensors.quantized_linears(block.decoder_block).items():
            stored_before = self._output.read(tensor)
            matrix = block.matrices[linear]
            stored_after = self._output.storage.pack(
                tensor, matrix.result().to(torch.device("cpu"))
            )
            changed += [
                (name, v)
                for name, v in stored_after.items()
                if not torch.equal(v, stored_before[name])
            ]
            factors = [
                float(learned_scale.factor.abs().max()) for learned_scale in matrix.scales.values()
            ]
            metrics = {"tuning_change": max(factors)} if factors else {}
            if CODES in matrix.codes:
                changes = matrix.codes[CODES].snapshot()
                metrics["changed_codes"] = float(changes.count_nonzero()) / changes.numel()
            merge_records(record, {"metrics": {tensor.name: metrics}})
        unquantized = self._tensors.unquantized(block.decoder_block)
        for name, gains in block.gains.items():
            tensor = unquantized[name]
            (before_,) = self._output.read(tensor).values()
            value = self._output.storage.convert_unquantized(tensor, gains.stored().cpu())
            if not torch.equal(value, before_):
                changed.append((tensor.outputs[0].name, value))
                change = float(gains.factor.abs().max())
                merge_records(record, {"metrics": {tensor.name: {"tuning_change": change}}})
        return changed


def _report_tuning_progress(share: float, step: str) -> None:
    report_step(f"tuning, {step}", share=share)


def _missed_expert_events(block: TunedBlock) -> list[Event]:
    """Return an event listing the experts of a block that received no token during tuning, if any."""
    if block.experts is None or not (missed := block.experts.without_tokens):
        return []
    shown_experts = ", ".join(map(str, missed[:MAX_LISTED_EXPERTS]))
    ellipsis = ", ..." if len(missed) > MAX_LISTED_EXPERTS else ""
    detail = f"{len(missed)} of {len(block.experts.numbers)} experts got no token: {shown_experts}{ellipsis}"
    return [Event("expert-not-tuned", block.experts.name, detail)]
