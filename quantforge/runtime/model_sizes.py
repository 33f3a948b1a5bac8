"""Figures of a model for reports: bits per weight, bytes, schemes, and which kernel multiplies how much of it.

What is stored is counted from the headers of its files; what is held in memory, from the modules of the loaded model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched, Role
from quantforge.formats import ModuleLayout
from quantforge.plans import StoredTensor
from quantforge.runtime.fill_skeleton import module_of
from quantforge.runtime.linear import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DENSE = "dense"
PACKING = 1.1  # most that kernels add to the bytes of the files


def stored_sizes(
    matched: Matched, layouts: Mapping[str, ModuleLayout], stored: Mapping[str, StoredTensor]
) -> tuple[float, float, int]:
    """Return bits per quantized weight, bits per weight, and bytes, as stored."""
    weights = packed_weights = size = packed_size = 0
    for tensor in matched.tensors:
        count = math.prod(tensor.stored.shape)
        layout = layouts.get(module_of(tensor.stored.name))
        parts = layout.stored if layout else (tensor.stored.name,)
        nbytes = sum(stored[part].nbytes for part in parts)
        weights, size = weights + count, size + nbytes
        if layout:
            packed_weights, packed_size = packed_weights + count, packed_size + nbytes
    total = 8 * size / weights
    return (8 * packed_size / packed_weights if packed_weights else total), total, size


def most_held(
    matched: Matched,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Return the most bytes that the loaded model will hold, and the number of its weights."""
    needed = weights = 0
    for tensor in matched.tensors:
        count = math.prod(tensor.stored.shape)
        layout = layouts.get(module_of(tensor.stored.name))
        weights += count
        if layout is not None and tensor.role is not Role.EMBEDDING and tensor.expert < 0:
            needed += int(PACKING * sum(stored[part].nbytes for part in layout.stored))
        elif tensor.role is not Role.FOREIGN:
            needed += count * dtype.itemsize
    return needed, weights


def scheme_shares(layouts: Mapping[str, ModuleLayout], dtype: str) -> str:
    """Name the scheme of all quantized linears, or each with its share, largest first."""
    counts: Counter[str] = Counter()
    for layout in layouts.values():
        counts[str(layout.scheme)] += math.prod(layout.shape)
    if len(counts) < 2:
        return next(iter(counts), dtype.lower())
    total = counts.total()
    return ", ".join(f"{name} {count / total:.0%}" for name, count in counts.most_common())


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield the kernel and the number of weights of every linear layer, the head included."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            yield module.kernel, module.weights
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield DENSE, module.weight.numel()


def kernel_shares(model: PreTrainedModel) -> dict[str, float]:
    """Return the share of the weights of linear layers that each kernel multiplies, largest first."""
    counts: Counter[str] = Counter()
    for kernel, weights in _linears(model):
        counts[kernel] += weights
    return {name: count / counts.total() for name, count in counts.most_common()}


def bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of all weights, without an embedding of which a token reads one row."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    held: int = sum(value.nbytes for value in model.parameters())
    table: Tensor = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    unread = 0 if getattr(head, "weight", None) is table else table.nbytes
    return held - unread + sum(module.weight_bytes for module in packed)
