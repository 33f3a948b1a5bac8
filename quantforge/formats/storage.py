"""Storage of a plan's tensors in the files of a format, and back.

The formats in safetensors have a few stored tensors for each quantized module and leave all other tensors as the source
has them. GGUF transposes, reorders and converts tensors on their way. A run does not need to know which: it hands over
the tensors that it made, and asks for the tensors that it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.errors import RefusedError
from quantforge.files.safetensors import torch_dtype
from quantforge.formats import GGUF, Format, ModuleLayout, load_format
from quantforge.formats.compressed_tensors.linears import pack_transposed
from quantforge.formats.gguf import halves, interleaved
from quantforge.plans import TensorPlan

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor


class Storage:
    """Storage module by module: a quantized module as its format packs it, everything else as it is."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def pack(self, plan: TensorPlan, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the outputs of a quantized tensor by name, whole or a run of its rows."""
        module = plan.name.removesuffix(".weight")
        if plan.turned:
            return pack_transposed(module, tensor)
        return self._form.pack(module, tensor)

    def unpack(self, plan: TensorPlan, outputs: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the quantized tensor that `pack` was given, with the scheme in which the format holds it."""
        assert plan.scheme is not None
        weight = self._form.stored_scheme(plan.scheme.weight, plan.matrix)
        layout = ModuleLayout(
            plan.name.removesuffix(".weight"),
            replace(plan.scheme, weight=weight),
            plan.matrix,
            tuple(outputs),
            transposed=plan.turned,
        )
        return self._form.unpack(layout, outputs)

    def whole(self, plan: TensorPlan) -> bool:
        """Return whether a kept tensor has to be handed over whole, not in runs of rows."""
        del plan
        return False

    def keep(self, plan: TensorPlan, value: Tensor) -> Tensor:
        """Return a kept tensor, or a run of its rows, in the type in which it is written."""
        return value.to(torch_dtype(plan.outputs[0].dtype))

    def kept(self, plan: TensorPlan, output: Tensor) -> Tensor:
        """Return the kept tensor that `keep` was given, as the source has it."""
        del plan
        return output


class GgufStorage(Storage):
    """Storage in a GGUF file: blocks of rows, in llama.cpp's order, and all else in the type that the plan says."""

    def pack(self, plan: TensorPlan, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the rows as blocks, uint8 ``[rows, bytes of a row]``; integers by the ggml type that they are."""
        from quantforge.packers.ggml.blocks import to_blocks

        assert plan.scheme is not None
        blocks = to_blocks(replace(tensor, scheme=plan.scheme.weight))
        heads = plan.heads * len(tensor.codes) // plan.matrix[0]  # those of a run of rows
        return {plan.outputs[0].name: interleaved(blocks, heads)}

    def unpack(self, plan: TensorPlan, outputs: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return codes and parameters of the blocks, in the order of the source's rows."""
        ordered = {name: halves(blocks, plan.heads) for name, blocks in outputs.items()}
        return super().unpack(plan, ordered)

    def whole(self, plan: TensorPlan) -> bool:
        """Return True for tensors that are reordered, turned or cut."""
        return bool(plan.heads) or plan.transposed or len(plan.outputs) > 1

    def keep(self, plan: TensorPlan, value: Tensor) -> Tensor:
        """Return the tensor in the type of the file.

        Raises:
            RefusedError: a value is beyond the type.
        """
        output = plan.outputs[0]
        if plan.transposed:
            value = value.T.contiguous()
        if plan.plus_one:
            value = value.float() + 1
        if plan.decay:
            value = -value.float().exp()
        if math.prod(output.shape) == value.numel():  # a convolution has a dimension of one
            value = value.reshape(output.shape)
        converted = interleaved(value.to(torch_dtype(output.dtype)), plan.heads)
        if output.dtype == "F16" and not bool(converted.isfinite().all()):
            raise RefusedError(
                f"{plan.name}: a value is beyond the range of float16",
                f"--rule '{plan.name.removesuffix('.weight')}=keep', or --type BF16",
                tensor=plan.name,
            )
        return converted

    def kept(self, plan: TensorPlan, output: Tensor) -> Tensor:
        """Return the tensor as the source has it, to the bit only where nothing was computed; see `keep`."""
        value = halves(output, plan.heads)
        if plan.plus_one:
            value = value - 1
        if plan.decay:
            value = (-value).log()
        if plan.transposed:
            value = value.T.contiguous()
        return value.to(torch_dtype(plan.dtype)).reshape(plan.shape)


def storage_of(key: str) -> Storage:
    """Return the storage of a format by its key."""
    return GgufStorage(load_format(key)) if key == GGUF else Storage(load_format(key))
