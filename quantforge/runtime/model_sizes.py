"""Figures of a model for reports: bits per weight, bytes, schemes, and which kernel multiplies how much of it.

What is stored is counted from the headers of its files; what is held in memory, from the modules of the loaded model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures.match import ModelLayout, Role
from quantforge.formats import ModuleLayout
from quantforge.model.model_parts import head_of
from quantforge.plans import StoredTensor
from quantforge.runtime.linear import PackedWeights
from quantforge.runtime.packed_experts import PackedExperts, holds_experts
from quantforge.runtime.tensor_parallel import Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DENSE = "dense"
PACKING = 1.1  # most that kernels add to the bytes of the files


def stored_sizes(
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
) -> tuple[float, float, int]:
    """Return bits per quantized weight, bits per weight, and bytes, as stored."""
    weights = packed_weights = size = packed_size = 0
    for tensor in model_layout.tensors:
        count = math.prod(tensor.header.shape)
        layout = layouts.get(tensor.header.name.removesuffix(".weight"))
        parts = layout.tensor_names if layout else (tensor.header.name,)
        nbytes = sum(stored[part].nbytes for part in parts)
        weights, size = weights + count, size + nbytes
        if layout:
            packed_weights, packed_size = packed_weights + count, packed_size + nbytes
    total = 8 * size / weights
    return (8 * packed_size / packed_weights if packed_weights else total), total, size


def most_held(
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    decoded: Container[str] = (),
    cuts: Mapping[str, Cut] | None = None,
) -> tuple[int, int]:
    """Return the most bytes that the loaded model will hold, ``decoded`` weights plain, and the number of weights.

    Of tensors with ``cuts`` this process holds its part alone.
    """
    needed = weights = 0
    cuts = cuts or {}
    for tensor in model_layout.tensors:
        count = math.prod(tensor.header.shape)
        layout = layouts.get(tensor.header.name.removesuffix(".weight"))
        weights += count
        size = 0
        if layout is not None and tensor.header.name not in decoded:
            codes = (
                count * layout.scheme.weight.weight_bits // 8
            )  # TQ1_0 packs five to a byte, kernels four
            size = int(
                PACKING * max(codes, sum(stored[part].nbytes for part in layout.tensor_names))
            )
        elif tensor.role is not Role.FOREIGN:
            size = count * dtype.itemsize
        needed += size // (cuts[tensor.name].share.ranks if tensor.name in cuts else 1)
    return needed, weights


def scheme_shares(layouts: Mapping[str, ModuleLayout], dtype: str) -> str:
    """Name the scheme of all quantized linears, or each with its share, largest first; ``dtype`` without any."""
    counts: Counter[str] = Counter()
    for layout in layouts.values():
        counts[str(layout.scheme)] += math.prod(layout.shape)
    if len(counts) < 2:
        return next(iter(counts), dtype.lower())
    total = counts.total()
    return ", ".join(f"{name} {count / total:.0%}" for name, count in counts.most_common())


def _products(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield the kernel and the number of weights of every linear layer and stack of experts, the head included."""
    for module in model.modules():
        if isinstance(module, PackedWeights):
            yield module.kernel, module.weights
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield DENSE, module.weight.numel()
        elif holds_experts(module):
            stacks = (value for value in module.parameters(recurse=False) if value.dim() == 3)
            yield DENSE, sum(value.numel() for value in stacks)


def kernel_shares(model: PreTrainedModel) -> dict[str, float]:
    """Return the share of the weights of linear layers that each kernel multiplies, largest first."""
    counts: Counter[str] = Counter()
    for kernel, weights in _products(model):
        counts[kernel] += weights
    return {name: count / counts.total() for name, count in counts.most_common()}


def held_bytes(model: nn.Module) -> int:
    """Return the bytes that all weights of a model, or of a part of it, take in memory."""
    packed = (module for module in model.modules() if isinstance(module, PackedWeights))
    plain: int = sum(value.nbytes for value in model.parameters())
    return plain + sum(module.weight_bytes for module in packed)


def bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that a token is multiplied by.

    That is all of them, but for an embedding of which a token reads one row, and for experts that it is not sent to.
    """
    table: Tensor = model.get_input_embeddings().weight
    head = head_of(model)
    unread = 0.0 if getattr(head, "weight", None) is table else table.nbytes
    for name, share in active_shares(model).items():
        unread += (1 - share) * held_bytes(model.get_submodule(name))
    return held_bytes(model) - round(unread)


_COUNTS = ("top_k", "num_experts_per_tok", "num_experts_per_token")


def active_shares(model: PreTrainedModel) -> dict[str, float]:
    """Return by the name of every experts module the share of its experts that one token is sent to.

    The number is what the mixture, its router or the configuration calls ``top_k`` or ``num_experts_per_tok``; 1.0
    where none says it.
    """
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, PackedExperts) and not holds_experts(module):
            continue
        experts: Any = module
        mixture = model.get_submodule(name.rpartition(".")[0])
        if isinstance(mixture, PackedExperts):  # the module that it replaced holds biases at most
            continue
        places = [mixture, *mixture.children(), model.config.get_text_config()]
        counts = (getattr(place, key, None) for place in places for key in _COUNTS)
        count = next((value for value in counts if type(value) is int and value > 0), None)
        total = experts.num_experts
        found[name] = 1.0 if count is None else min(1.0, count / total)
    return found
