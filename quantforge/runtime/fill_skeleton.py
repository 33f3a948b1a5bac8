"""The skeleton of a model, filled from a checkpoint one parameter at a time: packed linears, and plain tensors.

`quantforge.model.names` says of which stored tensors each parameter is made. A quantized linear stays packed where the
running model has a plain linear in its place. Where it has not, its matrix is decoded into the parameter, which is an
event with its share of the weights. Plain tensors come first, so that a packed linear finds its bias in the module that
it replaces. Nothing is ever initialised at random: what no tensor fills is an error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture
from quantforge.checkpoint.finite_values import scan_finite
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.formats import Format, ModuleLayout
from quantforge.model.inner import inner_of
from quantforge.model.names import Names
from quantforge.packers.lattices import LATTICES
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.fill_experts import ExpertWeights, fill_experts, plainly
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.plain_weights import CONVERTED, reason
from quantforge.runtime.tensor_shares import sum_parts
from quantforge.runtime.weight_cuts import Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_KERNEL = "no kernel multiplies the codes of a lattice"


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
        self, model: PreTrainedModel, names: Names, plain: Mapping[str, str]
    ) -> PreTrainedModel:
        """Fill all parameters; buffers keep their type and move to the device.

        Args:
            model: the skeleton.
            names: of which stored tensors its parameters are made.
            plain: quantized weights that are decoded, and why (`decoded`).

        Raises:
            RefusedError: inputs of a layer that has to be decoded are rounded, or the model is not run here.
            InputError: the checkpoint does not fit its configuration.
        """
        check_names(names, self._checkpoint.path)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        packed = []
        for source in names.distinct():
            layout = self._layouts.get(module_of(source.stored[0]))
            if source.stored[0] in names.places:
                continue
            if layout is not None and source.stored[0] not in plain:
                packed.append((module_of(next(iter(source.parameters))), layout))
                continue
            for name, value in names.make(source, self._decoded).items():
                cut = self._cuts.get(name)
                self._place(model, name, value if cut is None else cut.plain(value))
        # After the plain tensors, so that packed linears and experts find their biases.
        for name, layout in packed:
            self._fill_packed(model, name, layout)
        lattices = [name for name in names.places if self._is_lattice(name)]
        if lattices:
            share = sum(map(names.weights, lattices)) / sum(map(names.weights, names.places))
            detail = (
                f"{share:.0%} of the weights of experts are decoded as they are loaded: {NO_KERNEL}"
            )
            self.events.append(Event("kernel-fallback", module_of(lattices[0]), detail))
        weights = ExpertWeights(
            self._weight, lambda name: module_of(name) in self._layouts,
            not lattices, self._dtype, self._device,
        )  # fmt: skip
        self.events += fill_experts(model, names, weights)
        _tie(model, names.tied)
        check_filled(model, self._checkpoint.path)
        self._report(plain)
        sum_parts(model, self._cuts)
        if inner_of(model) is None:
            raise not_run(self._checkpoint.path, "its class does not say which part is the decoder")
        return model

    def _is_lattice(self, stored: str) -> bool:
        layout = self._layouts.get(module_of(stored))
        return layout is not None and layout.scheme.weight.grid in LATTICES

    def _report(self, why: Mapping[str, str]) -> None:
        """Record what is decoded, with its share of the quantized weights."""
        sizes = {name: math.prod(layout.shape) for name, layout in self._layouts.items()}
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, text in why.items():
            if text:
                reasons[text].append(module_of(name))
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
        layout = self._layouts.get(module_of(name))
        if layout is None:
            return self._read(name)
        return self._form.unpack(layout, {part: self._read_part(part) for part in layout.stored})

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


def decoded(
    model: nn.Module,
    names: Names,
    layouts: Mapping[str, ModuleLayout],
    architecture: Architecture | None,
) -> dict[str, str]:
    """Return by stored name which quantized weights are decoded, and why; "" where no kernel is meant for them."""
    found = {}
    for source in names.distinct():
        for stored in source.stored:
            if module_of(stored) not in layouts:
                continue
            name = module_of(names.runtime(stored))
            if stored in names.places:
                continue
            if source.rule is not None or not names.runtime(stored).endswith(".weight"):
                found[stored] = CONVERTED
            elif isinstance(model.get_submodule(name), nn.Embedding):  # rows are looked up
                found[stored] = ""
            elif why := reason(model, name, architecture):
                found[stored] = why
            elif layouts[module_of(stored)].scheme.weight.grid in LATTICES:
                found[stored] = NO_KERNEL
    return found


def not_run(path: Path, why: str) -> RefusedError:
    """Return the refusal to run a model that is rounded and written all the same, with what can be done instead."""
    return RefusedError(
        f"{path}: this model is rounded and written, but not run here: {why}",
        "measure it in an engine that loads it (see `quantforge plan`); verify --no-forward compares its numbers",
    )


def module_of(name: str) -> str:
    """Return the name of the module that owns a weight."""
    return name.removesuffix(".weight")


def _tie(model: PreTrainedModel, tied: Mapping[str, str]) -> None:
    """Let parameters that are in no file be those that they are tied to, packed ones too."""
    for name, origin in tied.items():
        (module, _, leaf), (other, _, kind) = name.rpartition("."), origin.rpartition(".")
        owner = model.get_submodule(other)
        if isinstance(owner, PackedLinear):
            model.set_submodule(module, owner)
        else:
            setattr(model.get_submodule(module), leaf, getattr(owner, kind))


def check_names(names: Names, path: Path) -> None:
    """Raise InputError unless the checkpoint and the model hold the same."""
    left = [name for name in names.left_over if name not in set(names.ignored)]
    if left:
        raise InputError(
            f"{path}: {len(left)} tensor(s) have no place in the model, first: {', '.join(left[:5])}",
            "a model of this model_type has no such parameters",
            tensor=left[0],
        )
    if names.missing:
        raise _unfilled(path, names.missing)


def _unfilled(path: Path, missing: tuple[str, ...]) -> InputError:
    return InputError(
        f"{path}: {len(missing)} parameter(s) are in no file, first: {', '.join(missing[:5])}",
        "a complete checkpoint holds every tensor; fetch the model again",
    )


def check_filled(model: PreTrainedModel, path: Path) -> None:
    """Raise InputError unless every parameter and buffer of a model has a value."""
    values = [*model.named_parameters(), *model.named_buffers()]
    missing = tuple(name for name, value in values if value.is_meta)
    if missing:
        raise _unfilled(path, missing)
