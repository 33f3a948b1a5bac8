"""Medusa heads: each predicts the token so many places ahead, from the model's last hidden state alone.

Head i is a few residual blocks, ``x + silu(x W + b)``, and an output matrix; it predicts the token i + 1 places after
the one that the model itself chooses there (Cai et al., arXiv 2401.10774). Heads do not see each other's tokens, so the
same tokens are drafted after each token of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from quantforge.formats.sources.head_directory import DraftHeadDirectory
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Computed, Drafter, Linear, read_linear
from quantforge.runtime.speculation.tree import ROOT, DraftTree, Leaf


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head: the linears ``[hidden, hidden]`` of its blocks, and the output linear."""

    blocks: tuple[Linear, ...]
    output: Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[rows, vocabulary]`` in float32 for hidden states ``[rows, hidden]``."""
        for linear in self.blocks:
            hidden = hidden + silu(linear(hidden))
        return self.output(hidden).float()


def read_medusa(heads: DraftHeadDirectory, embedding: Tensor) -> list[MedusaHead]:
    """Read heads for a model with an embedding ``[vocabulary, hidden]``, whose type and device they get.

    Raises:
        InputError: a tensor is missing, or is of another width or vocabulary.
    """
    vocabulary, hidden = embedding.shape
    layers = heads.number("medusa_num_layers", "num_hidden_layers", default=1)

    def read(shape: tuple[int, int], *names: str) -> Linear:
        # Alone, or in the model that was trained with the heads.
        prefixes = ("", "medusa_head.", "medusa_heads.")
        names = tuple(prefix + name for name in names for prefix in prefixes)
        return read_linear(heads, shape, names, embedding)

    found = []
    for head in range(heads.number("medusa_num_heads", "num_heads")):
        blocks = tuple(
            read((hidden, hidden), f"{head}.{layer}.linear", f"blocks.{head}.layers.{layer}")
            for layer in range(layers)
        )
        own = 0 if heads.config.get("original_lm_head") is True else head  # or all share one
        output = read((vocabulary, hidden), f"{head}.{layers}", f"lm_heads.{own}")
        found.append(MedusaHead(blocks, output))
    return found


class MedusaDrafter(Drafter):
    """Drafter of some heads.

    Args:
        heads: in the order of the places.
        shape: of its trees, see `shape_of`; places beyond the heads are left out.
    """

    taps = ()

    def __init__(self, heads: Sequence[MedusaHead], shape: Sequence[int]) -> None:
        self._heads, self._shape = heads, shape
        self._hidden: Tensor | None = None

    def observe(self, computed: Computed) -> None:
        """Note the hidden state that chose the last token."""
        self._hidden = computed.hidden[-1:]

    @torch.inference_mode()
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (heads see states, not tokens)
        """Return what each head finds most likely, as `Drafter.draft`."""
        assert self._hidden is not None
        tree = DraftTree()
        leaves: list[Leaf] = [(ROOT, sampler)]
        for head, count in zip(self._heads[:most], self._shape, strict=False):
            logits = head.logits(self._hidden).expand(len(leaves), -1)
            leaves = tree.grow(leaves, logits, count)
        return tree
