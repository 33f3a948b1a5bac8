"""Convert a plan's tensors to the stored tensors of a format, and back.

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
from quantforge.formats.gguf import deinterleave_rotary_rows, interleave_rotary_rows
from quantforge.plans import TensorPlan

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor


class Storage:
    """Conversion of tensors for the safetensors formats: linears as the format packs them, other tensors unchanged."""

    def __init__(self, file_format: Format) -> None:
        self._format = file_format

    def pack(self, plan: TensorPlan, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the stored tensors of a quantized weight (all of it, or some of its rows) by name."""
        module = plan.name.removesuffix(".weight")
        if plan.codes_transposed:
            return pack_transposed(module, tensor)
        return self._format.pack(module, tensor)

    def unpack(self, plan: TensorPlan, outputs: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the quantized tensor for stored tensors, with the scheme in which the format holds it."""
        assert plan.scheme is not None
        weight = self._format.stored_scheme(plan.scheme.weight, plan.matrix)
        layout = ModuleLayout(
            plan.name.removesuffix(".weight"),
            replace(plan.scheme, weight=weight),
            plan.matrix,
            tuple(outputs),
            transposed=plan.codes_transposed,
        )
        return self._format.unpack(layout, outputs)

    def needs_whole_tensor(self, plan: TensorPlan) -> bool:
        """Return whether an unquantized tensor must be written whole, not in strips of rows."""
        del plan
        return False

    def convert_unquantized(self, plan: TensorPlan, value: Tensor) -> Tensor:
        """Return an unquantized tensor, or some of its rows, in the dtype in which it is stored."""
        return value.to(torch_dtype(plan.outputs[0].dtype))

    def restore_unquantized(self, plan: TensorPlan, output: Tensor) -> Tensor:
        """Return an unquantized tensor as the source has it: the inverse of `convert_unquantized`."""
        del plan
        return output


class GgufStorage(Storage):
    """Conversion of tensors for a GGUF file: ggml blocks in llama.cpp's row order, other tensors in planned dtypes."""

    def pack(self, plan: TensorPlan, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the rows as ggml blocks, uint8 ``[rows, bytes per row]``; integers become the equivalent ggml type."""
        from quantforge.packers.ggml.blocks import pack_blocks

        assert plan.scheme is not None
        blocks = pack_blocks(replace(tensor, scheme=plan.scheme.weight))
        heads = plan.heads * len(tensor.codes) // plan.matrix[0]  # those of a run of rows
        return {plan.outputs[0].name: interleave_rotary_rows(blocks, heads)}

    def unpack(self, plan: TensorPlan, outputs: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return codes and parameters of the blocks, in the source's row order."""
        ordered = {
            name: deinterleave_rotary_rows(blocks, plan.heads) for name, blocks in outputs.items()
        }
        return super().unpack(plan, ordered)

    def needs_whole_tensor(self, plan: TensorPlan) -> bool:
        """Return whether a tensor is reordered, transposed or split, so that it cannot be written in strips."""
        return bool(plan.heads) or plan.transposed or len(plan.outputs) > 1

    def convert_unquantized(self, plan: TensorPlan, value: Tensor) -> Tensor:
        """Return the tensor as the file stores it: transposed, reordered and cast as planned.

        Raises:
            RefusedError: a value is beyond the type.
        """
        output = plan.outputs[0]
        if plan.transposed:
            value = value.T.contiguous()
        if plan.plus_one:
            value = value.float() + 1
        if plan.negate_exp:
            value = -value.float().exp()
        if math.prod(output.shape) == value.numel():  # a convolution has a dimension of one
            value = value.reshape(output.shape)
        converted = interleave_rotary_rows(value.to(torch_dtype(output.dtype)), plan.heads)
        if output.dtype == "F16" and not bool(converted.isfinite().all()):
            raise RefusedError(
                f"{plan.name}: a value is beyond the range of float16",
                f"--rule '{plan.name.removesuffix('.weight')}=keep', or --type BF16",
                tensor=plan.name,
            )
        return converted

    def restore_unquantized(self, plan: TensorPlan, output: Tensor) -> Tensor:
        """Return the tensor as the source has it; bit-exact only where `convert_unquantized` computed nothing."""
        value = deinterleave_rotary_rows(output, plan.heads)
        if plan.plus_one:
            value = value - 1
        if plan.negate_exp:
            value = (-value).log()
        if plan.transposed:
            value = value.T.contiguous()
        return value.to(torch_dtype(plan.dtype)).reshape(plan.shape)


def get_storage(key: str) -> Storage:
    """Return the tensor conversion of a format."""
    return GgufStorage(load_format(key)) if key == GGUF else Storage(load_format(key))
