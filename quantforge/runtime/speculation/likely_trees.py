"""Trees that grow by logits: behind each token stand those that some logits find likeliest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.guess_trees import GuessTree

End = tuple[int, RowSampler]  # a node of the last depth, and what chooses behind it


def grow(tree: GuessTree, ends: Sequence[End], logits: Tensor, count: int) -> list[End]:
    """Add guesses behind the ends of a tree, and return the new ends.

    Args:
        tree: is changed.
        ends: nodes.
        logits: ``[ends, vocabulary]``, float32.
        count: guesses behind each: what its sampler would choose with the draw of that place, and the likeliest others.
    """
    grown = []
    for (node, draws), row in zip(ends, logits, strict=True):
        for token in draws.likely(row, count):
            grown.append((tree.add(node, token), draws.after(token)))
    return grown
