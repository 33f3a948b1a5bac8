"""Size statistics of a model for reports: bits per weight, bytes, schemes, and kernels with their share of weights.

Stored sizes are computed from the headers of the model files, sizes in memory from the modules of the loaded model.
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
from quantforge.model.model_parts import output_layer
from quantforge.plans import StoredTensor
from quantforge.runtime.linear import PackedWeights
from quantforge.runtime.packed_experts import PackedExperts, holds_experts
from quantforge.runtime.tensor_parallel import WeightShard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DENSE = "dense"
MAX_REPACKING = 1.1  # largest ratio of the bytes in a kernel's layout to the bytes in the files


def stored_sizes(
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
) -> tuple[float, float, int]:
    """Return stored bits per quantized weight, stored bits per weight of the whole model, and stored bytes."""
    weights = packed_weights = total_bytes = packed_bytes = 0
    for tensor in model_layout.tensors:
        count = math.prod(tensor.header.shape)
        layout = layouts.get(tensor.header.name.removesuffix(".weight"))
        tensor_names = layout.tensor_names if layout else (tensor.header.name,)
        nbytes = sum(stored[name].nbytes for name in tensor_names)
        weights, total_bytes = weights + count, total_bytes + nbytes
        if layout:
            packed_weights, packed_bytes = packed_weights + count, packed_bytes + nbytes
    bits_total = 8 * total_bytes / weights
    return (
        (8 * packed_bytes / packed_weights if packed_weights else bits_total),
        bits_total,
        total_bytes,
    )


def max_held_bytes(
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    decoded: Container[str] = (),
    shards: Mapping[str, WeightShard] | None = None,
) -> tuple[int, int]:
    """Return an upper bound of the bytes that the loaded model will take in memory, and its number of weights.

    Args:
        model_layout: the tensors of the checkpoint.
        layouts: the quantized linears, by module name.
        stored: the stored tensors, by name.
        dtype: type of activations and plain weights.
        decoded: names of quantized weights that will be decoded to plain ones.
        shards: tensors of which this process holds only a part.
    """
    total_bytes = weights = 0
    shards = shards or {}
    for tensor in model_layout.tensors:
        count = math.prod(tensor.header.shape)
        layout = layouts.get(tensor.header.name.removesuffix(".weight"))
        weights += count
        size = 0
        if layout is not None and tensor.header.name not in decoded:
            # TQ1_0 packs five to a byte, kernels four
            codes = count * layout.scheme.weight.weight_bits // 8
            size = int(
                MAX_REPACKING
                * max(codes, sum(stored[tensor_name].nbytes for tensor_name in layout.tensor_names))
            )
        elif tensor.role is not Role.FOREIGN:
            size = count * dtype.itemsize
        total_bytes += size // (shards[tensor.name].share.ranks if tensor.name in shards else 1)
    return total_bytes, weights


def scheme_shares(layouts: Mapping[str, ModuleLayout], dtype: str) -> str:
    """Describe the schemes of the quantized linears: one name, or each with its share of the weights, largest first.

    Returns ``dtype`` if nothing is quantized.
    """
    counts: Counter[str] = Counter()
    for layout in layouts.values():
        counts[str(layout.scheme)] += math.prod(layout.shape)
    if len(counts) < 2:
        return next(iter(counts), dtype.lower())
    total = counts.total()
    return ", ".join(f"{name} {count / total:.0%}" for name, count in counts.most_common())


def _linear_kernels(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield kernel name and number of weights of every linear layer and stack of experts, output head included."""
    for module in model.modules():
        if isinstance(module, PackedWeights):
            yield module.kernel, module.weights
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield DENSE, module.weight.numel()
        elif holds_experts(module):
            stacks = (value for value in module.parameters(recurse=False) if value.dim() == 3)
            yield DENSE, sum(value.numel() for value in stacks)


def kernel_shares(model: PreTrainedModel) -> dict[str, float]:
    """Return each kernel with its share of the weights of linear layers, largest first."""
    counts: Counter[str] = Counter()
    for kernel, weights in _linear_kernels(model):
        counts[kernel] += weights
    return {name: count / counts.total() for name, count in counts.most_common()}


def held_bytes(model: nn.Module) -> int:
    """Return the bytes that the weights of a module take in memory."""
    packed = (module for module in model.modules() if isinstance(module, PackedWeights))
    plain_bytes: int = sum(value.nbytes for value in model.parameters())
    return plain_bytes + sum(module.weight_bytes for module in packed)


def bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of weights that are read to compute one token.

    These are all weights except the embedding table (a token reads one row) and the experts that it is not routed to.
    """
    embedding: Tensor = model.get_input_embeddings().weight
    head = output_layer(model)
    unread_bytes = 0.0 if getattr(head, "weight", None) is embedding else embedding.nbytes
    for name, fraction in active_expert_fractions(model).items():
        unread_bytes += (1 - fraction) * held_bytes(model.get_submodule(name))
    return held_bytes(model) - round(unread_bytes)


_TOP_K_KEYS = ("top_k", "num_experts_per_tok", "num_experts_per_token")


def active_expert_fractions(model: PreTrainedModel) -> dict[str, float]:
    """Return, for every experts module by name, the fraction of its experts that a token is routed to.

    It is read from ``top_k`` or ``num_experts_per_tok`` of the mixture, its router or the configuration; else 1.0.
    """
    fractions = {}
    for name, module in model.named_modules():
        if not isinstance(module, PackedExperts) and not holds_experts(module):
            continue
        experts: Any = module
        mixture = model.get_submodule(name.rpartition(".")[0])
        if isinstance(mixture, PackedExperts):  # the module that it replaced holds biases at most
            continue
        owners = [mixture, *mixture.children(), model.config.get_text_config()]
        counts = (getattr(owner, key, None) for owner in owners for key in _TOP_K_KEYS)
        count = next((value for value in counts if type(value) is int and value > 0), None)
        total = experts.num_experts
        fractions[name] = 1.0 if count is None else min(1.0, count / total)
    return fractions
