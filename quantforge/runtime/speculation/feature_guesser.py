"""Guesses of a small network that reads tokens and, beside each, what the model thought before it (EAGLE-3, MTP).

Behind the model's text it reads what the model has computed; behind its own guesses its own states stand in for that.
So its guesses grow place by place, as those of a draft model, for the price of a single layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quantforge.runtime.cache import PagedCache
from quantforge.runtime.ragged import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.draft_options import MOST_NODES
from quantforge.runtime.speculation.guess_trees import ROOT, GuessTree
from quantforge.runtime.speculation.guesses import Computed
from quantforge.runtime.speculation.likely_trees import End, grow


class FeatureNetwork(Protocol):
    """Network of one layer: `quantforge.runtime.speculation.eagle3_layer.Eagle3Layer`, where methods are described."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the blocks of the model that it sees."""

    def cache(self, tokens: int) -> PagedCache:
        """Return a cache."""

    def features(self, computed: Computed) -> Tensor:
        """Return features of text."""

    def compute(self, ids: Tensor, features: Tensor, span: Span, cache: PagedCache) -> Tensor:
        """Compute tokens, and return their own features."""

    def logits(self, y: Tensor) -> Tensor:
        """Return logits."""


class FeatureGuesser:
    """Guesser of a network for one text.

    Args:
        network: its weights.
        room: most tokens of the text.
        shape: guesses behind each token, place by place.

    Attributes:
        blocks: of the model that it sees.
    """

    def __init__(self, network: FeatureNetwork, room: int, shape: Sequence[int]) -> None:
        self.blocks = network.blocks
        self._network, self._shape = network, shape
        self._cache = network.cache(room + MOST_NODES)
        self._cache.reserve(0, room + MOST_NODES)
        self._cache.most_tokens = room  # places go beyond it, positions do not
        self._read = 0  # tokens of the text in its cache; the last tree stands behind them
        self._last: Tensor | None = None  # what it says of the text's last token

    @torch.inference_mode()
    def watch(self, computed: Computed) -> None:
        """Read what the model has computed, and the tokens behind it."""
        features = self._network.features(computed)
        self._cache.advance(0, self._read - self._cache.length(0))
        ids = torch.tensor(computed.following, device=features.device)
        self._last = self._network.compute(ids, features, Span(0, len(ids)), self._cache)[-1:]
        self._read += len(ids)

    @torch.inference_mode()
    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> GuessTree:  # noqa: ARG002 (read already)
        """Return what the network finds likeliest, as `Guesser.guess` says."""
        tree, state = GuessTree(), self._last
        assert state is not None
        ends: list[End] = [(ROOT, sampler)]
        states = state.new_empty(0, state.shape[1])
        for place, count in enumerate(self._shape[:most]):
            if place:
                new = range(len(states), len(tree.tokens))
                before = torch.cat([state, states])[[tree.parents[node] + 1 for node in new]]
                ids = torch.tensor([tree.tokens[node] for node in new], device=state.device)
                span = Span(0, len(new), tree.mask(root=False).to(state.device))
                grown = self._network.compute(ids, before, span, self._cache)
                states = torch.cat([states, grown])
            logits = self._network.logits(grown if place else state)
            ends = grow(tree, ends, logits, count)
        return tree
