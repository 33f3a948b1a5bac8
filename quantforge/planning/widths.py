"""Widths of what a token has inside of a block, in the widest layer: heads and MLPs may differ from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.match import Matched, Role
from quantforge.architectures.sequence_state import KEYS


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of all heads of queries, of all heads of keys, and inside of the MLP."""

    q: int
    kv: int
    ffn: int


def widest(matched: Matched, sizes: Dimensions) -> Widths:
    """Return the widths of a model."""
    keys = [
        (sizes.size(state.rows), sizes.size(state.width))
        for kind in matched.layers
        for state in kind.states or ()
        if state.part == KEYS
    ]
    return Widths(
        max([sizes.q, *(sizes.heads * width for _, width in keys)]),
        max([sizes.kv, *(rows * width for rows, width in keys)]),
        max([sizes.ffn, *(size for name, size in sizes.own.items() if name.endswith("_ffn"))]),
    )


def embedded(matched: Matched, sizes: Dimensions) -> int:
    """Return how many numbers all embeddings have for a token: the usual one, and those of each layer."""
    others = (
        tensor.stored.shape[-1]
        for tensor in matched.tensors
        if tensor.role is Role.OTHER and tensor.block < 0 and len(tensor.stored.shape) > 1
        if "embed" in tensor.name
    )
    return sizes.hidden + sum(others)
