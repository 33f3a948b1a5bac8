"""Count the bytes of weights of a planned model: in memory, and read by one decoding step.

A step reads every matrix once, whatever the number of sequences, except the embedding (one row per token), towers and
draft heads, and experts that no token of the step is routed to. A token is routed to ``k`` of ``n`` experts; with ``b``
tokens that are routed independently, an expert is read with probability ``1 - (1 - k / n)^b``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantforge.architectures.match import ModelLayout, Role
from quantforge.plans import Action, Plan, TensorPlan

EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k_experts",
)
_MATRIX_RANK, _STACK_RANK = 2, 3  # dimensions


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """Bytes and numbers of weights in memory and in use.

    Attributes:
        held: bytes of all weights in memory.
        dense_bytes, dense_weights: bytes that every step reads, and the number of these weights.
        routed_bytes, routed_weights: bytes and number of the weights of all experts.
        share: share of the experts that one token is routed to; 1 without experts or if unknown.
        max_layer_values: largest number of values per token that linears with the same input read and produce, in any
            block.
    """

    held: int
    dense_bytes: int
    dense_weights: int
    routed_bytes: int
    routed_weights: int
    share: float
    max_layer_values: int

    def step_bytes(self, batch: int) -> float:
        """Return the bytes of weights that a decoding step of ``batch`` sequences reads."""
        return self.dense_bytes + self.routed_bytes * (1 - (1 - self.share) ** batch)

    @property
    def token_weights(self) -> float:
        """Return the number of weights that each token is multiplied by."""
        return self.dense_weights + self.routed_weights * self.share


def weight_traffic(plan: Plan, model_layout: ModelLayout) -> WeightTraffic:
    """Count the weights of a planned model."""
    tensors = [tensor for tensor in plan.tensors if tensor.action is not Action.DROP]
    roles = {tensor.header.name: tensor.role for tensor in model_layout.tensors}
    count = _expert_count(model_layout, tensors)
    routed_to = experts_per_token(model_layout)
    dense, routed = [0, 0], [0, 0]
    for tensor in tensors:
        role = roles.get(tensor.name, Role.OTHER)
        if role is Role.FOREIGN:
            continue
        counts = routed if _is_expert(tensor, count) else dense
        is_embedding = role is Role.EMBEDDING
        counts[0] += (
            _embedding_bytes_read(tensor, tied=model_layout.tied)
            if is_embedding
            else tensor.output_bytes
        )
        if len(tensor.shape) >= _MATRIX_RANK and (model_layout.tied or not is_embedding):
            counts[1] += math.prod(tensor.shape)
    read_share = expert_share(model_layout, tensors)
    total_bytes = sum(tensor.output_bytes for tensor in tensors)
    inputs = {tensor.header.name: tensor.shared_input for tensor in model_layout.tensors}
    widest = _widest_activation(tensors, inputs, count, routed_to)
    return WeightTraffic(total_bytes, dense[0], dense[1], routed[0], routed[1], read_share, widest)


def expert_share(model_layout: ModelLayout, tensors: Iterable[TensorPlan]) -> float:
    """Return the share of a layer's tokens that a router sends to one expert; 1 if unknown."""
    count, routed_to = _expert_count(model_layout, tensors), experts_per_token(model_layout)
    return min(1.0, routed_to / count) if routed_to and count else 1.0


def experts_per_token(model_layout: ModelLayout) -> int:
    """Return the number of experts that a token is routed to, 0 if unknown."""
    defaults = model_layout.architecture.defaults if model_layout.architecture else {}
    config = {**defaults, **model_layout.config}
    values = (config.get(key) for key in EXPERTS_PER_TOKEN_KEYS)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _expert_count(model_layout: ModelLayout, tensors: Iterable[TensorPlan]) -> int:
    """Return the number of experts in a layer, 0 without experts."""
    declared = (
        model_layout.dimensions.family_sizes.get("experts", 0) if model_layout.dimensions else 0
    )
    return declared if declared > 1 else 1 + max((tensor.expert for tensor in tensors), default=-1)


def _is_expert(tensor: TensorPlan, count: int) -> bool:
    """Return whether a tensor belongs to routed experts: to one of ``count``, or to all of them stacked."""
    if tensor.expert >= 0 or (tensor.block >= 0 and ".experts." in tensor.name):
        return True
    stacked = len(tensor.shape) == _STACK_RANK and tensor.shape[0] == count > 1
    return stacked and tensor.shape[1] > 1  # a convolution has one row for each channel


def _embedding_bytes_read(tensor: TensorPlan, *, tied: bool) -> int:
    """Return the bytes of the embedding that a step reads: all of it if it is tied to the head, else 0."""
    if not tied:
        return 0
    module = tensor.name.removesuffix(".weight")
    head_outputs = [item for item in tensor.outputs if not item.name.startswith(module)]
    return sum(item.nbytes for item in head_outputs) or tensor.output_bytes


def _widest_activation(
    tensors: Iterable[TensorPlan], inputs: Mapping[str, str], count: int, experts_per_token: int
) -> int:
    """Return the largest number of values per token that linears with the same input read and produce, in any block.

    Args:
        tensors: plans of all tensors.
        inputs: the shared input of each tensor, by name.
        count: number of experts in a layer.
        experts_per_token: number of experts that a token is routed to.
    """
    widths: dict[tuple[int, str], list[int]] = {}
    for tensor in tensors:
        expert = _is_expert(tensor, count)
        stacked = len(tensor.shape) == _STACK_RANK
        if tensor.block < 0 or not (len(tensor.shape) == _MATRIX_RANK or (stacked and expert)):
            continue
        out_features, in_features = tensor.shape[-2:] if stacked else tensor.matrix
        num_inputs = max(1, experts_per_token) if expert else 1
        width = widths.setdefault((tensor.block, inputs.get(tensor.name) or tensor.name), [0, 0])
        width[0] = max(width[0], in_features * num_inputs)
        width[1] += out_features * num_inputs
    return max((sum(width) for width in widths.values()), default=0)
