"""Medusa heads: each guesses the token so many places ahead, from the model's last hidden state alone.

Head i is a few residual blocks, ``x + silu(x W + b)``, and an output matrix; it says the token that comes i + 1 places
behind the one that the model itself chooses there (Cai et al., arXiv 2401.10774). Heads do not see each other's tokens,
so that behind each token of a tree stand the same guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from quantforge.formats.sources.head_directory import HeadDirectory
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.guess_trees import ROOT, GuessTree
from quantforge.runtime.speculation.guesses import Computed
from quantforge.runtime.speculation.head_products import Product, read_product
from quantforge.runtime.speculation.likely_trees import End, grow


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head: products with the matrices ``[hidden, hidden]`` of its blocks, and with the output matrix."""

    blocks: tuple[Product, ...]
    output: Product

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[rows, vocabulary]`` in float32 for hidden states ``[rows, hidden]``."""
        for product in self.blocks:
            hidden = hidden + silu(product(hidden))
        return self.output(hidden).float()


def read_medusa(found: HeadDirectory, embedding: Tensor) -> list[MedusaHead]:
    """Read heads for a model with an embedding ``[vocabulary, hidden]``, whose type and device they get.

    Raises:
        InputError: a tensor is missing, or is of another width or vocabulary.
    """
    vocabulary, hidden = embedding.shape
    count = found.number("medusa_num_heads", "num_heads")
    layers = found.number("medusa_num_layers", "num_hidden_layers", default=1)

    def block(head: int, layer: int) -> Product:
        owners = f"{head}.{layer}.linear", f"blocks.{head}.layers.{layer}"
        weights, biases = (
            _prefixed(f"{owner}.{leaf}" for owner in owners) for leaf in ("weight", "bias")
        )
        return read_product(found, (hidden, hidden), weights, biases, embedding)

    def output(head: int) -> Product:
        own = 0 if found.config.get("original_lm_head") is True else head  # or all share one
        names = _prefixed((f"{head}.{layers}.weight", f"lm_heads.{own}.weight"))
        return read_product(found, (vocabulary, hidden), names, [], embedding)

    return [
        MedusaHead(tuple(block(head, layer) for layer in range(layers)), output(head))
        for head in range(count)
    ]


def _prefixed(names: Iterable[str]) -> list[str]:
    """Return some names as files have them: alone, or in the model that was trained with the heads."""
    return [f"{prefix}{name}" for name in names for prefix in ("", "medusa_head.", "medusa_heads.")]


class MedusaGuesser:
    """Guesser of some heads.

    Args:
        heads: in the order of the places.
        shape: guesses behind each token, place by place; places beyond the heads are left out.

    Attributes:
        blocks: of those it sees what goes into them: none.
    """

    blocks: tuple[int, ...] = ()

    def __init__(self, heads: Sequence[MedusaHead], shape: Sequence[int]) -> None:
        self._heads, self._shape = heads, shape
        self._hidden: Tensor | None = None

    def watch(self, computed: Computed) -> None:
        """Note the hidden state that chose the last token."""
        self._hidden = computed.hidden[-1:]

    @torch.inference_mode()
    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> GuessTree:  # noqa: ARG002 (heads see states, not tokens)
        """Return what each head finds likeliest, as `Guesser.guess` says."""
        tree = GuessTree()
        assert self._hidden is not None
        ends: list[End] = [(ROOT, sampler)]
        for head, count in zip(self._heads[:most], self._shape, strict=False):
            logits = head.logits(self._hidden).expand(len(ends), -1)
            ends = grow(tree, ends, logits, count)
        return tree
