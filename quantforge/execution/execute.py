"""The run: a plan executed one part of the model at a time, straight into the preallocated files of a stage.

For methods that look at data a part is a decoder block: observe what its linears read while the hidden states pass,
transform, round, write, forget it. Methods without data only read, round and write. The next block reads what the
source's block computes; with ``propagate = "quantized"`` it reads what the quantized one does, in a second pass.
A part is done when its bytes are on the disk and the journal says so, with their checksums; the same command goes on
after the last of them, and the hidden states are brought there by running the finished parts again.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.checkpoint.reader import Checkpoint, scan_finite
from quantforge.checkpoint.safetensors import read_rows, read_tensor, torch_dtype
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import IntegrityError, RefusedError
from quantforge.events import Event
from quantforge.execution.journal import Workspace
from quantforge.execution.quantized_inputs import (
    fitted_with,
    joined,
    observed_again,
    outliers,
    with_input,
    without_outliers,
)
from quantforge.execution.record import Record, checksum, events_of, figures_of, merge, runs
from quantforge.execution.row_wise import round_rows
from quantforge.formats.storage import storage_of
from quantforge.model.observe import Accumulator
from quantforge.model.statistics import Statistics, of_inputs
from quantforge.numerics.allocator import trim
from quantforge.packers.input_rounding import simulate
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.planner import Planned
from quantforge.plans import Action, TensorPlan
from quantforge.quantizers import needs, rounder_of, transform_of
from quantforge.recipe import Recipe
from quantforge.runtime.kv_cache import CachePeaks, listening
from quantforge.settings import Progress, Settings, workers_of

if TYPE_CHECKING:
    from quantforge.model.block import BlockPart
    from quantforge.model.stream import ModelStream
    from quantforge_calibration.sampler import Sample


class Run:
    """One execution of a plan into the files of a writer, journalled in a workspace."""

    def __init__(
        self,
        planned: Planned,
        checkpoint: Checkpoint,
        recipe: Recipe,
        writer: WeightsWriter,
        work: Workspace,
        settings: Settings,
        importance: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Prepare a run; ``importance``: mean squares of columns that are known without calibration, by tensor."""
        self.importance = importance or {}
        self.plan, self.matched = planned.plan, planned.matched
        self.checkpoint, self.recipe = checkpoint, recipe
        self.writer, self.work, self.settings = writer, work, settings
        self.storage = storage_of(self.plan.format)
        self.by_name = {tensor.name: tensor for tensor in self.plan.tensors}
        self.blocks = [f"block {index}" for index in range(self.matched.blocks)]
        self.from_source = recipe.calibration.propagate == "source"
        self._sums: dict[str, int] = {}  # of what the current unit has written

    def execute(self, sample: Sample | None) -> None:
        """Do every part that is not done yet.

        Raises:
            InputError: a weight or an activation is not finite.
            IntegrityError: the source changed meanwhile, or a finished part is not as it was written.
            RefusedError: more events than the policy allows.
        """
        self._verify()
        with torch.inference_mode():
            self._unit("outer", self._outer)
            if sample is None:
                for index, unit in enumerate(self.blocks):
                    self._unit(unit, partial(self._plain_block, index))
                self._unit("head", partial(self._head, Statistics()))
            else:
                self._stream(sample)

    # ---- parts

    def _stream(self, sample: Sample) -> None:
        from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

        late = bool(self.plan.late) and "head" not in self.work.done
        missing = [i for i, unit in enumerate(self.blocks) if unit not in self.work.done]
        last = len(self.blocks) if late else max(missing, default=-1)
        if last >= 0:
            directory = self.work.directory if self.settings.activations == "disk" else None
            with ModelStream(
                self.checkpoint, self.matched, sample.ids, micro_batch=self.recipe.calibration.micro_batch,
                device=self.settings.device, activations=directory, precision=self.recipe.calibration.precision,
            ) as stream:  # fmt: skip
                for part in stream:
                    if self.blocks[part.index] in self.work.done and not self.from_source:
                        self._restore(part)
                    ends = part.index == last  # nobody reads what it computes
                    self._unit(self.blocks[part.index], partial(self._block, part, ends=ends))
                    if ends:
                        break
                    if not part.advanced:
                        part.advance()
                if late:
                    self._unit("head", lambda: self._head(self._observe_head(stream)))
        self._unit("head", dict)

    def _observe_head(self, stream: ModelStream) -> Statistics:
        """Observe what a quantized head reads: the output of the final norm."""
        total = Accumulator(needs(self.plan.rounder, importance=self.recipe.rounding.weighs))
        for states in stream.final_hidden():
            total.add(states.reshape(-1, states.shape[-1]))
        return total.result()

    def _head(self, statistics: Statistics) -> Record:
        late = {name: self._weight(self.by_name[name]) for name in self.plan.late}
        for name in late.keys() & self.importance.keys():
            statistics = Statistics(tokens=1, squares=self.importance[name])
        return self._round(late, statistics) if late else {}

    def _block(self, part: BlockPart, *, ends: bool) -> Record:
        targets = self._targets(part)
        schemes = {key: tensor.scheme.weight for key, tensor in targets.items() if tensor.scheme}
        layers = {key: tensor.scheme for key, tensor in targets.items() if tensor.scheme}
        wanted = needs(self.plan.method, importance=self.recipe.rounding.weighs)
        inputs = [tensor.scheme.input for tensor in targets.values() if tensor.scheme]
        scales = [tensor for tensor in self.plan.tensors
                  if tensor.part == part.index and tensor.action is Action.MEASURE]  # fmt: skip
        cache = CachePeaks() if scales else None
        again = observed_again(inputs, self.plan.transforms)
        again = again or (cache is not None and bool(self.plan.transforms))
        read = [shared for shared in part.inputs if any(name in targets for name in shared.linears)]
        first = None if again else cache
        with listening(part.module, first):
            observed = part.observe(
                {
                    shared.key: wanted | (frozenset() if again else of_inputs(inputs))
                    for shared in read
                },
                advance=self.from_source and not ends and not again,
                keep=self.recipe.awq.rows if self.plan.transforms else 0,
                whole=first is not None,
            )
        trim()
        record: Record = {}
        for transform in self.plan.transforms:
            observed, events, figures = transform_of(transform).apply(
                part, observed, schemes, self.recipe.rounding, layers
            )
            merge(record, {"events": [event.to_json() for event in events], "transform": figures})
        if again:  # ranges of the inputs, and the cache, as the transforms left them
            with listening(part.module, cache):
                seen = part.observe(
                    {shared.key: of_inputs(inputs) for shared in read},
                    advance=self.from_source and not ends,
                    whole=cache is not None,
                )
            observed = {key: joined(found, seen.get(key)) for key, found in observed.items()}
        for shared in read:
            chosen = [name for name in shared.linears if name in targets]
            weights = {targets[name].name: part.weight(name) for name in chosen}
            merge(record, self._round(weights, observed.get(shared.key, Statistics())))
            if not self.from_source:
                for name in chosen:
                    self._put_back(part, name, targets[name])
            trim()
        self._write_kept(part)
        if cache is not None:
            for tensor, value in zip(scales, cache.scales(self.recipe.kv_cache), strict=True):
                self._write(tensor.name, value)
        return record

    def _plain_block(self, index: int) -> Record:
        return self._plain(tensor for tensor in self.plan.tensors if tensor.part == index)

    def _outer(self) -> Record:
        return self._plain(
            tensor
            for tensor in self.plan.tensors
            if tensor.part < 0 and tensor.name not in self.plan.late
        )

    def _plain(self, tensors: Iterable[TensorPlan]) -> Record:
        """Copy what is kept and round the rest to nearest, without statistics."""
        record: Record = {}
        for tensor in tensors:
            if tensor.action is Action.KEEP:
                self._copy(tensor)
            elif tensor.by_rows and tensor.action is Action.QUANTIZE:
                merge(record, self._round_rows(tensor))
            elif tensor.action is Action.QUANTIZE and tensor.name not in record.get("figures", {}):
                weights = {one.name: self._weight(one) for one in fitted_with(tensor, self.plan)}
                known = self.importance.get(tensor.name)
                statistics = Statistics(tokens=int(known is not None), squares=known)
                merge(record, self._round(weights, statistics, "rtn"))
        return record

    # ---- one step each

    def _unit(self, unit: str, work: Callable[[], Record]) -> None:
        if unit in self.work.done:
            return
        start = time.monotonic()
        self._sums = {}
        record = work()
        self.writer.sync()
        self.work.commit(unit, {**record, "sums": self._sums})
        figures = record.get("figures", {}).values()
        errors = [values["error"] for values in figures if "error" in values]
        self.settings.progress(
            Progress(
                part=unit,
                done=len(self.work.done),
                total=len(self.blocks) + 2,
                seconds=time.monotonic() - start,
                error=sum(errors) / len(errors) if errors else None,
                peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            )
        )
        self.settings.policy.check(self.events())

    def _round(
        self, weights: Mapping[str, Tensor], statistics: Statistics, rounder: str | None = None
    ) -> Record:
        """Round the matrices of one shared input, and write them."""
        schemes = {name: scheme.weight for name in weights if (scheme := self.by_name[name].scheme)}
        method = rounder_of(rounder or self.plan.rounder)
        statistics = without_outliers(statistics, self.by_name[next(iter(weights))])
        rounded = method.round_shared(weights, statistics, schemes, self.recipe.rounding)
        record: Record = {}
        for name, result in rounded.items():
            try:
                plan, weight = self.by_name[name], weights[name]
                tensor = with_input(result.tensor, plan, weight, statistics, self.recipe)
                packed = self.storage.pack(plan, tensor)
            except RefusedError as error:  # a value that the files cannot spell
                raise RefusedError(f"{name}: {error.message}", error.hint, tensor=name) from error
            for stored, value in packed.items():
                self._write(stored, value)
            counted, left = outliers(plan, statistics)
            events = [event.to_json() for event in (*result.events, *left)]
            merge(record, {"events": events, "figures": {name: {**result.figures, **counted}}})
        return record

    def _round_rows(self, tensor: TensorPlan) -> Record:
        """Round a matrix plainly, in runs of rows."""
        (stored,) = tensor.stored
        source = self._source_of(tensor)

        def read(first: int, last: int) -> Tensor:
            value = self.checkpoint.read_rows(source, first, last)
            scan_finite(source, value)
            return value.to(self.settings.device, torch.float32)

        def write(first: int, rounded: QuantizedTensor) -> None:
            packed = self.storage.pack(tensor, rounded)[stored.name]
            self._sums[stored.name] = checksum(packed, self._sums.get(stored.name, 0))
            self.writer.write_rows(stored.name, first, packed)

        known = self.importance.get(tensor.name)
        return round_rows(tensor, known, self.recipe, read, write, workers_of(self.settings))

    def _write(self, name: str, value: Tensor) -> None:
        self._sums[name] = checksum(value, 0)
        self.writer.write(name, value)

    def _write_kept(self, part: BlockPart) -> None:
        """Write what is not quantized: as the source has it, or as the transforms left it."""
        for local in part.parameters():
            tensor = self.by_name[part.stored_name(local)]
            if tensor.action is not Action.KEEP:
                continue
            if not self.plan.transforms:
                self._copy(tensor)
                continue
            value = part.parameter(local).to(torch_dtype(tensor.dtype))
            scan_finite(tensor.name, value)
            (stored,) = tensor.stored
            self._write(stored.name, self.storage.keep(tensor, value))
            part.set_parameter(local, value.float())

    def _copy(self, tensor: TensorPlan) -> None:
        source = self._source_of(tensor)
        (stored,) = tensor.stored
        whole = not stored.shape or self.storage.whole(tensor)
        for first, last in [(0, stored.shape[0] if stored.shape else 0)] if whole else runs(stored):
            value = (
                self.checkpoint.read(source)
                if whole
                else self.checkpoint.read_rows(source, first, last)
            )
            scan_finite(source, value)
            value = self.storage.keep(tensor, value)
            self._sums[stored.name] = checksum(value, self._sums.get(stored.name, 0))
            if stored.shape:
                self.writer.write_rows(stored.name, first, value)
            else:
                self.writer.write(stored.name, value)

    def _weight(self, tensor: TensorPlan) -> Tensor:
        """Read the source weight as float32 ``[out_features, in_features]``."""
        name = self._source_of(tensor)
        source = self.checkpoint.read(name)
        scan_finite(name, source)
        weight = source.to(self.settings.device, torch.float32)
        return weight.T.contiguous() if tensor.transposed else weight

    def _source_of(self, tensor: TensorPlan) -> str:
        """Return the name of a tensor in the source; a head that is untied from now on is read from the embedding."""
        if tensor.name in self.checkpoint.entries:
            return tensor.name
        architecture = self.matched.architecture
        assert architecture is not None  # only declared models have tied heads to untie
        return self.matched.by_name[f"{architecture.embedding}.weight"].stored.name

    # ---- what was written before

    def _targets(self, part: BlockPart) -> dict[str, TensorPlan]:
        """Return the linears of a block that are quantized, by their names inside of it."""
        plans = {
            name: self.by_name[part.stored_name(f"{name}.weight")]
            for name in part.architecture.linears
        }
        return {name: plan for name, plan in plans.items() if plan.action is Action.QUANTIZE}

    def _restore(self, part: BlockPart) -> None:
        """Bring a block back to what it was when it was done, so that the hidden states see the same."""
        for name, tensor in self._targets(part).items():
            self._put_back(part, name, tensor)
        for local in part.parameters():
            tensor = self.by_name[part.stored_name(local)]
            if tensor.action is Action.KEEP:
                (stored,) = tensor.stored
                value = self.storage.kept(tensor, self._read_written(stored.name))
                part.set_parameter(local, value.float())

    def _put_back(self, part: BlockPart, name: str, tensor: TensorPlan) -> None:
        """Let a block compute what an engine will: with the bytes on the disk, and inputs rounded as they will be."""
        stored = {item.name: self._read_written(item.name) for item in tensor.stored}
        written = self.storage.unpack(tensor, stored)
        part.set_weight(name, written.decode().to(self.settings.device))
        if tensor.scheme is not None and tensor.scheme.input is not None and not self.from_source:
            scale, kept = written.parameters.get("input_scale"), written.outlier_columns
            part.round_inputs(
                name,
                partial(simulate, activation=tensor.scheme.input, scale=scale, kept=kept),
            )

    def _read_written(self, name: str) -> Tensor:
        return read_tensor(self.writer.entry(name))

    def _verify(self) -> None:
        """Check the finished parts of an interrupted run against their checksums."""
        for record in self.work.done.values():
            for name, expected in record["sums"].items():
                entry = self.writer.entry(name)
                found = 0
                for first, last in runs(entry.stored()):
                    value = read_rows(entry, first, last) if entry.shape else read_tensor(entry)
                    found = checksum(value, found)
                if found != expected:
                    raise IntegrityError(
                        f"{entry.file}: {name} is not what the interrupted run had written",
                        f"start afresh: rm -r {self.work.directory}",
                        file=str(entry.file),
                        tensor=name,
                    )

    # ---- what there is to tell

    def events(self) -> list[Event]:
        """Return every event so far, in the order of the parts."""
        return events_of(self._records())

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the figures of every rounded tensor, by name."""
        return figures_of(self._records())

    def _records(self) -> Iterator[Record]:
        for unit in ("outer", *self.blocks, "head"):
            if unit in self.work.done:
                yield self.work.done[unit]
