"""Load a model of any supported format for inference, keeping quantized weights packed.

The quantized layouts found in the headers are replaced by the weights they represent, so that a quantized checkpoint
has the same tensors as its source and is matched by the same declarations: every tensor exactly once, or an error.
`quantforge.model.weight_mapping` maps stored tensors to parameters of the model skeleton. Plain tensors are filled
first, so that a packed linear finds its bias in the module that it replaces. Nothing is initialized randomly: a
parameter without a tensor is an error.

A quantized linear becomes a `PackedLinear` if the model has a plain linear in its place. If a class overrides the
forward of its linears, or a block reads the weight of a linear directly (as state-space mixers do, which is detected in
the source code of the class), the matrix is decoded to a plain parameter, and an event reports its share of the
weights. For mixtures of experts see `packed_experts`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture
from quantforge.architectures.expert_sets import has_single_experts
from quantforge.architectures.match import ModelLayout, match_tensors
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.files.finite_values import check_finite
from quantforge.files.reader import Checkpoint
from quantforge.formats import Format, ModuleLayout, detect_format, kv_scales
from quantforge.formats.decoded import PRECISION
from quantforge.formats.match_quantized import drop_tied_copy, match_headers
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.model.model_class import resolve_model_type
from quantforge.model.model_parts import find_base_model
from quantforge.model.skeleton import build_skeleton
from quantforge.model.weight_mapping import WeightMapping
from quantforge.packers.lattices import LATTICES
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.cache import LayerScales
from quantforge.runtime.cache_scales import RoundedCache, attach_cache, read_cache_scales
from quantforge.runtime.linear import UNROUNDED_BITS, PackedLinear, round_inputs
from quantforge.runtime.memory import check_weights_fit, free_bytes
from quantforge.runtime.model_sizes import (
    bytes_per_token,
    held_bytes,
    kernel_shares,
    max_held_bytes,
    scheme_shares,
    stored_sizes,
)
from quantforge.runtime.packed_experts import ExpertWeights, decode_plain, fill_experts
from quantforge.runtime.split_model import find_shards, wrap_split_linears
from quantforge.runtime.tensor_parallel import TensorParallelRank, WeightShard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.plans import StoredTensor

NO_LATTICE_KERNEL = "no kernel multiplies the codes of a lattice"
CUSTOM_FORWARD = "their class multiplies in its own way"
WEIGHT_READ_DIRECTLY = "their block reads the weight itself"
CONVERTED_LAYOUT = "the running model holds them in another form"
_WEIGHT_ACCESS = re.compile(r"\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model with its sizes, configuration and load events.

    Attributes:
        model: a causal language model of transformers, in evaluation mode.
        path: model directory or GGUF file (which also holds the tokenizer).
        format: key of the format.
        scheme: quantization schemes with their shares of the quantized weights, or the stored type.
        bits_per_weight: stored bits per quantized weight, including scales and zeros; of all weights if none is
            quantized.
        bits_per_weight_total: stored bits per weight of the whole model.
        weight_bytes: stored bytes of the whole model, without duplicates.
        held_bytes: bytes of the weights in memory.
        read_bytes: bytes of weights that are read for one token; in a mixture, only the experts it is routed to.
        kernels: share of the linear weights that each kernel multiplies.
        config: contents of ``config.json``.
        dtype: type of the activations.
        kv_cache: storage of keys and values in the checkpoint, one of `kv_scales.KINDS`; the model rounds them alike.
        kv_scales: scales of keys and values, by layer.
        events: layers that do not use their preferred kernel; model types that transformers does not know.
        names: mapping between stored tensors and the parameters of ``model``.
    """

    model: PreTrainedModel
    path: Path
    format: str
    scheme: str
    bits_per_weight: float
    bits_per_weight_total: float
    weight_bytes: int
    held_bytes: int
    read_bytes: int
    kernels: Mapping[str, float]
    config: Mapping[str, Any]
    dtype: torch.dtype
    kv_cache: str = kv_scales.NONE
    kv_scales: LayerScales | None = None
    events: tuple[Event, ...] = ()
    names: WeightMapping | None = None


@torch.no_grad()
def load(
    source: Path | Checkpoint,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    input_bits: int = UNROUNDED_BITS,
    share: TensorParallelRank | None = None,
) -> Loaded:
    """Load a model of any supported format.

    Args:
        source: a model directory or GGUF file, or a checkpoint opened from it.
        device: device of the model.
        dtype: type of activations and unquantized weights.
        input_bits: bits to which packed layers round their activations; 16 disables rounding.
        share: tensor-parallel rank of this process; the model then runs in `Decoder` only, in all processes at once.

    Raises:
        InputError: tensors are missing, left over, misshapen or not finite; the format is unknown; or the model cannot
            be built.
        RefusedError: the model cannot be run here, or cannot be split over processes.
        ResourceError: the model does not fit into GPU memory.
    """
    checkpoint = decode_if_unsupported(open_model(source)) if isinstance(source, Path) else source
    model_format = detect_format(checkpoint.config)
    stored = checkpoint.stored_tensors()
    layouts = {item.module: item for item in model_format.find_layouts(checkpoint.config, stored)}
    model_layout = drop_tied_copy(match_headers(checkpoint, layouts, stored), checkpoint)
    bits, total, stored_bytes = _sizes(checkpoint, model_layout, layouts, stored)
    model = build_skeleton(checkpoint.config)
    mapping = _create_mapping(model, model_layout, checkpoint.config)
    decoded = weights_to_decode(model, mapping, layouts, model_layout.architecture)
    torch_device = torch.device(device)
    shards = {} if share is None else find_shards(model, model_layout, layouts, share)
    check_weights_fit(
        *max_held_bytes(model_layout, layouts, stored, dtype, decoded, shards),
        free_bytes(torch_device),
    )
    filler = SkeletonFiller(checkpoint, model_format, layouts, torch_device, dtype, shards)
    filler.fill(model, mapping, decoded)
    if input_bits != UNROUNDED_BITS:
        filler.events += round_inputs(model, input_bits)
    cache = kv_scales.find_scales(checkpoint.config, stored)
    scales = read_cache_scales(checkpoint, cache, torch_device, share) if cache.names else None
    if scales is not None:
        _round_cache(model, model_layout, scales)
    return Loaded(
        model=model,
        path=checkpoint.path,
        format=model_format.KEY,
        scheme=checkpoint.source_notes.get(PRECISION) or scheme_shares(layouts, checkpoint.dtype),
        bits_per_weight=bits,
        bits_per_weight_total=total,
        weight_bytes=stored_bytes,
        held_bytes=held_bytes(model),
        read_bytes=bytes_per_token(model),
        kernels=kernel_shares(model),
        config=checkpoint.config,
        dtype=dtype,
        kv_cache=cache.kind,
        kv_scales=scales,
        events=(*filter(None, [resolve_model_type(checkpoint.config)[1]]), *filler.events),
        names=mapping,
    )


def _create_mapping(
    model: PreTrainedModel, model_layout: ModelLayout, config: Mapping[str, Any]
) -> WeightMapping:
    """Map stored tensors to parameters, by the declarations of the architecture or else by transformers' rules.

    Those rules do not cover separately stored experts of a family that publishes stacked ones; for such files,
    declarations are derived.

    Raises:
        InputError: some tensors do not belong to the model.
        RefusedError: no declarations can be derived; the message says why.
    """
    stored = [tensor.header for tensor in model_layout.tensors]
    if model_layout.architecture is None or model_layout.architecture.has_weight_conversion:
        mapping = WeightMapping(model, stored)
        if not has_single_experts(mapping.unused):
            return mapping
        from quantforge.model.derive.derive import derive_declarations_for

        model_layout = match_tensors(config, stored, derive_declarations_for(config, stored))
    return WeightMapping(model, model_layout)


def _sizes(
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
) -> tuple[float, float, int]:
    """Return `stored_sizes`, corrected for sources whose files are smaller than the tensors decoded from them."""
    bits, total, size = stored_sizes(model_layout, layouts, stored)
    if PRECISION in checkpoint.source_notes:
        size = sum(entry.nbytes for entry in checkpoint.original.entries.values())
        bits = total = total * size / sum(item.nbytes for item in stored.values())
    return bits, total, size


def _round_cache(model: PreTrainedModel, model_layout: ModelLayout, scales: LayerScales) -> None:
    """Make attention layers round keys and values with their calibrated scales."""
    for block, pair in scales.items():
        attention = f"{model_layout.block_name(block)}.{kv_scales.ATTENTION_MODULE}"
        attach_cache(model.get_submodule(attention), RoundedCache(*pair))


def weights_to_decode(
    model: nn.Module,
    mapping: WeightMapping,
    layouts: Mapping[str, ModuleLayout],
    architecture: Architecture | None,
) -> dict[str, str]:
    """Return the quantized weights that must be decoded, by stored name, with the reason ("" for embeddings)."""
    reasons = {}
    for source in mapping.distinct_sources():
        for stored in source.stored:
            if _module_name(stored) not in layouts:
                continue
            name = _module_name(mapping.parameter_name(stored))
            if stored in mapping.expert_places:
                continue
            if source.rule is not None or not mapping.parameter_name(stored).endswith(".weight"):
                reasons[stored] = CONVERTED_LAYOUT
            elif isinstance(model.get_submodule(name), nn.Embedding):  # rows are looked up
                reasons[stored] = ""
            elif reason := reason_to_decode(model, name, architecture):
                reasons[stored] = reason
            elif layouts[_module_name(stored)].scheme.weight.grid in LATTICES:
                reasons[stored] = NO_LATTICE_KERNEL
    return reasons


def reason_to_decode(model: nn.Module, name: str, architecture: Architecture | None) -> str:
    """Return why a module cannot be replaced by a packed linear, or "" if it can.

    Args:
        model: the model.
        name: name of the module.
        architecture: declarations of the model family, which cover transposed linears (Conv1D).
    """
    module = model.get_submodule(name)
    is_transposed = type(module).__name__ == "Conv1D" and architecture is not None
    if not is_transposed and getattr(type(module), "forward", None) is not nn.Linear.forward:
        return CUSTOM_FORWARD
    parameter_name = name.rpartition(".")[2]
    owner_classes: list[Any] = [type(owner) for owner in _enclosing_modules(model, name)]
    return (
        WEIGHT_READ_DIRECTLY
        if any(parameter_name in _directly_read_weights(kind) for kind in owner_classes)
        else ""
    )


def _enclosing_modules(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the enclosing modules of a module, up to the owner of the block list that contains it."""
    is_listed = False
    while "." in name and not is_listed:
        name = name.rpartition(".")[0]
        owner = model.get_submodule(name)
        if isinstance(owner, nn.ModuleList):
            owner = model.get_submodule(name.rpartition(".")[0])
            is_listed = True
        yield owner


@cache
def _directly_read_weights(module_class: Any) -> frozenset[str]:
    """Return the names of submodules whose ``weight`` the source code of a module class reads directly."""
    try:
        source = inspect.getsource(module_class)
    except (OSError, TypeError):  # no source is installed
        return frozenset()
    return frozenset(_WEIGHT_ACCESS.findall(source))


class SkeletonFiller:
    """Fills the parameters of a model skeleton from a checkpoint.

    Args:
        checkpoint: the checkpoint.
        model_format: format of the checkpoint.
        layouts: the quantized linears, by module name.
        device: device of the model.
        dtype: type of activations and unquantized weights.
        shards: parameters of which this process holds only a part, by name.

    Attributes:
        events: layers that do not use their preferred kernel.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model_format: Format,
        layouts: Mapping[str, ModuleLayout],
        device: torch.device,
        dtype: torch.dtype,
        shards: Mapping[str, WeightShard] | None = None,
    ) -> None:
        self._shards = shards or {}
        self._checkpoint = checkpoint
        self._format = model_format
        self._layouts = layouts
        self._device = device
        self._dtype = dtype
        self.events: list[Event] = []

    def fill(
        self, model: PreTrainedModel, mapping: WeightMapping, decoded: Mapping[str, str]
    ) -> None:
        """Fill all parameters; buffers keep their type and move to the device.

        Args:
            model: the skeleton.
            mapping: mapping from stored tensors to parameters.
            decoded: quantized weights to decode, with reasons (`weights_to_decode`).

        Raises:
            RefusedError: a layer with quantized inputs must be decoded, or the model cannot be run here.
            InputError: the checkpoint does not match its configuration.
        """
        _check_mapping(mapping, self._checkpoint.path)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        packed = []
        for source in mapping.distinct_sources():
            layout = self._layouts.get(_module_name(source.stored[0]))
            if source.stored[0] in mapping.expert_places:
                continue
            if layout is not None and source.stored[0] not in decoded:
                packed.append((_module_name(next(iter(source.parameters))), layout))
                continue
            for name, value in mapping.compute(source, self._read_decoded).items():
                cut = self._shards.get(name)
                self._set_tensor(model, name, value if cut is None else cut.slice_tensor(value))
        # After the plain tensors, so that packed linears and experts find their biases.
        for name, layout in packed:
            self._fill_packed(model, name, layout)
        if mapping.expert_places:
            self._fill_experts(model, mapping)
        _tie_parameters(model, mapping.tied)
        _check_filled(model, self._checkpoint.path)
        self._report_decoded(decoded)
        if self._shards:
            wrap_split_linears(model, self._shards)
        if find_base_model(model) is None:
            raise RefusedError(
                f"{self._checkpoint.path}: this model is rounded and written, but not run here: "
                "its class does not say which part is the decoder",
                "measure it in an engine that loads it (see `quantforge plan`); "
                "verify --no-forward compares its numbers",
            )

    def _fill_experts(self, model: PreTrainedModel, mapping: WeightMapping) -> None:
        """Fill the experts of mixtures, packed if their module is supported and a kernel accepts the codes."""
        lattices = [name for name in mapping.expert_places if self._is_lattice(name)]
        if lattices:
            decoded = sum(map(mapping.numel, lattices)) / sum(
                map(mapping.numel, mapping.expert_places)
            )
            detail = f"{decoded:.0%} of the weights of experts are decoded as they are loaded: {NO_LATTICE_KERNEL}"
            self.events.append(Event("kernel-fallback", _module_name(lattices[0]), detail))
        weights = ExpertWeights(
            read=self._read_weight,
            quantized=lambda name: _module_name(name) in self._layouts,
            packed=not lattices,
            dtype=self._dtype,
            device=self._device,
        )
        self.events += fill_experts(model, mapping, weights)

    def _is_lattice(self, stored: str) -> bool:
        layout = self._layouts.get(_module_name(stored))
        return layout is not None and layout.scheme.weight.grid in LATTICES

    def _report_decoded(self, reasons_by_weight: Mapping[str, str]) -> None:
        """Record an event for each reason of decoding, with the share of the quantized weights."""
        sizes = {name: math.prod(layout.shape) for name, layout in self._layouts.items()}
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, text in reasons_by_weight.items():
            if text:
                reasons[text].append(_module_name(name))
        for text, modules in reasons.items():
            decoded_share = sum(sizes[name] for name in modules) / sum(sizes.values())
            summary = f"{len(modules)} matrices, {decoded_share:.0%} of the quantized weights"
            detail = f"{summary}, are decoded as they are loaded: {text}"
            self.events.append(Event("kernel-fallback", modules[0], detail))

    def _read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name)
        check_finite(name, tensor, self._checkpoint.entries[name].file)
        return tensor

    def _read_part(self, name: str) -> Tensor:
        """Read a tensor of a packed linear; codes stored in a float type are not checked for NaN."""
        is_wide_type = not self._checkpoint.entries[name].dtype.startswith("F8")
        return (
            self._checkpoint.read(name)
            if is_wide_type and name.endswith(".weight")
            else self._read(name)
        )

    def _read_weight(self, name: str) -> QuantizedTensor | Tensor:
        """Read a weight as it is stored, quantized or plain."""
        layout = self._layouts.get(_module_name(name))
        if layout is None:
            return self._read(name)
        return self._format.unpack(
            layout,
            {tensor_name: self._read_part(tensor_name) for tensor_name in layout.tensor_names},
        )

    def _read_decoded(self, name: str) -> Tensor:
        """Read a weight and decode it to a plain tensor."""
        return decode_plain(self._read_weight(name), name, self._dtype)

    def _set_tensor(self, model: nn.Module, name: str, value: Tensor) -> None:
        module_name, _, tensor_name = name.rpartition(".")
        module = model.get_submodule(module_name)
        if tensor_name in module._buffers:
            buffer = module._buffers[tensor_name]
            assert buffer is not None
            setattr(module, tensor_name, value.to(self._device, buffer.dtype))
            return
        value = value.to(self._device, self._dtype)
        setattr(module, tensor_name, nn.Parameter(value, requires_grad=False))

    def _fill_packed(self, model: nn.Module, name: str, layout: ModuleLayout) -> None:
        tensor = self._read_weight(f"{layout.module}.weight")
        assert isinstance(tensor, QuantizedTensor)
        module = model.get_submodule(name)
        bias = getattr(module, "bias", None)
        cut = self._shards.get(f"{name}.weight")
        packed = PackedLinear(tensor, bias, self._dtype, self._device, shard=cut)
        if packed.failure is not None:
            self.events.append(Event("kernel-fallback", name, packed.failure))
        model.set_submodule(name, packed)


def _module_name(name: str) -> str:
    """Return the name of the module that owns a weight."""
    return name.removesuffix(".weight")


def _check_mapping(mapping: WeightMapping, path: Path) -> None:
    """Raise InputError unless stored tensors and model parameters match one to one."""
    left_over = [name for name in mapping.unused if name not in set(mapping.ignored)]
    if left_over:
        raise InputError(
            f"{path}: {len(left_over)} tensor(s) have no place in the model, first: {', '.join(left_over[:5])}",
            "a model of this model_type has no such parameters",
            tensor=left_over[0],
        )
    if mapping.missing:
        raise _missing_parameters_error(path, mapping.missing)


def _tie_parameters(model: PreTrainedModel, tied: Mapping[str, str]) -> None:
    """Tie parameters that are not stored to their source parameters, including packed ones."""
    for name, origin in tied.items():
        (module, _, leaf), (other, _, other_leaf) = name.rpartition("."), origin.rpartition(".")
        other_module = model.get_submodule(other)
        if isinstance(other_module, PackedLinear):
            model.set_submodule(module, other_module)
        else:
            setattr(model.get_submodule(module), leaf, getattr(other_module, other_leaf))


def _check_filled(model: PreTrainedModel, path: Path) -> None:
    """Raise InputError unless every parameter and buffer of a model has a value."""
    values = [*model.named_parameters(), *model.named_buffers()]
    missing_names = tuple(name for name, value in values if value.is_meta)
    if missing_names:
        raise _missing_parameters_error(path, missing_names)


def _missing_parameters_error(path: Path, missing_names: tuple[str, ...]) -> InputError:
    return InputError(
        f"{path}: {len(missing_names)} parameter(s) are in no file, first: {', '.join(missing_names[:5])}",
        "a complete checkpoint holds every tensor; fetch the model again",
    )
