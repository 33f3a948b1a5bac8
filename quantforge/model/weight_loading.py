"""Load the weights of skeleton modules from a checkpoint in float32, and free them again.

Names are those of the declarations. The running model holds all experts of a block in one parameter; they are read one
at a time, whether files store them stacked or one by one. Of an embedding only the rows of occurring tokens are loaded.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantforge.architectures import LayerKind, StackSlice
from quantforge.architectures.match import ModelLayout, require_declarations
from quantforge.files.finite_values import check_finite
from quantforge.model.weight_mapping import WeightMapping
from quantforge.numerics.allocator import CHUNK_BYTES
from quantforge.plans import StoredTensor

LARGE_EMBEDDING = 1 << 24  # elements; a larger embedding is not loaded whole


class TensorSource(Protocol):
    """Interface of a checkpoint as a model stream needs it."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the content of ``config.json``."""

    def read(self, name: str) -> Tensor:
        """Return a tensor by its stored name, in its stored type."""

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` of a tensor."""


class ModuleWeights:
    """Loads weights of a checkpoint into the modules of a text model on a device."""

    def __init__(
        self,
        source: TensorSource,
        model_layout: ModelLayout,
        device: str | torch.device = "cpu",
        mapping: WeightMapping | None = None,
    ) -> None:
        """Read from ``source`` to a device; ``mapping`` converts parameters that files hold in another layout."""
        self._source = source
        self._mapping = mapping
        self._model_layout = model_layout
        self._device = torch.device(device)
        self._architecture, _ = require_declarations(model_layout)

    def fill(self, model: nn.Module, name: str) -> None:
        """Load one tensor outside of the blocks, given its canonical name."""
        module, _, parameter_name = name.rpartition(".")
        model.get_submodule(module).load_state_dict(
            {parameter_name: self.read(name)}, assign=True, strict=False
        )

    def fill_block(self, module: nn.Module, index: int) -> dict[str, StoredTensor]:
        """Load a block; return its stored tensors by declared name relative to it. Errors as `read`.

        Experts stay empty: `read_expert` reads them one at a time.
        """
        block = self._model_layout.block_name(index)
        kind = self._model_layout.layers[index]
        stored = {
            item.name: self._model_layout.by_name[f"{block}.{item.name}"].header
            for item in kind.parameters
            if f"{block}.{item.name}" in self._model_layout.by_name
        }
        stacked = _expert_parameters(kind, module)
        state = {
            key: free_weights if key in stacked else self.read(f"{block}.{key}")
            for key, free_weights in module.state_dict().items()
        }
        module.load_state_dict(state, assign=True, strict=True)
        return stored

    def read_expert(
        self, module: nn.Module, index: int, number: int, stack_slices: Mapping[str, StackSlice]
    ) -> dict[str, Tensor]:
        """Return the parameters of one expert, ``[1, ...]`` each, by name relative to the block. Errors as `read`.

        ``stack_slices``: the positions of its linears in the stacks.
        """
        block, kind = self._model_layout.block_name(index), self._model_layout.layers[index]
        parameters = {}
        for key, free_weights in _expert_parameters(kind, module).items():
            name = f"{block}.{key}"
            if name in self._model_layout.by_name:
                parameters[key] = self._read_row(name, number)
            else:
                parameters[key] = torch.full(
                    (1, *free_weights.shape[1:]), torch.nan, device=self._device
                )
        for linear, stack_slice in stack_slices.items():
            if f"{block}.{linear}.weight" in self._model_layout.by_name:
                matrix = stack_slice.stack.matrix(
                    parameters[stack_slice.stack.parameter], stack_slice.linear_index, 0
                )
                matrix.copy_(self.read(f"{block}.{linear}.weight"))
        return parameters

    def _read_row(self, name: str, row: int) -> Tensor:
        """Return one row of a tensor as float32, keeping the first dimension; errors as `read`."""
        stored = self._model_layout.by_name[name].header.name
        tensor = self._source.read_rows(stored, row, row + 1)
        check_finite(stored, tensor)
        return tensor.to(self._device, torch.float32, copy=True)

    def read(self, name: str) -> Tensor:
        """Return a tensor by its canonical name as float32 (integers unchanged).

        Raise InputError if it is not finite.
        """
        if name not in self._model_layout.by_name and self._mapping is not None:
            return self._mapping.compute(self._mapping.sources[name], self._read_stored)[name]
        return self._read_stored(self._model_layout.by_name[name].header.name)

    def _read_stored(self, stored: str) -> Tensor:
        return _read_float32(self._source, stored, self._device)

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Gather rows of a matrix as float32, given in ascending order, reading it in strips."""
        stored = self._model_layout.by_name[name].header
        return _gather_rows(self._source, stored.name, stored.shape, rows).to(self._device)


class WholeWeights:
    """Reads weights as float32 by the parameter names of the whole running model, towers included."""

    def __init__(self, source: TensorSource, mapping: WeightMapping, device: torch.device) -> None:
        """Read from a checkpoint to a device with the ``mapping`` of the whole model."""
        self._source, self._mapping, self._device = source, mapping, device

    def read(self, name: str) -> Tensor | None:
        """Return a parameter or buffer; None if it is in no file, InputError if it is not finite."""
        name = self._mapping.tied.get(name, name)
        if name not in self._mapping.sources:
            return None
        return self._mapping.compute(self._mapping.sources[name], self._read_stored)[name]

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Gather rows of a matrix, given in ascending order; a matrix that needs conversion is read whole."""
        name = self._mapping.tied.get(name, name)
        source = self._mapping.sources[name]
        if source.rule is not None:
            return self._mapping.compute(source, self._read_stored)[name][rows]
        (stored,) = source.stored
        shape = self._mapping.shape(stored)
        return _gather_rows(self._source, stored, shape, rows).to(self._device)

    def _read_stored(self, stored: str) -> Tensor:
        return _read_float32(self._source, stored, self._device)


class EmbeddingRows:
    """Embedding that holds only the rows of occurring tokens; thread-safe.

    The model looks up tokens by their usual ids; a hook renumbers them to the rows that are held. Rows of a token that
    comes up later (a padding token that the model inserts) are read then.

    Args:
        module: the embedding, without weights.
        read: returns the rows of ascending token ids.
        tokens: occurring token ids, ascending; may be incomplete.
        stack: removes the hook when it is closed.
    """

    def __init__(
        self,
        module: nn.Module,
        read_rows: Callable[[Tensor], Tensor],
        tokens: Tensor,
        stack: ExitStack,
    ) -> None:
        self._module, self._read, self._tokens = module, read_rows, tokens
        self._lock = threading.Lock()
        setattr(module, "padding_idx", None)  # noqa: B010  # of any class that embeds
        module.weight = parameter(read_rows(tokens))
        handle = module.register_forward_pre_hook(self._renumber, with_kwargs=True)
        stack.callback(handle.remove)
        stack.callback(free_weights, module)

    def _renumber(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = dict(kwargs)
        ids = args[0] if args else values.pop(next(iter(values)))
        with self._lock:
            occurring = torch.unique(ids).to(self._tokens)
            if not torch.isin(occurring, self._tokens).all():
                self._tokens = torch.unique(torch.cat([self._tokens, occurring]))
                self._module.weight = parameter(self._read(self._tokens).to(ids.device))
        rows = torch.searchsorted(self._tokens, ids.to(self._tokens)).to(ids.device)
        return (rows, *args[1:]), values


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether a module is an embedding that is called with token ids alone."""
    if not isinstance(module, nn.Embedding):
        return False
    parameters = list(inspect.signature(type(module).forward).parameters)
    return parameters[1:] in (["input"], ["input_ids"])


def _read_float32(source: TensorSource, name: str, device: torch.device) -> Tensor:
    tensor = source.read(name)
    check_finite(name, tensor)
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype  # tables of numbers stay
    # A copy even of a float32 tensor: the source may hand out what it keeps.
    return tensor.to(device, dtype, copy=True)


def _gather_rows(source: TensorSource, name: str, shape: tuple[int, ...], rows: Tensor) -> Tensor:
    """Gather rows of a stored matrix as float32, given in ascending order, reading it in strips."""
    count = shape[0]
    step = max(1, CHUNK_BYTES * count // (4 * math.prod(shape)))
    gathered = [torch.empty(0, *shape[1:])]
    for first in range(0, count, step):
        last = min(first + step, count)
        rows_in_strip = rows[(rows >= first) & (rows < last)] - first
        if len(rows_in_strip):
            gathered.append(source.read_rows(name, first, last)[rows_in_strip].float())
    return torch.cat(gathered)


def _expert_parameters(kind: LayerKind, module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a block that hold data of all experts, by name."""
    paths = {stack.parameter.rpartition(".")[0] for stack in kind.stacks}
    return {
        key: value for key, value in module.state_dict().items() if key.rpartition(".")[0] in paths
    }


def parameter(value: Tensor) -> nn.Parameter:
    """Wrap a tensor as a parameter without gradient."""
    return nn.Parameter(value, requires_grad=False)


def free_weights(module: nn.Module) -> None:
    """Free the weights of a module by replacing them with tensors on the meta device."""
    for child in module.modules():
        for name, value in child.named_parameters(recurse=False):
            setattr(child, name, parameter(torch.empty_like(value, device="meta")))
