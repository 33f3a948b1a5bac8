"""One loader for every format: a model that computes, with its quantized weights still packed.

The layouts that a format finds in the headers are replaced by the weights they stand for, so that
a quantized checkpoint has the same tensors as its source and is matched by the same declarations:
each tensor exactly once, or refused. `quantforge.model.weight_mapping` says of which stored tensors each parameter of
the skeleton is made. Plain tensors are filled first, so that a packed linear finds its bias in the module that it
replaces.
Nothing is ever initialised at random: a parameter that no tensor fills is an error.

A quantized linear becomes a `PackedLinear` where the running model has a plain linear in its place. Where a family's
class multiplies in a way of its own, or where a block reads the weight of a linear itself, past the module (as
state-space mixers do; it is seen in the source of the block's class), the matrix is decoded into the parameter, which
is an event with its share of the weights. Experts of a mixture: `packed_experts`.
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
from quantforge.files.finite_values import scan_finite
from quantforge.files.reader import Checkpoint
from quantforge.formats import Format, ModuleLayout, detect_format, kv_scales
from quantforge.formats.decoded import PRECISION
from quantforge.formats.match_quantized import drop_tied_copy, match_headers
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.model.model_class import known_type
from quantforge.model.model_parts import find_base_model
from quantforge.model.skeleton import build
from quantforge.model.weight_mapping import WeightMapping
from quantforge.packers.lattices import LATTICES
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.cache import LayerScales
from quantforge.runtime.cache_scales import RoundedCache, listen, read_scales
from quantforge.runtime.linear import EXACT, PackedLinear, round_inputs
from quantforge.runtime.memory import check_weights, free_bytes
from quantforge.runtime.model_sizes import (
    bytes_per_token,
    held_bytes,
    kernel_shares,
    most_held,
    scheme_shares,
    stored_sizes,
)
from quantforge.runtime.packed_experts import ExpertWeights, fill_experts, plainly
from quantforge.runtime.tensor_parallel import Cut, Share, cuts_of, sum_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.plans import StoredTensor

NO_KERNEL = "no kernel multiplies the codes of a lattice"
OWN_PRODUCT = "their class multiplies in its own way"
READ = "their block reads the weight itself"
CONVERTED = "the running model holds them in another form"
_READ = re.compile(r"\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, and what is known of it.

    Attributes:
        model: a causal language model of transformers, in evaluation mode.
        path: its directory or GGUF file (which also holds the tokenizer).
        format: key of the format.
        scheme: the schemes with their shares of the quantized weights, or the stored type.
        bits_per_weight: stored bits per quantized weight, their scales and zeros included; of all
            weights when none is quantized.
        bits_per_weight_total: stored bits per weight of the whole model.
        weight_bytes: stored bytes of the whole model, without what is stored twice.
        held_bytes: bytes that weights take in memory.
        read_bytes: those of them that one token reads: of a mixture the weights of the experts that it is sent to.
        kernels: share of the weights of linear layers that each kernel multiplies.
        config: ``config.json``.
        dtype: of activations.
        kv_cache: how keys and values are stored, one of `kv_scales.KINDS`: the model computes with them rounded so.
        kv_scales: by layer, the scales of keys and values.
        events: layers that are not multiplied by the kernel meant for them; a type that transformers does not know.
        names: the bridge between its files and the parameters of ``model``.
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
    input_bits: int = EXACT,
    share: Share | None = None,
) -> Loaded:
    """Load a model of any format that is read.

    Args:
        source: a directory or a GGUF file, or the checkpoint that was opened there.
        device: where it computes.
        dtype: of activations, and of the weights that are not quantized.
        input_bits: of the integers to which products of packed weights round activations of 16 bits, where they do.
        share: of this process, where several hold one model: only `Decoder` computes it then, in all of them at once.

    Raises:
        InputError: missing, left-over, mis-shaped or not finite tensors; no format reads it; or it cannot be built.
        RefusedError: a model that is written and not run here, or that processes do not share.
        ResourceError: a GPU has no room for it.
    """
    checkpoint = decode_if_unsupported(open_model(source)) if isinstance(source, Path) else source
    form = detect_format(checkpoint.config)
    stored = checkpoint.headers()
    layouts = {item.module: item for item in form.find_layouts(checkpoint.config, stored)}
    model_layout = drop_tied_copy(match_headers(checkpoint, layouts, stored), checkpoint)
    bits, total, size = _sizes(checkpoint, model_layout, layouts, stored)
    model = build(checkpoint.config)
    mapping = _mapping_of(model, model_layout, checkpoint.config)
    decoded = weights_to_decode(model, mapping, layouts, model_layout.architecture)
    where = torch.device(device)
    cuts = {} if share is None else cuts_of(model, model_layout, layouts, share)
    check_weights(
        *most_held(model_layout, layouts, stored, dtype, decoded, cuts), free_bytes(where)
    )
    filler = SkeletonFiller(checkpoint, form, layouts, where, dtype, cuts)
    filler.fill(model, mapping, decoded)
    if input_bits != EXACT:
        filler.events += round_inputs(model, input_bits)
    cache = kv_scales.find_scales(checkpoint.config, stored)
    scales = read_scales(checkpoint, cache, where, share) if cache.names else None
    if scales is not None:
        _round_cache(model, model_layout, scales)
    return Loaded(
        model=model,
        path=checkpoint.path,
        format=form.KEY,
        scheme=checkpoint.facts.get(PRECISION) or scheme_shares(layouts, checkpoint.dtype),
        bits_per_weight=bits,
        bits_per_weight_total=total,
        weight_bytes=size,
        held_bytes=held_bytes(model),
        read_bytes=bytes_per_token(model),
        kernels=kernel_shares(model),
        config=checkpoint.config,
        dtype=dtype,
        kv_cache=cache.kind,
        kv_scales=scales,
        events=(*filter(None, [known_type(checkpoint.config)[1]]), *filler.events),
        names=mapping,
    )


def _mapping_of(
    model: PreTrainedModel, model_layout: ModelLayout, config: Mapping[str, Any]
) -> WeightMapping:
    """Return the bridge of a checkpoint: by its declarations, or by transformers' rules where it has none.

    Those rules know no single experts of a family that publishes stacks: for such files declarations are derived.

    Raises:
        InputError: tensors have no place in the model.
        RefusedError: no declarations can be derived; the message says why.
    """
    stored = [tensor.header for tensor in model_layout.tensors]
    if model_layout.architecture is None or model_layout.architecture.converted:
        mapping = WeightMapping(model, stored)
        if not has_single_experts(mapping.left_over):
            return mapping
        from quantforge.model.derive.derive import derive_for

        model_layout = match_tensors(config, stored, derive_for(config, stored))
    return WeightMapping(model, model_layout)


def _sizes(
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
) -> tuple[float, float, int]:
    """Return `stored_sizes`, by the files where these hold less than what is read of them."""
    bits, total, size = stored_sizes(model_layout, layouts, stored)
    if PRECISION in checkpoint.facts:
        size = sum(entry.nbytes for entry in checkpoint.opened.entries.values())
        bits = total = total * size / sum(item.nbytes for item in stored.values())
    return bits, total, size


def _round_cache(model: PreTrainedModel, model_layout: ModelLayout, scales: LayerScales) -> None:
    """Let attention layers compute with keys and values rounded by the scales of each."""
    for block, pair in scales.items():
        attention = f"{model_layout.block_name(block)}.{kv_scales.ATTENTION_MODULE}"
        listen(model.get_submodule(attention), RoundedCache(*pair))


def weights_to_decode(
    model: nn.Module,
    mapping: WeightMapping,
    layouts: Mapping[str, ModuleLayout],
    architecture: Architecture | None,
) -> dict[str, str]:
    """Return by stored name which quantized weights are decoded, and why; "" where no kernel is meant for them."""
    found = {}
    for source in mapping.distinct():
        for stored in source.stored:
            if _module_of(stored) not in layouts:
                continue
            name = _module_of(mapping.runtime(stored))
            if stored in mapping.places:
                continue
            if source.rule is not None or not mapping.runtime(stored).endswith(".weight"):
                found[stored] = CONVERTED
            elif isinstance(model.get_submodule(name), nn.Embedding):  # rows are looked up
                found[stored] = ""
            elif why := reason_to_decode(model, name, architecture):
                found[stored] = why
            elif layouts[_module_of(stored)].scheme.weight.grid in LATTICES:
                found[stored] = NO_KERNEL
    return found


def reason_to_decode(model: nn.Module, name: str, architecture: Architecture | None) -> str:
    """Return why a module cannot be replaced by a packed linear, "" where it can.

    Args:
        model: the running model.
        name: of the module in it.
        architecture: declarations, which say whether linears are stored transposed.
    """
    module = model.get_submodule(name)
    turned = type(module).__name__ == "Conv1D" and architecture is not None
    if not turned and getattr(type(module), "forward", None) is not nn.Linear.forward:
        return OWN_PRODUCT
    leaf = name.rpartition(".")[2]
    kinds: list[Any] = [type(owner) for owner in _owners(model, name)]
    return READ if any(leaf in _weights_read(kind) for kind in kinds) else ""


def _owners(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules around a module, up to the one that holds the list of blocks that it is in."""
    listed = False
    while "." in name and not listed:
        name = name.rpartition(".")[0]
        owner = model.get_submodule(name)
        if isinstance(owner, nn.ModuleList):
            owner = model.get_submodule(name.rpartition(".")[0])
            listed = True
        yield owner


@cache
def _weights_read(kind: Any) -> frozenset[str]:
    """Return the names of the modules whose weight the code of a class of modules reads."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):  # no source is installed
        return frozenset()
    return frozenset(_READ.findall(text))


class SkeletonFiller:
    """Fill a skeleton from a checkpoint.

    Args:
        checkpoint: the model.
        form: its format.
        layouts: the quantized linears, by the name of their module.
        device: where the model computes.
        dtype: of activations, and of weights that are not quantized.
        cuts: parameters of which a part is held, by name.

    Attributes:
        events: layers that are not multiplied by the kernel meant for them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        form: Format,
        layouts: Mapping[str, ModuleLayout],
        device: torch.device,
        dtype: torch.dtype,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        self._cuts = cuts or {}
        self._checkpoint = checkpoint
        self._form = form
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
            mapping: of which stored tensors its parameters are made.
            decoded: quantized weights that are decoded, and why (`weights_to_decode`).

        Raises:
            RefusedError: inputs of a layer that has to be decoded are rounded, or the model is not run here.
            InputError: the checkpoint does not fit its configuration.
        """
        _check_mapping(mapping, self._checkpoint.path)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        packed = []
        for source in mapping.distinct():
            layout = self._layouts.get(_module_of(source.stored[0]))
            if source.stored[0] in mapping.places:
                continue
            if layout is not None and source.stored[0] not in decoded:
                packed.append((_module_of(next(iter(source.parameters))), layout))
                continue
            for name, value in mapping.make(source, self._decoded).items():
                cut = self._cuts.get(name)
                self._place(model, name, value if cut is None else cut.plain(value))
        # After the plain tensors, so that packed linears and experts find their biases.
        for name, layout in packed:
            self._fill_packed(model, name, layout)
        if mapping.places:
            self._fill_experts(model, mapping)
        _tie(model, mapping.tied)
        _check_filled(model, self._checkpoint.path)
        self._report(decoded)
        if self._cuts:
            sum_parts(model, self._cuts)
        if find_base_model(model) is None:
            raise RefusedError(
                f"{self._checkpoint.path}: this model is rounded and written, but not run here: "
                "its class does not say which part is the decoder",
                "measure it in an engine that loads it (see `quantforge plan`); "
                "verify --no-forward compares its numbers",
            )

    def _fill_experts(self, model: PreTrainedModel, mapping: WeightMapping) -> None:
        """Fill the experts of mixtures: packed where their module is understood and kernels take the codes."""
        lattices = [name for name in mapping.places if self._is_lattice(name)]
        if lattices:
            share = sum(map(mapping.weights, lattices)) / sum(map(mapping.weights, mapping.places))
            detail = (
                f"{share:.0%} of the weights of experts are decoded as they are loaded: {NO_KERNEL}"
            )
            self.events.append(Event("kernel-fallback", _module_of(lattices[0]), detail))
        weights = ExpertWeights(
            read=self._weight,
            quantized=lambda name: _module_of(name) in self._layouts,
            packed=not lattices,
            dtype=self._dtype,
            device=self._device,
        )
        self.events += fill_experts(model, mapping, weights)

    def _is_lattice(self, stored: str) -> bool:
        layout = self._layouts.get(_module_of(stored))
        return layout is not None and layout.scheme.weight.grid in LATTICES

    def _report(self, why: Mapping[str, str]) -> None:
        """Record what is decoded, with its share of the quantized weights."""
        sizes = {name: math.prod(layout.shape) for name, layout in self._layouts.items()}
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, text in why.items():
            if text:
                reasons[text].append(_module_of(name))
        for text, modules in reasons.items():
            share = sum(sizes[name] for name in modules) / sum(sizes.values())
            what = f"{len(modules)} matrices, {share:.0%} of the quantized weights"
            detail = f"{what}, are decoded as they are loaded: {text}"
            self.events.append(Event("kernel-fallback", modules[0], detail))

    def _read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name)
        scan_finite(name, tensor, self._checkpoint.entries[name].file)
        return tensor

    def _read_part(self, name: str) -> Tensor:
        """Return a tensor of a packed linear; codes may be in elements of a float type, of which any bits are right."""
        wide = not self._checkpoint.entries[name].dtype.startswith("F8")
        return (
            self._checkpoint.read(name) if wide and name.endswith(".weight") else self._read(name)
        )

    def _weight(self, name: str) -> QuantizedTensor | Tensor:
        """Return a tensor as it is stored: quantized, or plain."""
        layout = self._layouts.get(_module_of(name))
        if layout is None:
            return self._read(name)
        return self._form.unpack(
            layout, {part: self._read_part(part) for part in layout.tensor_names}
        )

    def _decoded(self, name: str) -> Tensor:
        """Return a tensor as a plain one."""
        return plainly(self._weight(name), name, self._dtype)

    def _place(self, model: nn.Module, name: str, value: Tensor) -> None:
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        if leaf in module._buffers:
            kept = module._buffers[leaf]
            assert kept is not None
            setattr(module, leaf, value.to(self._device, kept.dtype))
            return
        value = value.to(self._device, self._dtype)
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))

    def _fill_packed(self, model: nn.Module, name: str, layout: ModuleLayout) -> None:
        tensor = self._weight(f"{layout.module}.weight")
        assert isinstance(tensor, QuantizedTensor)
        module = model.get_submodule(name)
        bias = getattr(module, "bias", None)
        cut = self._cuts.get(f"{name}.weight")
        packed = PackedLinear(tensor, bias, self._dtype, self._device, cut=cut)
        if packed.failure is not None:
            self.events.append(Event("kernel-fallback", name, packed.failure))
        model.set_submodule(name, packed)


def _module_of(name: str) -> str:
    """Return the name of the module that owns a weight."""
    return name.removesuffix(".weight")


def _check_mapping(mapping: WeightMapping, path: Path) -> None:
    """Raise InputError unless the checkpoint and the model hold the same."""
    left = [name for name in mapping.left_over if name not in set(mapping.ignored)]
    if left:
        raise InputError(
            f"{path}: {len(left)} tensor(s) have no place in the model, first: {', '.join(left[:5])}",
            "a model of this model_type has no such parameters",
            tensor=left[0],
        )
    if mapping.missing:
        raise _unfilled(path, mapping.missing)


def _tie(model: PreTrainedModel, tied: Mapping[str, str]) -> None:
    """Let parameters that are in no file be those that they are tied to, packed ones too."""
    for name, origin in tied.items():
        (module, _, leaf), (other, _, kind) = name.rpartition("."), origin.rpartition(".")
        owner = model.get_submodule(other)
        if isinstance(owner, PackedLinear):
            model.set_submodule(module, owner)
        else:
            setattr(model.get_submodule(module), leaf, getattr(owner, kind))


def _check_filled(model: PreTrainedModel, path: Path) -> None:
    """Raise InputError unless every parameter and buffer of a model has a value."""
    values = [*model.named_parameters(), *model.named_buffers()]
    missing = tuple(name for name, value in values if value.is_meta)
    if missing:
        raise _unfilled(path, missing)


def _unfilled(path: Path, missing: tuple[str, ...]) -> InputError:
    return InputError(
        f"{path}: {len(missing)} parameter(s) are in no file, first: {', '.join(missing[:5])}",
        "a complete checkpoint holds every tensor; fetch the model again",
    )
