"""Tensors of the source as a run reads them: by their plans, looked through for what is not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.architectures.matched import Matched
from quantforge.checkpoint.finite_values import scan_finite
from quantforge.checkpoint.reader import Checkpoint
from quantforge.plans import TensorPlan


class SourceTensors:
    """The tensors of a checkpoint; every reading raises `InputError` for a value that is not finite.

    Attributes:
        device: where weights are put.
    """

    def __init__(self, checkpoint: Checkpoint, matched: Matched, device: str) -> None:
        self._checkpoint, self._matched = checkpoint, matched
        self.device = device

    def whole(self, tensor: TensorPlan) -> Tensor:
        """Return a tensor as it is stored."""
        name = self._name_of(tensor)
        value = self._checkpoint.read(name)
        scan_finite(name, value)
        return value

    def rows(self, tensor: TensorPlan, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` of a tensor as they are stored."""
        name = self._name_of(tensor)
        value = self._checkpoint.read_rows(name, first, last)
        scan_finite(name, value, first=first, rows=tensor.shape[0])
        return value

    def weight(self, tensor: TensorPlan) -> Tensor:
        """Return a weight as float32 ``[out_features, in_features]``."""
        weight = self.whole(tensor).to(self.device, torch.float32)
        return weight.T.contiguous() if tensor.transposed else weight

    def weight_rows(self, tensor: TensorPlan, first: int, last: int) -> Tensor:
        """Return rows of a weight that is not transposed, as float32."""
        return self.rows(tensor, first, last).to(self.device, torch.float32)

    def _name_of(self, tensor: TensorPlan) -> str:
        """Return the name of a tensor in the source; a head that is untied from now on is read from the embedding."""
        if tensor.name in self._checkpoint.entries:
            return tensor.name
        architecture = self._matched.architecture
        assert architecture is not None  # only declared models have tied heads to untie
        return self._matched.by_name[f"{architecture.embedding}.weight"].stored.name
