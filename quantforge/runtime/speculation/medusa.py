"""Medusa heads: head i predicts the token i + 1 positions after the model's own, from the last hidden state alone.

Each head consists of a few residual blocks, ``x + silu(x W + b)``, and an output matrix (Cai et al., arXiv 2401.10774).
Heads do not see each other's tokens, so the same tokens are drafted after every node of a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from quantforge.formats.sources.head_directory import DraftHeadDirectory
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Drafter, Linear, PassOutputs, read_linear
from quantforge.runtime.speculation.tree import ROOT, DraftTree, Leaf


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One Medusa head: the linears ``[hidden, hidden]`` of its residual blocks, and the output linear."""

    blocks: tuple[Linear, ...]
    output: Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[rows, vocabulary]`` in float32 for hidden states ``[rows, hidden]``."""
        for linear in self.blocks:
            hidden = hidden + silu(linear(hidden))
        return self.output(hidden).float()


def read_medusa(heads: DraftHeadDirectory, embedding: Tensor) -> list[MedusaHead]:
    """Read Medusa heads for a model; they take the type and device of its embedding ``[vocabulary, hidden]``.

    Raises:
        InputError: a tensor is missing, or does not match the hidden size or vocabulary of the model.
    """
    vocabulary, hidden = embedding.shape
    layers = heads.number("medusa_num_layers", "num_hidden_layers", default=1)

    def read(shape: tuple[int, int], *names: str) -> Linear:
        # With prefixes if the file also holds the model that was trained with the heads.
        prefixes = ("", "medusa_head.", "medusa_heads.")
        names = tuple(prefix + name for name in names for prefix in prefixes)
        return read_linear(heads, shape, names, embedding)

    medusa_heads = []
    for head in range(heads.number("medusa_num_heads", "num_heads")):
        blocks = tuple(
            read((hidden, hidden), f"{head}.{layer}.linear", f"blocks.{head}.layers.{layer}")
            for layer in range(layers)
        )
        # All heads may share one output layer
        output_head = 0 if heads.config.get("original_lm_head") is True else head
        output = read((vocabulary, hidden), f"{head}.{layers}", f"lm_heads.{output_head}")
        medusa_heads.append(MedusaHead(blocks, output))
    return medusa_heads


class MedusaDrafter(Drafter):
    """Drafter that predicts each position with one Medusa head.

    Args:
        heads: the heads, in the order of the positions they predict.
        shape: branching factors of the draft tree by depth; depths without a head are dropped.
    """

    taps = ()

    def __init__(self, heads: Sequence[MedusaHead], shape: Sequence[int]) -> None:
        self._heads, self._shape = heads, shape
        self._hidden: Tensor | None = None

    def observe(self, computed: PassOutputs) -> None:
        """Store the hidden state from which the last token was chosen."""
        self._hidden = computed.hidden[-1:]

    @torch.inference_mode()
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (heads see states, not tokens)
        """Draft the tokens that each head finds most likely; see `Drafter.draft`."""
        assert self._hidden is not None
        tree = DraftTree()
        leaves: list[Leaf] = [(ROOT, sampler)]
        for head, count in zip(self._heads[:most], self._shape, strict=False):
            logits = head.logits(self._hidden).expand(len(leaves), -1)
            leaves = tree.extend_leaves(leaves, logits, count)
        return tree
