"""Memory that tuning takes: codes of all blocks and what is learned, a block with its gradients, states of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from quantforge.architectures.match import Matched, declared
from quantforge.model.statistics import EXPERT_TOKENS
from quantforge.model.tuning_bounds import ROWS, whole_epochs
from quantforge.planning import expert_memory
from quantforge.planning.widths import widest
from quantforge.plans import TensorPlan

FLOAT = 4
FREED = 2  # blocks: results of steps that were let go of, which the allocator keeps (measured)
COPIES = 6  # of logits of a row, and floats of everything that is learned
CODE_BYTES = 6  # of a code that is learned: its offset, a moment of its gradients, two snapshots
MIXED = 4  # states of the tokens of a step: what reaches the experts, what they return, and both gradients


def tuning_bytes(
    tensors: Iterable[TensorPlan],
    matched: Matched,
    rows: tuple[int, int],
    workers: int,
    epochs: int,
) -> float:
    """Return the bytes of tuning, beside the states of all rows.

    Args:
        tensors: of the plan.
        matched: the model.
        rows: how many calibration rows there are, and their length.
        workers: rows that pass at the same time, at most.
        epochs: which decide what is learned.
    """
    _, sizes = declared(matched)
    whole = whole_epochs(epochs)
    linears = [tensor for tensor in tensors if tensor.part >= 0 and tensor.scheme is not None]
    parts = {tensor.part for tensor in linears}
    by_part = [[one for one in linears if one.part == part] for part in parts]
    held = [linears] if whole else by_part
    codes = max(sum(math.prod(tensor.shape) for tensor in some) for some in held)
    learned = max(sum(_scales(tensor) for tensor in some) for some in held)
    count, length = min(rows[0], ROWS if whole else 1), rows[1]
    kinds = max(kind.inner_copies + 1 for kind in matched.layers)
    width = widest(matched, sizes)
    passing = 10 * sizes.hidden + 6 * width.q + 6 * width.kv + kinds * width.ffn
    side = min(count, workers)
    states = side * length * max(passing, COPIES * sizes.vocab if whole else 0)
    states += count * length * sizes.hidden * (matched.blocks + 1 if whole else 1)
    states += count * length * max(sum(map(_seen, some)) for some in by_part)
    block = expert_memory.block_bytes(matched) * (1 + 2 * side + FREED)
    if whole != 1:
        codes *= 1 + CODE_BYTES
    if expert_memory.states(matched) > 1:
        states += MIXED * count * length * sizes.hidden
        states += 2 * min(count * length, EXPERT_TOKENS) * (5 * sizes.hidden + 6 * sizes.ffn)
        block += expert_memory.routing_bytes(matched, count * length)
    return (
        codes
        + block
        + FLOAT * (COPIES * learned + states + bool(whole) * sizes.vocab * sizes.hidden)
    )


def _seen(tensor: TensorPlan) -> int:
    """Return the numbers for each token that are kept of a linear until its gradients: what it reads, and those behind.

    Experts go back one at a time.
    """
    return 0 if tensor.expert >= 0 else sum(tensor.matrix)


def _scales(tensor: TensorPlan) -> int:
    """Return how many scales (and minima) of a linear are learned."""
    assert tensor.scheme is not None
    scheme = tensor.scheme.weight
    if not scheme.scaled:
        return 0
    if scheme.block is None:
        return math.prod(scheme.parameter_shape(tensor.matrix))
    blocks = math.prod(tensor.matrix) // scheme.block.columns
    return blocks * (1 if scheme.symmetric else 2)
