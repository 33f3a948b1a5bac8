"""The skeleton of a model, filled from a checkpoint one tensor at a time: packed linears, and plain tensors.

Plain tensors come first, so that a packed linear finds its bias in the module that it replaces. A parameter that no
tensor fills is an error: nothing is ever initialised at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched, MatchedTensor, Role
from quantforge.checkpoint.reader import Checkpoint, scan_finite
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.formats import Format, ModuleLayout
from quantforge.runtime.expert_stacks import set_expert
from quantforge.runtime.linear import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EXPERTS = "experts are decoded as they are loaded: no kernel multiplies packed stacks of them"


class SkeletonFiller:
    """Fill a skeleton from a checkpoint.

    Args:
        checkpoint: the model.
        form: its format.
        layouts: the quantized linears, by the name of their module.
        device: where the model computes.
        dtype: of activations, and of weights that are not quantized.

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
            raise not_run(self._checkpoint.path, matched.model_type, error.message) from error

    def _filled(self, model: PreTrainedModel, matched: Matched) -> PreTrainedModel:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        wanted = [tensor for tensor in matched.tensors if tensor.role is not Role.FOREIGN]
        layouts = [self._layouts.get(module_of(tensor.stored.name)) for tensor in wanted]
        for tensor, layout in zip(wanted, layouts, strict=True):
            if tensor.expert >= 0:
                self._fill_expert(model, matched, tensor)
            elif layout is None:
                self._fill_plain(model, tensor.name, tensor.stored.name)
        # After the plain tensors, so that a packed linear finds its bias.
        for tensor, layout in zip(wanted, layouts, strict=True):
            if layout is not None and tensor.expert < 0:
                self._fill_packed(model, module_of(tensor.name), layout)
        _tie(model)
        _check_filled(model, self._checkpoint.path)
        return model

    def _fill_expert(self, model: nn.Module, matched: Matched, tensor: MatchedTensor) -> None:
        layout = self._layouts.get(module_of(tensor.stored.name))
        if layout is None:
            value = self._read(tensor.stored.name)
        elif layout.scheme.input is not None:
            reason = "inputs of experts are rounded, which is not computed here"
            raise not_run(self._checkpoint.path, matched.model_type, reason)
        else:
            stored = {part: self._read(part) for part in layout.stored}
            value = self._form.unpack(layout, stored).decode(self._dtype)
            if not self.events:
                self.events.append(Event("kernel-fallback", tensor.name, EXPERTS))
        set_expert(model, matched, tensor, value.to(self._device), self._dtype)

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


class _NoPlaceError(InputError):
    """A stored tensor is no parameter of the running model."""


class _UnfilledError(InputError):
    """A parameter of the running model is in no file."""


def not_run(path: Path, family: str, why: str) -> RefusedError:
    """Return the refusal to run a model of a family, with what can be done instead."""
    return RefusedError(
        f"{path}: models of {family} are rounded and written, but not run here: {why}",
        "measure it in an engine that loads it (see `quantforge plan`); verify --no-forward compares its numbers",
    )


def module_of(name: str) -> str:
    """Return the name of the module that owns a weight."""
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
