"""A drafter of a small network that reads each token together with the model's state before it (EAGLE-3, MTP).

After the model's text it reads what the model computed; after drafted tokens its own states stand in for that. So it
drafts place by place, as a draft model does, for the price of a single layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.runtime.ragged import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Computed, Drafter
from quantforge.runtime.speculation.options import MOST_NODES
from quantforge.runtime.speculation.tree import ROOT, DraftTree, Leaf

if TYPE_CHECKING:
    from quantforge.runtime.speculation.eagle3 import Eagle3Layer
    from quantforge.runtime.speculation.mtp import MtpLayer


class FeatureDrafter(Drafter):
    """Drafter of a network for one text.

    Args:
        network: its weights.
        room: most tokens of the text.
        shape: of its trees, see `shape_of`.
    """

    def __init__(self, network: Eagle3Layer | MtpLayer, room: int, shape: Sequence[int]) -> None:
        self.taps = network.taps
        self._network, self._shape = network, shape
        self._cache = network.cache(1, room + MOST_NODES)
        self._cache.reserve(0, room + MOST_NODES)
        self._cache.most_tokens = room  # places go beyond it, positions do not
        self._read = 0  # tokens of the text in its cache; the last tree follows
        self._last: Tensor | None = None  # its state at the text's last token

    @torch.inference_mode()
    def observe(self, computed: Computed) -> None:
        """Read the states of the model, and the tokens after them."""
        features = self._network.features(computed)
        self._cache.advance(0, self._read - self._cache.length(0))
        ids = torch.tensor(computed.following, device=features.device)
        self._last = self._network.compute(ids, features, Span(0, len(ids)), self._cache)[-1:]
        self._read += len(ids)

    @torch.inference_mode()
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (read already)
        """Return what the network finds most likely, as `Drafter.draft`."""
        assert self._last is not None
        tree, states = DraftTree(), self._last  # of the root and of all nodes but the leaves
        leaves: list[Leaf] = [(ROOT, sampler)]
        for place, count in enumerate(self._shape[:most]):
            if place:
                new = range(len(states) - 1, len(tree.tokens))
                before = states[[tree.parents[node] + 1 for node in new]]
                ids = torch.tensor([tree.tokens[node] for node in new], device=states.device)
                span = Span(0, len(new), tree.mask(root=False).to(states.device))
                states = torch.cat((states, self._network.compute(ids, before, span, self._cache)))
            logits = self._network.logits(states[-len(leaves) :])
            leaves = tree.grow(leaves, logits, count)
        return tree
