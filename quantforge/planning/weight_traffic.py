"""Count the weights of a planned result in use: bytes in memory, and bytes that a decoding step reads.

A step reads every matrix once, whatever the number of sequences, but for the embedding, of which each token reads a
row, for towers and heads beside the decoder, and for experts that no token of the step is sent to. A token goes to
``k`` of ``n`` experts; of ``b`` tokens that choose independently, an expert is read with probability
``1 - (1 - k / n)^b``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantforge.architectures.match import ModelLayout, Role
from quantforge.plans import Action, Plan, TensorPlan

COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_MATRIX, _STACK = 2, 3  # dimensions


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """Bytes and numbers of weights.

    Attributes:
        held: bytes of all weights in memory.
        dense, dense_weights: bytes that every step reads, and how many weights these are.
        routed, routed_weights: likewise of the experts, all of them.
        share: of the experts that one token is routed to; 1 without experts or if unknown.
        widest: most values of one token that the linears of one input read and produce in a block.
    """

    held: int
    dense: int
    dense_weights: int
    routed: int
    routed_weights: int
    share: float
    widest: int

    def step_bytes(self, batch: int) -> float:
        """Return the bytes of weights that a step of ``batch`` sequences reads."""
        return self.dense + self.routed * (1 - (1 - self.share) ** batch)

    @property
    def token_weights(self) -> float:
        """Return how many weights a token is multiplied by."""
        return self.dense_weights + self.routed_weights * self.share


def weight_traffic(plan: Plan, model_layout: ModelLayout) -> WeightTraffic:
    """Count the weights of a planned result."""
    tensors = [tensor for tensor in plan.tensors if tensor.action is not Action.DROP]
    roles = {tensor.header.name: tensor.role for tensor in model_layout.tensors}
    count = _expert_count(model_layout, tensors)
    chosen = chosen_experts(model_layout)
    dense, routed = [0, 0], [0, 0]
    for tensor in tensors:
        role = roles.get(tensor.name, Role.OTHER)
        if role is Role.FOREIGN:
            continue
        kind = routed if _is_expert(tensor, count) else dense
        embeds = role is Role.EMBEDDING
        kind[0] += (
            _embedding_read(tensor, tied=model_layout.tied) if embeds else tensor.output_bytes
        )
        if len(tensor.shape) >= _MATRIX and (model_layout.tied or not embeds):
            kind[1] += math.prod(tensor.shape)
    share = expert_share(model_layout, tensors)
    held = sum(tensor.output_bytes for tensor in tensors)
    inputs = {tensor.header.name: tensor.shared for tensor in model_layout.tensors}
    widest = _widest(tensors, inputs, count, chosen)
    return WeightTraffic(held, dense[0], dense[1], routed[0], routed[1], share, widest)


def expert_share(model_layout: ModelLayout, tensors: Iterable[TensorPlan]) -> float:
    """Return the share of a layer's tokens that a router sends to one expert; 1 where it is not known."""
    count, chosen = _expert_count(model_layout, tensors), chosen_experts(model_layout)
    return min(1.0, chosen / count) if chosen and count else 1.0


def chosen_experts(model_layout: ModelLayout) -> int:
    """Return how many experts a token is sent to, 0 where that is not known."""
    defaults = model_layout.architecture.defaults if model_layout.architecture else {}
    stated = {**defaults, **model_layout.config}
    found = (stated.get(key) for key in COUNTS)
    return next((value for value in found if type(value) is int and value > 0), 0)


def _expert_count(model_layout: ModelLayout, tensors: Iterable[TensorPlan]) -> int:
    """Return the number of experts of a layer, 0 without any."""
    own = model_layout.dimensions.own.get("experts", 0) if model_layout.dimensions else 0
    return own if own > 1 else 1 + max((tensor.expert for tensor in tensors), default=-1)


def _is_expert(tensor: TensorPlan, count: int) -> bool:
    """Return whether a tensor belongs to single experts of a mixture: to one of ``count``, or stacked to all."""
    if tensor.expert >= 0 or (tensor.block >= 0 and ".experts." in tensor.name):
        return True
    stacked = len(tensor.shape) == _STACK and tensor.shape[0] == count > 1
    return stacked and tensor.shape[1] > 1  # a convolution has one row for each channel


def _embedding_read(tensor: TensorPlan, *, tied: bool) -> int:
    """Return the bytes of an embedding that a step reads: all of them where it is tied to the head, else 0."""
    if not tied:
        return 0
    module = tensor.name.removesuffix(".weight")
    apart = [item for item in tensor.outputs if not item.name.startswith(module)]
    return sum(item.nbytes for item in apart) or tensor.output_bytes


def _widest(
    tensors: Iterable[TensorPlan], inputs: Mapping[str, str], count: int, chosen: int
) -> int:
    """Return the most values of a token that the linears of one input read and produce, in any block.

    Args:
        tensors: of the result.
        inputs: the shared input of each, by name.
        count: of experts in a layer.
        chosen: of those, to how many a token is sent.
    """
    widths: dict[tuple[int, str], list[int]] = {}
    for tensor in tensors:
        expert = _is_expert(tensor, count)
        stacked = len(tensor.shape) == _STACK
        if tensor.block < 0 or not (len(tensor.shape) == _MATRIX or (stacked and expert)):
            continue
        out, read = tensor.shape[-2:] if stacked else tensor.matrix
        times = max(1, chosen) if expert else 1
        width = widths.setdefault((tensor.block, inputs.get(tensor.name) or tensor.name), [0, 0])
        width[0] = max(width[0], read * times)
        width[1] += out * times
    return max((sum(width) for width in widths.values()), default=0)
