"""Memory of experts in a run that looks at data: one at a time, whatever their number.

Beside the rest of the block there are the input of the mixture and its outputs, of all rows, one expert in float32, and
what it computes of the tokens that pass it together. Of Hessians there are that of the layer, two of the expert, and
the one that it is shrunk toward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.match import Matched
from quantforge.architectures.matched import MatchedTensor
from quantforge.model.statistics import EXPERT_TOKENS
from quantforge.plans import TensorPlan

FLOAT = 4
SPREAD = 2.5  # copies of tokens that are spread over all experts: times their weights, and what comes back
ROUTING = 8  # bytes of an index and a weight


def block_bytes(matched: Matched) -> int:
    """Return the bytes of the largest block in float32, with one of its experts."""
    dense: dict[int, int] = {}
    experts: dict[tuple[int, int], int] = {}
    for tensor in matched.tensors:
        if tensor.block < 0:
            continue
        size = FLOAT * math.prod(tensor.stored.shape)
        if tensor.expert >= 0:
            key = tensor.block, tensor.expert
            experts[key] = experts.get(key, 0) + size
        else:
            share = tensor.stored.shape[0] if _is_stack(matched, tensor) else 1
            dense[tensor.block] = dense.get(tensor.block, 0) + size // share
    one: dict[int, int] = {}
    for (block, _), size in experts.items():
        one[block] = max(one.get(block, 0), size)
    return max((size + one.get(block, 0) for block, size in dense.items()), default=0)


def _is_stack(matched: Matched, tensor: MatchedTensor) -> bool:
    """Return whether a tensor holds something of every expert."""
    if not matched.layers or not matched.layers[tensor.block].stacks:
        return False
    stacks = matched.layers[tensor.block].stacks
    parents = {stack.parameter.rpartition(".")[0] for stack in stacks}
    inside = tensor.name.removeprefix(f"{matched.block_name(tensor.block)}.")
    return inside.rpartition(".")[0] in parents


def states(matched: Matched) -> int:
    """Return how many times the hidden states of all rows are held: with the input and the outputs of a mixture."""
    return 3 if any(kind.stacks for kind in matched.layers) else 1


def spread_experts(matched: Matched) -> int:
    """Return over how many experts tokens are spread before these take them; 0 where they are not."""
    spread = (kind for kind in matched.layers if any(stack.spread for stack in kind.stacks))
    return max((shared.expert + 1 for kind in spread for shared in kind.inputs), default=0)


def routing_bytes(matched: Matched, tokens: int) -> int:
    """Return the bytes of the routing of so many tokens, and of their numbers; 0 without experts."""
    if states(matched) == 1:
        return 0
    chosen = matched.config.get("num_experts_per_tok")
    return tokens * (2 * ROUTING + ROUTING * (chosen if type(chosen) is int else 8))


def expert_bytes(
    groups: Mapping[tuple[int, str], list[TensorPlan]], sizes: Dimensions, *, hessians: bool
) -> int:
    """Return the bytes of statistics and activations while an expert is worked on, at most.

    Args:
        groups: the matrices of one shared input each.
        sizes: of the model.
        hessians: whether they are observed.
    """
    widths: dict[tuple[int, int], set[int]] = {}
    for (part, _), group in groups.items():
        if group[0].expert >= 0:
            widths.setdefault((part, group[0].expert), set()).add(group[0].matrix[1])
    return max((_statistics(each, sizes, hessians=hessians) for each in widths.values()), default=0)


def _statistics(widths: Iterable[int], sizes: Dimensions, *, hessians: bool) -> int:
    columns = {*widths, sizes.hidden}
    inner = max(columns - {sizes.hidden}, default=sizes.hidden)
    activations = FLOAT * EXPERT_TOKENS * (5 * sizes.hidden + 6 * inner)
    squares = 2 * FLOAT * sum(width**2 for width in columns) if hessians else 0
    return activations + squares
