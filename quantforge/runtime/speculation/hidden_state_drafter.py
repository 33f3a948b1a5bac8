"""Draft with a small network that reads tokens and the model's hidden states before them (EAGLE-3, MTP).

For drafted tokens, the network's own states take the place of the model's. So it drafts token by token, like a draft
model, for the cost of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantforge.runtime.ragged_attention import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Drafter, PassOutputs, allocate_text_cache
from quantforge.runtime.speculation.eagle3 import Eagle3Layer
from quantforge.runtime.speculation.mtp import MtpLayer
from quantforge.runtime.speculation.tree import ROOT, DraftTree, Leaf


class HiddenStateDrafter(Drafter):
    """Drafter that runs an EAGLE-3 or MTP layer on the model's hidden states.

    Args:
        network: the draft layer.
        max_tokens: most tokens of the text.
        shape: branching factors of the draft tree by depth, see `parse_tree_shape`.
    """

    def __init__(
        self, network: Eagle3Layer | MtpLayer, max_tokens: int, shape: Sequence[int]
    ) -> None:
        self.taps = network.taps
        self._network, self._shape = network, shape
        self._cache = allocate_text_cache(network.cache, max_tokens)
        self._cached_tokens = 0  # tokens of the text in its cache; those of the last tree follow
        self._last_output: Tensor | None = None  # the layer's output at the last token of the text

    @torch.inference_mode()
    def observe(self, computed: PassOutputs) -> None:
        """Run the layer on the model's hidden states and the tokens that follow them."""
        features = self._network.features(computed)
        self._cache.advance(0, self._cached_tokens - self._cache.length(0))
        ids = torch.tensor(computed.next_tokens, device=features.device)
        self._last_output = self._network.compute(ids, features, Span(0, len(ids)), self._cache)[
            -1:
        ]
        self._cached_tokens += len(ids)

    @torch.inference_mode()
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (read already)
        """Draft a tree of the tokens that the layer finds most likely; see `Drafter.draft`."""
        assert self._last_output is not None
        # Outputs at the root and at all nodes except the leaves
        tree, states = DraftTree(), self._last_output
        leaves: list[Leaf] = [(ROOT, sampler)]
        for level, count in enumerate(self._shape[:most]):
            if level:
                new_nodes = range(len(states) - 1, len(tree.tokens))
                parent_states = states[[tree.parents[node] + 1 for node in new_nodes]]
                ids = torch.tensor([tree.tokens[node] for node in new_nodes], device=states.device)
                span = Span(0, len(new_nodes), tree.mask(root=False).to(states.device))
                states = torch.cat(
                    (states, self._network.compute(ids, parent_states, span, self._cache))
                )
            logits = self._network.logits(states[-len(leaves) :])
            leaves = tree.extend_leaves(leaves, logits, count)
        return tree
