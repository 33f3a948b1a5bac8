"""Weights that come and go: modules of a skeleton filled from a checkpoint, in float32, and emptied again.

Names are those of the declarations. The running model holds all experts of a block in one parameter; they are read one
at a time, whether files hold them so or one by one. Of an embedding only the rows of tokens that occur are held.
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

from quantforge.architectures import LayerKind, Place
from quantforge.architectures.match import ModelLayout, require_declarations
from quantforge.files.finite_values import scan_finite
from quantforge.model.weight_mapping import WeightMapping
from quantforge.numerics.allocator import CHUNK_BYTES
from quantforge.plans import StoredTensor

LARGE = 1 << 24  # numbers of an embedding that is held whole


class TensorSource(Protocol):
    """What a model stream needs of a checkpoint."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the content of ``config.json``."""

    def read(self, name: str) -> Tensor:
        """Return a tensor by its stored name, in its stored type."""

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` of a tensor."""


class ModuleWeights:
    """Reader of a checkpoint's weights into the modules of a text model on a device."""

    def __init__(
        self,
        source: TensorSource,
        model_layout: ModelLayout,
        device: str | torch.device = "cpu",
        names: WeightMapping | None = None,
    ) -> None:
        """Read from a checkpoint to a device; ``names`` converts parameters that its files hold in another form."""
        self._source = source
        self._names = names
        self._model_layout = model_layout
        self._device = torch.device(device)
        self._architecture, _ = require_declarations(model_layout)

    def fill(self, model: nn.Module, name: str) -> None:
        """Fill a tensor outside of the blocks; ``name`` is its canonical one."""
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).load_state_dict(
            {leaf: self.read(name)}, assign=True, strict=False
        )

    def fill_block(self, module: nn.Module, index: int) -> dict[str, StoredTensor]:
        """Fill a block; return its stored tensors by their declared names relative to it; errors as `read`.

        Experts are left empty: they are read one at a time, by `expert`.
        """
        block = self._model_layout.block_name(index)
        kind = self._model_layout.layers[index]
        stored = {
            item.name: self._model_layout.by_name[f"{block}.{item.name}"].header
            for item in kind.parameters
            if f"{block}.{item.name}" in self._model_layout.by_name
        }
        stacked = _stacked(kind, module)
        state = {
            key: empty if key in stacked else self.read(f"{block}.{key}")
            for key, empty in module.state_dict().items()
        }
        module.load_state_dict(state, assign=True, strict=True)
        return stored

    def expert(
        self, module: nn.Module, index: int, number: int, places: Mapping[str, Place]
    ) -> dict[str, Tensor]:
        """Return the parameters of one expert of a block, ``[1, ...]`` each, by their names in it; errors as `read`.

        ``places``: where its linears lie in the stacks.
        """
        block, kind = self._model_layout.block_name(index), self._model_layout.layers[index]
        found = {}
        for key, empty in _stacked(kind, module).items():
            name = f"{block}.{key}"
            if name in self._model_layout.by_name:
                found[key] = self._read_rows(name, number)
            else:
                found[key] = torch.full((1, *empty.shape[1:]), torch.nan, device=self._device)
        for linear, place in places.items():
            if f"{block}.{linear}.weight" in self._model_layout.by_name:
                matrix = place.stack.matrix(found[place.stack.parameter], place.position, 0)
                matrix.copy_(self.read(f"{block}.{linear}.weight"))
        return found

    def _read_rows(self, name: str, row: int) -> Tensor:
        """Return one row of a tensor as float32, with its dimension; errors as `read`."""
        stored = self._model_layout.by_name[name].header.name
        tensor = self._source.read_rows(stored, row, row + 1)
        scan_finite(stored, tensor)
        return tensor.to(self._device, torch.float32, copy=True)

    def read(self, name: str) -> Tensor:
        """Return a tensor by its canonical name as float32 (integers stay); raise InputError where it is not finite."""
        if name not in self._model_layout.by_name and self._names is not None:
            return self._names.make(self._names.sources[name], self._read_stored)[name]
        return self._read_stored(self._model_layout.by_name[name].header.name)

    def _read_stored(self, stored: str) -> Tensor:
        return _read(self._source, stored, self._device)

    def rows(self, name: str, rows: Tensor) -> Tensor:
        """Gather rows of a matrix as float32, ``rows`` ascending, reading it in strips."""
        stored = self._model_layout.by_name[name].header
        return _gathered(self._source, stored.name, stored.shape, rows).to(self._device)


class WholeWeights:
    """Reader of a checkpoint's weights as float32 by the names of the whole running model, towers included."""

    def __init__(self, source: TensorSource, names: WeightMapping, device: torch.device) -> None:
        """Read from a checkpoint to a device by ``names`` of the whole model."""
        self._source, self._names, self._device = source, names, device

    def read(self, name: str) -> Tensor | None:
        """Return a parameter or buffer, None where it is in no file; InputError where it is not finite."""
        name = self._names.tied.get(name, name)
        if name not in self._names.sources:
            return None
        return self._names.make(self._names.sources[name], self._read)[name]

    def rows(self, name: str, rows: Tensor) -> Tensor:
        """Gather rows of a matrix, ``rows`` ascending; a matrix that is converted is read whole."""
        name = self._names.tied.get(name, name)
        source = self._names.sources[name]
        if source.rule is not None:
            return self._names.make(source, self._read)[name][rows]
        (stored,) = source.stored
        shape = self._names.shape(stored)
        return _gathered(self._source, stored, shape, rows).to(self._device)

    def _read(self, stored: str) -> Tensor:
        return _read(self._source, stored, self._device)


class EmbeddingRows:
    """Embedding that holds only the rows of tokens that occur; thread-safe.

    The model looks its tokens up by their own numbers, as ever; before it does, they are renumbered to the rows that
    are held. Rows of a token that comes up later, a padding token that the model puts in, are read then.

    Args:
        module: the embedding, which is empty.
        read: returns the rows of ascending tokens.
        tokens: that occur, ascending, or few of them.
        stack: takes the hook that renumbers.
    """

    def __init__(
        self, module: nn.Module, read: Callable[[Tensor], Tensor], tokens: Tensor, stack: ExitStack
    ) -> None:
        self._module, self._read, self._tokens = module, read, tokens
        self._lock = threading.Lock()
        setattr(module, "padding_idx", None)  # noqa: B010  # of any class that embeds
        module.weight = parameter(read(tokens))
        handle = module.register_forward_pre_hook(self._renumber, with_kwargs=True)
        stack.callback(handle.remove)
        stack.callback(empty, module)

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


def is_lookup(module: nn.Module) -> bool:
    """Return whether a module is an embedding that is called with tokens alone."""
    if not isinstance(module, nn.Embedding):
        return False
    taken = list(inspect.signature(type(module).forward).parameters)
    return taken[1:] in (["input"], ["input_ids"])


def _read(source: TensorSource, name: str, device: torch.device) -> Tensor:
    tensor = source.read(name)
    scan_finite(name, tensor)
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype  # tables of numbers stay
    # A copy even of a float32 tensor: the source may hand out what it keeps.
    return tensor.to(device, dtype, copy=True)


def _gathered(source: TensorSource, name: str, shape: tuple[int, ...], rows: Tensor) -> Tensor:
    """Gather rows of a stored matrix as float32, ``rows`` ascending, reading it in strips."""
    count = shape[0]
    step = max(1, CHUNK_BYTES * count // (4 * math.prod(shape)))
    found = [torch.empty(0, *shape[1:])]
    for first in range(0, count, step):
        last = min(first + step, count)
        wanted = rows[(rows >= first) & (rows < last)] - first
        if len(wanted):
            found.append(source.read_rows(name, first, last)[wanted].float())
    return torch.cat(found)


def _stacked(kind: LayerKind, module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a block that hold data of all experts, by name."""
    paths = {stack.parameter.rpartition(".")[0] for stack in kind.stacks}
    return {
        key: value for key, value in module.state_dict().items() if key.rpartition(".")[0] in paths
    }


def parameter(value: Tensor) -> nn.Parameter:
    """Return a parameter without gradient."""
    return nn.Parameter(value, requires_grad=False)


def empty(module: nn.Module) -> None:
    """Free the weights of a module by moving them to the meta device."""
    for child in module.modules():
        for name, value in child.named_parameters(recurse=False):
            setattr(child, name, parameter(torch.empty_like(value, device="meta")))
