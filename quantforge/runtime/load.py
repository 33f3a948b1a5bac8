"""One loader for every format: a model that computes, with its quantized weights still packed.

The layouts that a format finds in the headers are replaced by the weights they stand for, so that
a quantized checkpoint has the same tensors as its source and is matched by the same declarations:
each tensor exactly once, or refused. The skeleton is then filled tensor by tensor; a linear with
codes becomes a `PackedLinear`, everything else is read as it is. Nothing is ever initialised at
random: a parameter that no tensor fills is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched, Role
from quantforge.checkpoint.reader import Checkpoint, scan_finite
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.formats import Format, ModuleLayout, detect, kv_scales
from quantforge.formats.engine_families import computes_itself
from quantforge.formats.matching import match_quantized
from quantforge.formats.opening import open_model
from quantforge.model.skeleton import build
from quantforge.plans import StoredTensor
from quantforge.runtime.cache import LayerScales
from quantforge.runtime.kv_cache import RoundedCache, listen, read_scales
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.room import check_weights, free_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DENSE = "dense"
PACKING = 1.1  # most that kernels add to the bytes of the files


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, and what is known of it.

    Attributes:
        model: a causal language model of transformers, in evaluation mode.
        path: its directory (which also holds the tokenizer).
        format: key of the format.
        scheme: the schemes with their shares of the quantized weights, or the stored type.
        bits_per_weight: stored bits per quantized weight, their scales and zeros included; of all
            weights when none is quantized.
        bits_per_weight_total: stored bits per weight of the whole model.
        weight_bytes: stored bytes of the whole model, without what is stored twice.
        read_bytes: bytes that are held in memory and read for every token.
        kernels: share of the weights of linear layers that each kernel multiplies.
        config: ``config.json``.
        dtype: of activations.
        kv_cache: how keys and values are stored, one of `kv_scales.KINDS`: the model computes with them rounded so.
        kv_scales: by layer, the scales of keys and values.
        events: layers that are not multiplied by the kernel meant for them.
    """

    model: PreTrainedModel
    path: Path
    format: str
    scheme: str
    bits_per_weight: float
    bits_per_weight_total: float
    weight_bytes: int
    read_bytes: int
    kernels: Mapping[str, float]
    config: Mapping[str, Any]
    dtype: torch.dtype
    kv_cache: str = kv_scales.NONE
    kv_scales: LayerScales | None = None
    events: tuple[Event, ...] = ()


@torch.no_grad()
def load(path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Loaded:
    """Load a model directory of any format that is read.

    Args:
        path: the directory.
        device: where it computes.
        dtype: of activations, and of the weights that are not quantized.

    Raises:
        InputError: missing, left-over, mis-shaped or not finite tensors, or a configuration that
            cannot be built.
        UsageError: a quantization method that no format reads.
        ResourceError: a GPU has no room for it.
    """
    checkpoint = open_model(path)
    form = detect(checkpoint.config)
    stored = {name: entry.stored() for name, entry in checkpoint.entries.items()}
    layouts = {item.module: item for item in form.layouts(checkpoint.config, stored)}
    matched = match_quantized(checkpoint, layouts, stored)
    family = computes_itself(matched.model_type, str(checkpoint.config.get("model_type")))
    if layouts and family:
        raise _not_run(path, family, "its blocks read the weights of their linears themselves")
    bits, total, size = _sizes(matched, layouts, stored)
    needed, count = _held(matched, layouts, stored, dtype)
    check_weights(needed, count, free_bytes(torch.device(device)))
    filler = _Filler(checkpoint, form, layouts, torch.device(device), dtype)
    model = filler.fill(build(checkpoint.config), matched)
    if model.base_model is model:  # llama4
        raise _not_run(path, matched.model_type, "its class does not say which part is the decoder")
    cache = kv_scales.found(checkpoint.config, stored)
    scales = read_scales(checkpoint, cache, torch.device(device))
    for block, pair in scales.items():
        listen(
            model.get_submodule(f"{matched.block_name(block)}.{kv_scales.ATTENTION}"),
            RoundedCache(*pair),
        )
    return Loaded(
        model=model,
        path=path,
        format=form.KEY,
        scheme=_schemes(layouts, checkpoint.dtype),
        bits_per_weight=bits,
        bits_per_weight_total=total,
        weight_bytes=size,
        read_bytes=_read_bytes(model),
        kernels=_kernels(model),
        config=checkpoint.config,
        dtype=dtype,
        kv_cache=cache.kind,
        kv_scales=scales or None,
        events=tuple(filler.events),
    )


class _NoPlaceError(InputError):
    """A stored tensor is no parameter of the running model."""


class _UnfilledError(InputError):
    """A parameter of the running model is in no file."""


def _not_run(path: Path, family: str, why: str) -> RefusedError:
    return RefusedError(
        f"{path}: models of {family} are rounded and written, but not run here: {why}",
        "measure it in an engine that loads it (see `quantforge plan`); verify --no-forward compares its numbers",
    )


class _Filler:
    """Filler of a skeleton from a checkpoint, one tensor at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        form: Format,
        layouts: Mapping[str, ModuleLayout],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._checkpoint = checkpoint
        self._form = form
        self._layouts = layouts
        self._device = device
        self._dtype = dtype
        self.events: list[Event] = []

    def fill(self, model: PreTrainedModel, matched: Matched) -> PreTrainedModel:
        """Fill all parameters; buffers keep their type and move to the device.

        Raises:
            RefusedError: a family that nobody described has other names in files than when it runs.
            InputError: the checkpoint does not fit its configuration.
        """
        try:
            return self._filled(model, matched)
        except (_NoPlaceError, _UnfilledError) as error:
            if matched.architecture is not None:
                raise
            raise _not_run(self._checkpoint.path, matched.model_type, error.message) from error

    def _filled(self, model: PreTrainedModel, matched: Matched) -> PreTrainedModel:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        wanted = [tensor for tensor in matched.tensors if tensor.role is not Role.FOREIGN]
        layouts = [self._layouts.get(_module(tensor.stored.name)) for tensor in wanted]
        for tensor, layout in zip(wanted, layouts, strict=True):
            if layout is None:
                self._fill_plain(model, tensor.name, tensor.stored.name)
        # After the plain tensors, so that a packed linear finds its bias.
        for tensor, layout in zip(wanted, layouts, strict=True):
            if layout is not None:
                self._fill_packed(model, _module(tensor.name), layout)
        _tie(model)
        _check_filled(model, self._checkpoint.path)
        return model

    def _read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name)
        scan_finite(name, tensor, self._checkpoint.entries[name].file)
        return tensor

    def _fill_plain(self, model: nn.Module, name: str, stored: str) -> None:
        module_name, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(module_name)
            shape = getattr(module, leaf).shape
        except AttributeError:
            raise self._no_place(stored) from None
        value = self._read(stored).to(self._device, self._dtype)
        if value.shape != shape:
            raise InputError(
                f"{self._checkpoint.path}: tensor {stored!r} is {list(value.shape)}, "
                f"config.json asks for {list(shape)}",
                "configuration and weights are not of one model",
                tensor=stored,
            )
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))

    def _no_place(self, stored: str) -> InputError:
        return _NoPlaceError(
            f"{self._checkpoint.path}: tensor {stored!r} has no place in the model",
            "a model of this model_type has no such parameter",
            tensor=stored,
        )

    def _fill_packed(self, model: nn.Module, name: str, layout: ModuleLayout) -> None:
        stored = {part: self._read(part) for part in layout.stored}
        tensor = self._form.unpack(layout, stored)
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise self._no_place(f"{layout.module}.weight") from None
        if isinstance(module, nn.Embedding):  # rows are looked up, not multiplied
            weight = tensor.decode(self._dtype).to(self._device)
            module.weight = nn.Parameter(weight, requires_grad=False)
            return
        bias = getattr(module, "bias", None)
        packed = PackedLinear(tensor, bias, self._dtype, self._device)
        if packed.failure is not None:
            self.events.append(Event("kernel-fallback", name, packed.failure))
        model.set_submodule(name, packed)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _tie(model: PreTrainedModel) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and not isinstance(head, PackedLinear):
        head.weight = embedding.weight


def _check_filled(model: PreTrainedModel, path: Path) -> None:
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    if missing:
        raise _UnfilledError(
            f"{path}: {len(missing)} parameter(s) are in no file, first: {', '.join(missing[:5])}",
            "a complete checkpoint holds every tensor; fetch the model again",
        )


def _sizes(
    matched: Matched, layouts: Mapping[str, ModuleLayout], stored: Mapping[str, StoredTensor]
) -> tuple[float, float, int]:
    """Return bits per quantized weight, bits per weight, and bytes, as stored."""
    weights = packed_weights = size = packed_size = 0
    for tensor in matched.tensors:
        count = math.prod(tensor.stored.shape)
        layout = layouts.get(_module(tensor.stored.name))
        parts = layout.stored if layout else (tensor.stored.name,)
        nbytes = sum(stored[part].nbytes for part in parts)
        weights, size = weights + count, size + nbytes
        if layout:
            packed_weights, packed_size = packed_weights + count, packed_size + nbytes
    total = 8 * size / weights
    return (8 * packed_size / packed_weights if packed_weights else total), total, size


def _held(
    matched: Matched,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Return the bytes that the model will hold at most, and its weights."""
    needed = weights = 0
    for tensor in matched.tensors:
        count = math.prod(tensor.stored.shape)
        layout = layouts.get(_module(tensor.stored.name))
        weights += count
        if layout is not None and tensor.role is not Role.EMBEDDING:
            needed += int(PACKING * sum(stored[part].nbytes for part in layout.stored))
        elif tensor.role is not Role.FOREIGN:
            needed += count * dtype.itemsize
    return needed, weights


def _schemes(layouts: Mapping[str, ModuleLayout], dtype: str) -> str:
    """Name the scheme of all quantized linears, or each with its share, largest first."""
    counts: Counter[str] = Counter()
    for layout in layouts.values():
        counts[str(layout.scheme)] += math.prod(layout.shape)
    if len(counts) < 2:
        return next(iter(counts), dtype.lower())
    total = counts.total()
    return ", ".join(f"{name} {count / total:.0%}" for name, count in counts.most_common())


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield the kernel and the number of weights of every linear layer, the head included."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            yield module.kernel, module.weights
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield DENSE, module.weight.numel()


def _kernels(model: PreTrainedModel) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for kernel, weights in _linears(model):
        counts[kernel] += weights
    return {name: count / counts.total() for name, count in counts.most_common()}


def _read_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all weights, without an embedding of which a token reads one row."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    held: int = sum(value.nbytes for value in model.parameters())
    table: Tensor = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    unread = 0 if getattr(head, "weight", None) is table else table.nbytes
    return held - unread + sum(module.weight_bytes for module in packed)
