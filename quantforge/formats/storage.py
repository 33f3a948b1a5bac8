"""Storage of a plan's tensors in the files of a format.

The formats in safetensors have a few stored tensors for each quantized module and leave all other tensors as the source
has them (`ByModule`). GGUF transposes, reorders and converts tensors on their way (`quantforge.formats.gguf`).
A run does not need to know which: it hands over the tensors that it made, and asks for the tensors that it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quantforge.formats import GGUF, Format, ModuleLayout, format_of
from quantforge.formats.compressed_tensors.linears import pack_transposed
from quantforge.formats.gguf import STORAGE
from quantforge.plans import TensorPlan

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor


class Storage(Protocol):
    """Interface of a format towards a run."""

    def pack(self, plan: TensorPlan, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the stored tensors of a quantized one, whole or a run of its rows."""

    def unpack(self, plan: TensorPlan, stored: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the quantized tensor that `pack` was given."""

    def whole(self, plan: TensorPlan) -> bool:
        """Return whether a kept tensor has to be handed over whole, not in runs of rows."""

    def keep(self, plan: TensorPlan, value: Tensor) -> Tensor:
        """Return what is stored for a kept tensor, or for a run of its rows."""

    def kept(self, plan: TensorPlan, stored: Tensor) -> Tensor:
        """Return the kept tensor that `keep` was given, as the source has it."""


class ByModule:
    """A quantized module is stored as its format says, everything else as it is."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def pack(self, plan: TensorPlan, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the tensors as the format packs them."""
        module = plan.name.removesuffix(".weight")
        if plan.turned:
            return pack_transposed(module, tensor)
        return self._form.pack(module, tensor)

    def unpack(self, plan: TensorPlan, stored: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the tensor as the format unpacks it, with the scheme that it natively has."""
        assert plan.scheme is not None
        weight = self._form.native(plan.scheme.weight, plan.matrix)
        layout = ModuleLayout(
            plan.name.removesuffix(".weight"),
            replace(plan.scheme, weight=weight),
            plan.matrix,
            tuple(item.name for item in plan.stored),
            turned=plan.turned,
        )
        return self._form.unpack(layout, stored)

    def whole(self, plan: TensorPlan) -> bool:
        """Return False: rows are independent."""
        del plan
        return False

    def keep(self, plan: TensorPlan, value: Tensor) -> Tensor:
        """Return the tensor as it is."""
        del plan
        return value

    def kept(self, plan: TensorPlan, stored: Tensor) -> Tensor:
        """Return the tensor as it is."""
        del plan
        return stored


def storage_of(key: str) -> Storage:
    """Return the storage of a format by its key."""
    return STORAGE if key == GGUF else ByModule(format_of(key))
