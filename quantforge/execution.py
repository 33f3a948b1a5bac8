"""The run: a plan executed one part of the model at a time, straight into the preallocated files of a stage.

For methods that look at data a part is a decoder block: observe what its linears read, transform, round, write,
let the hidden states pass through the quantized block, forget it. Methods without data only read, round and write.
A part is done when its bytes are on the disk and the journal says so; the same command goes on after the last of
them, and the hidden states are brought there by running the finished parts again, from the bytes that were written.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge.block import BlockPart
from quantforge.checkpoint.reader import Checkpoint, scan_finite
from quantforge.checkpoint.safetensors import read_header, read_tensor, torch_dtype
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.events import Event, Policy
from quantforge.formats import ModuleLayout, format_of
from quantforge.observe import Accumulator
from quantforge.plan import Planned
from quantforge.planned import Action, TensorPlan
from quantforge.quantizers import Rounded, Statistic, Statistics, module_of, needs
from quantforge.recipe import Recipe
from quantforge.stream import ModelStream
from quantforge.workspace import Workspace

if TYPE_CHECKING:
    from quantforge_calibration.sampler import Sample

COPY_BYTES = 1 << 25  # kept tensors move in runs of rows of about this size


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run, without any influence on the result's bytes."""

    device: str = "cpu"
    threads: int | None = None
    activations: str = "memory"
    offline: bool = False
    overwrite: bool = False
    policy: Policy = field(default_factory=Policy)
    progress: Callable[[Progress], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Progress:
    """One finished part: for a progress line and the run's log."""

    part: str
    done: int
    total: int
    seconds: float
    error: float | None
    peak_bytes: int


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
    ) -> None:
        self.plan, self.matched = planned.plan, planned.matched
        self.checkpoint, self.recipe = checkpoint, recipe
        self.writer, self.work, self.settings = writer, work, settings
        self.form = format_of(self.plan.format)
        self.rounder = module_of(self.plan.rounder)
        self.by_name = {tensor.name: tensor for tensor in self.plan.tensors}
        self.total = self.matched.blocks + 1

    def execute(self, sample: Sample | None) -> None:
        """Do every part that is not done yet."""
        with torch.inference_mode():
            self._unit("outer", self._outer)
            if sample is None:
                for index in range(self.matched.blocks):
                    self._unit(f"block {index}", partial(self._plain_block, index))
                self._unit("head", self._plain_head)
            else:
                self._stream(sample)

    # ---- parts

    def _stream(self, sample: Sample) -> None:
        directory = self.work.directory if self.settings.activations == "disk" else None
        with ModelStream(
            self.checkpoint, self.matched, sample.ids, micro_batch=self.recipe.calibration.micro_batch,
            device=self.settings.device, activations=directory,
        ) as stream:  # fmt: skip
            for part in stream:
                unit = f"block {part.index}"
                if unit in self.work.done:
                    self._restore(part)
                else:
                    self._unit(unit, partial(self._block, part))
                part.advance()
            self._unit("head", lambda: self._head(stream))

    def _head(self, stream: ModelStream) -> dict[str, Any]:
        """Round a head that is to be quantized; its input is the output of the final norm."""
        if not self.plan.late:
            return {}
        wanted = needs(self.plan.rounder, importance=self.recipe.scales == "search")
        total = Accumulator(wanted)
        for states in stream.final_hidden():
            total.add(states.reshape(-1, states.shape[-1]))
        return self._round(
            {name: self._weight(self.by_name[name]) for name in self.plan.late}, total.result()
        )

    def _block(self, part: BlockPart) -> dict[str, Any]:
        names = {
            linear: self._stored(part, f"{linear}.weight") for linear in part.architecture.linears
        }
        targets = {
            linear: tensor
            for linear, name in names.items()
            if (tensor := self.by_name[name]).action is Action.QUANTIZE
        }
        schemes = {
            linear: tensor.scheme.weight for linear, tensor in targets.items() if tensor.scheme
        }
        observed = part.observe(self._wanted(part, schemes))
        record: dict[str, Any] = {"events": [], "figures": {}}
        for transform in self.plan.transforms:
            observed, events, figures = module_of(transform).apply(
                part, observed, schemes, self.recipe
            )
            record["events"] += [event.to_json() for event in events]
            record["transform"] = figures
        for shared in part.inputs:
            weights = {
                names[linear]: part.weight(linear) for linear in shared.linears if linear in targets
            }
            if weights:
                rounded = self._round(weights, observed.get(shared.key, Statistics()))
                record["events"] += rounded["events"]
                record["figures"] |= rounded["figures"]
                self._replace(
                    part, {linear: names[linear] for linear in shared.linears if linear in targets}
                )
        self._write_kept(part)
        return record

    def _plain_block(self, index: int) -> dict[str, Any]:
        record: dict[str, Any] = {"events": [], "figures": {}}
        for tensor in self.plan.tensors:
            if tensor.part != index:
                continue
            if tensor.action is Action.KEEP:
                self._copy(tensor)
            elif tensor.action is Action.QUANTIZE:
                done = self._round({tensor.name: self._weight(tensor)}, Statistics())
                record["events"] += done["events"]
                record["figures"] |= done["figures"]
        return record

    def _outer(self) -> dict[str, Any]:
        record: dict[str, Any] = {"events": [], "figures": {}}
        for tensor in self._outside():
            if tensor.action is Action.KEEP:
                self._copy(tensor)
            elif tensor.action is Action.QUANTIZE and tensor.name not in self.plan.late:
                done = self._round({tensor.name: self._weight(tensor)}, Statistics(), "rtn")
                record["events"] += done["events"]
                record["figures"] |= done["figures"]
        return record

    def _plain_head(self) -> dict[str, Any]:
        head = {name: self._weight(self.by_name[name]) for name in self.plan.late}
        return self._round(head, Statistics()) if head else {}

    # ---- one step each

    def _unit(self, unit: str, work: Callable[[], dict[str, Any]]) -> None:
        if unit in self.work.done:
            return
        start = time.monotonic()
        record = work()
        self.writer.sync()
        self.work.commit(unit, record)
        self.settings.policy.check(self.events())
        errors = [
            figures["error"] for figures in record.get("figures", {}).values() if "error" in figures
        ]
        self.settings.progress(
            Progress(
                unit,
                len(self.work.done),
                self.total + 1,
                time.monotonic() - start,
                sum(errors) / len(errors) if errors else None,
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            )
        )

    def _round(
        self, weights: Mapping[str, Tensor], statistics: Statistics, rounder: str | None = None
    ) -> dict[str, Any]:
        schemes = {name: scheme.weight for name in weights if (scheme := self.by_name[name].scheme)}
        module = self.rounder if rounder is None else module_of(rounder)
        rounded: dict[str, Rounded] = module.round_shared(weights, statistics, schemes, self.recipe)
        record: dict[str, Any] = {"events": [], "figures": {}}
        for name, result in rounded.items():
            packed = self.form.pack(name.removesuffix(".weight"), result.tensor)
            for stored in self.by_name[name].stored:
                self.writer.write(stored.name, packed[stored.name])
            record["events"] += [event.to_json() for event in result.events]
            record["figures"][name] = dict(result.figures)
        return record

    def _replace(self, part: BlockPart, names: Mapping[str, str]) -> None:
        """Put what was written into the block, so that the hidden states see what an engine computes."""
        for linear, name in names.items():
            part.set_weight(linear, self._written(self.by_name[name]))

    def _restore(self, part: BlockPart) -> None:
        names = {
            linear: self._stored(part, f"{linear}.weight") for linear in part.architecture.linears
        }
        quantized = {k: v for k, v in names.items() if self.by_name[v].action is Action.QUANTIZE}
        self._replace(part, quantized)
        for local in part.parameters():
            tensor = self.by_name[self._stored(part, local)]
            if tensor.action is Action.KEEP:
                part.set_parameter(local, self._read_written(tensor.name).float())

    def _write_kept(self, part: BlockPart) -> None:
        for local in part.parameters():
            tensor = self.by_name[self._stored(part, local)]
            if tensor.action is not Action.KEEP:
                continue
            if not self.plan.transforms:
                self._copy(tensor)
                continue
            value = part.parameter(local).to(torch_dtype(tensor.dtype))
            scan_finite(tensor.name, value)
            self.writer.write(tensor.name, value)
            part.set_parameter(local, value.float())

    def _copy(self, tensor: TensorPlan) -> None:
        rows = tensor.shape[0] if len(tensor.shape) == 2 else 0
        step = max(1, COPY_BYTES * rows // max(1, tensor.stored_bytes)) if rows else 0
        if not rows or step >= rows:
            value = self.checkpoint.read(tensor.name)
            scan_finite(tensor.name, value)
            self.writer.write(tensor.name, value)
            return
        for first in range(0, rows, step):
            run = self.checkpoint.read_rows(tensor.name, first, min(first + step, rows))
            scan_finite(tensor.name, run)
            self.writer.write_rows(tensor.name, first, run)

    def _weight(self, tensor: TensorPlan) -> Tensor:
        """The source weight as float32 ``[out_features, in_features]``."""
        source = self.checkpoint.read(self._source_of(tensor))
        scan_finite(tensor.name, source)
        weight = source.to(self.settings.device, torch.float32)
        return weight.T.contiguous() if tensor.transposed else weight

    def _source_of(self, tensor: TensorPlan) -> str:
        """A head that is untied from now on is read from the embedding."""
        if tensor.name in self.checkpoint.entries:
            return tensor.name
        architecture = self.matched.architecture
        assert architecture is not None
        return self.matched.by_name[f"{architecture.embedding}.weight"].stored.name

    def _written(self, tensor: TensorPlan) -> Tensor:
        assert tensor.scheme is not None
        names = tuple(item.name for item in tensor.stored)
        native = replace(
            tensor.scheme, weight=self.form.native(tensor.scheme.weight, tensor.matrix)
        )
        module = tensor.name.removesuffix(".weight")
        layout = ModuleLayout(module, native, tensor.matrix, names)
        stored = {name: self._read_written(name) for name in names}
        return self.form.unpack(layout, stored).decode().to(self.settings.device)

    def _read_written(self, name: str) -> Tensor:
        return read_tensor(read_header(self.writer.file_of(name)).entries[name])

    # ---- look-ups

    def _wanted(
        self, part: BlockPart, schemes: Mapping[str, Any]
    ) -> dict[str, frozenset[Statistic]]:
        wanted = needs(self.plan.method, importance=self.recipe.scales == "search")
        return {
            shared.key: wanted
            for shared in part.inputs
            if any(linear in schemes for linear in shared.linears)
        }

    def _stored(self, part: BlockPart, local: str) -> str:
        return part.stored_name(local)

    def _outside(self) -> Sequence[TensorPlan]:
        return [tensor for tensor in self.plan.tensors if tensor.part < 0]

    def events(self) -> list[Event]:
        """Every event so far, in the order of the parts."""
        records = [self.work.done[unit] for unit in self._units() if unit in self.work.done]
        return [Event(**event) for record in records for event in record.get("events", [])]

    def figures(self) -> dict[str, dict[str, float]]:
        """Figures of every rounded tensor, by name."""
        records = [self.work.done[unit] for unit in self._units() if unit in self.work.done]
        return {
            name: values for record in records for name, values in record.get("figures", {}).items()
        }

    def _units(self) -> Iterator[str]:
        yield "outer"
        for index in range(self.matched.blocks):
            yield f"block {index}"
        yield "head"


def log_path(out: Path) -> Path:
    """The run's log, beside the output: times and peaks, which must not be inside of it."""
    return out.parent / f"{out.name}.log.jsonl"
