"""Tensors on their way into a GGUF file and back: turned, reordered, raised by one, converted.

The rows of q and k of the families that `families` calls interleaved are viewed as ``[heads, 2, width / 2, ...]`` and
their two middle axes swapped. Quantized rows are independent of each other, so it is their bytes that are reordered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.checkpoint.safetensors import torch_dtype
from quantforge.errors import RefusedError
from quantforge.formats.gguf import blocks_of
from quantforge.plans import TensorPlan

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor


class GgufStorage:
    """Storage of tensors in a GGUF file (`quantforge.formats.storage.Storage`)."""

    def pack(self, plan: TensorPlan, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the rows as blocks, ``uint8 [rows, bytes of a row]``."""
        from quantforge.packers.ggml.blocks import pack

        (stored,) = plan.stored
        blocks = replace(tensor, scheme=blocks_of(tensor.scheme))
        heads = plan.heads * len(tensor.codes) // plan.matrix[0]  # those of a run of rows
        return {stored.name: interleaved(pack(blocks), heads)}

    def unpack(self, plan: TensorPlan, stored: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return codes and parameters of the blocks."""
        from quantforge.packers.ggml.blocks import unpack

        assert plan.scheme is not None
        (raw,) = stored.values()
        return unpack(halves(raw, plan.heads), plan.scheme.weight)

    def whole(self, plan: TensorPlan) -> bool:
        """Return True for tensors that are reordered, turned or cut: they cannot be handed over in runs of rows."""
        return bool(plan.heads) or plan.transposed or len(plan.stored) > 1

    def keep(self, plan: TensorPlan, value: Tensor) -> Tensor:
        """Return the tensor in the type of the file.

        Raises:
            RefusedError: a value is beyond the type.
        """
        stored = plan.stored[0]
        if plan.transposed:
            value = value.T.contiguous()
        if plan.plus_one:
            value = value.float() + 1
        if plan.decay:
            value = -value.float().exp()
        if math.prod(stored.shape) == value.numel():  # a convolution has a dimension of one
            value = value.reshape(stored.shape)
        converted = interleaved(value.to(torch_dtype(stored.dtype)), plan.heads)
        if stored.dtype == "F16" and not bool(converted.isfinite().all()):
            raise RefusedError(
                f"{plan.name}: a value is beyond the range of float16",
                f"--rule '{plan.name.removesuffix('.weight')}=keep', or --type BF16",
                tensor=plan.name,
            )
        return converted

    def kept(self, plan: TensorPlan, stored: Tensor) -> Tensor:
        """Return the tensor as the source has it, to the bit only where nothing was computed; see `keep`."""
        value = halves(stored, plan.heads)
        if plan.plus_one:
            value = value - 1
        if plan.decay:
            value = (-value).log()
        if plan.transposed:
            value = value.T.contiguous()
        return value.to(torch_dtype(plan.dtype)).reshape(plan.shape)


STORAGE = GgufStorage()


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows ``[heads * width, ...]`` from halves to pairs; 0 heads: as they are."""
    return _swapped(rows, heads, 2) if heads else rows


def halves(rows: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`."""
    return _swapped(rows, heads, len(rows) // heads // 2) if heads else rows


def _swapped(rows: Tensor, heads: int, first: int) -> Tensor:
    shape = rows.shape
    return rows.reshape(heads, first, -1, *shape[1:]).transpose(1, 2).reshape(shape)
