"""Weights that come and go: modules of a skeleton filled from a checkpoint, in float32, and emptied again.

Names are those of the declarations. Where the running model holds all experts of a block in one parameter and the files
hold them one by one, their matrices are read into it one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched, declared
from quantforge.checkpoint.reader import scan_finite
from quantforge.numerics.allocator import CHUNK_BYTES
from quantforge.plans import StoredTensor


class TensorSource(Protocol):
    """Interface of a checkpoint towards a stream."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the content of ``config.json``."""

    def read(self, name: str) -> Tensor:
        """Return a tensor by its stored name, in its stored type."""

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` of a tensor."""


class ModuleWeights:
    """The weights of a checkpoint, read into modules on a device."""

    def __init__(
        self, source: TensorSource, matched: Matched, device: str | torch.device = "cpu"
    ) -> None:
        self._source = source
        self._matched = matched
        self._device = torch.device(device)
        self._architecture, _ = declared(matched)

    def fill(self, module: nn.Module, name: str) -> None:
        """Fill a module outside of the blocks; ``name`` is its canonical one."""
        state = {key: self.read(f"{name}.{key}") for key in module.state_dict()}
        module.load_state_dict(state, assign=True, strict=True)

    def fill_block(self, module: nn.Module, index: int) -> dict[str, StoredTensor]:
        """Fill a block, and return where its tensors are stored, by their declared names relative to it."""
        block = self._matched.block_name(index)
        kind = self._matched.layers[index]
        stored = {
            item.name: self._matched.by_name[f"{block}.{item.name}"].stored
            for item in kind.parameters
            if f"{block}.{item.name}" in self._matched.by_name
        }
        state = {}
        for key, empty in module.state_dict().items():
            state[key] = (
                self.read(f"{block}.{key}")
                if key in stored
                else torch.full(empty.shape, torch.nan, device=self._device)
            )
        for linear, place in kind.places().items():
            if place.stack.parameter not in stored:
                matrix = place.view(state[place.stack.parameter])
                matrix.copy_(self.read(f"{block}.{linear}.weight"))
        module.load_state_dict(state, assign=True, strict=True)
        return stored

    def read(self, name: str) -> Tensor:
        """Return a tensor by its canonical name as float32; raise InputError where it is not finite."""
        stored = self._matched.by_name[name].stored.name
        tensor = self._source.read(stored)
        scan_finite(stored, tensor)
        # A copy even of a float32 tensor: the source may hand out what it keeps.
        return tensor.to(self._device, torch.float32, copy=True)

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        """Gather rows of the embedding, ``tokens`` ascending, reading it in runs of rows."""
        stored = self._matched.by_name[f"{self._architecture.embedding}.weight"].stored
        step = max(1, CHUNK_BYTES * stored.shape[0] // stored.nbytes)
        found = []
        for first in range(0, stored.shape[0], step):
            last = min(first + step, stored.shape[0])
            wanted = tokens[(tokens >= first) & (tokens < last)] - first
            if len(wanted):
                found.append(self._source.read_rows(stored.name, first, last)[wanted].float())
        return torch.cat(found)


def parameter(value: Tensor) -> nn.Parameter:
    """Return a parameter without gradient."""
    return nn.Parameter(value, requires_grad=False)


def empty(module: nn.Module) -> None:
    """Let go of the weights of a module: back to the meta device."""
    for child in module.modules():
        for name, value in child.named_parameters(recurse=False):
            setattr(child, name, parameter(torch.empty_like(value, device="meta")))
