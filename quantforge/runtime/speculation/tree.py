"""Draft trees: several tokens may be drafted for one position, and the model checks all of them in one pass.

The tree follows the text: each node is a token, and a path from the root is one way the text may continue. Each node
attends to the text and to its own path (SpecInfer, arXiv 2305.09781). So the keys, values and logits of every path are
available, whichever child the model chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantforge.runtime.sampling import RowSampler

ROOT = -1  # the last token of the text
Leaf = tuple[int, RowSampler]  # a node, and the sampler state for the token after it


@dataclass(slots=True)
class DraftTree:
    """Tree of drafted tokens after a text.

    Attributes:
        tokens: the token of each node.
        parents: the parent of each node, or `ROOT`; parents precede their children.
        probes: number of nodes at the end that are computed for the drafter only and are not drafted tokens.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probes: int = 0
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, parent: int, token: int, *, probe: bool = False) -> int:
        """Return the child of ``parent`` with the given token, adding it if needed; a probe is always a new node."""
        if not probe and (parent, token) in self._children:
            return self._children[parent, token]
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        if probe:
            self.probes += 1
        else:
            assert not self.probes  # they come last
            self._children[parent, token] = node
        return node

    def add_path(self, tokens: Iterable[int], shape: Sequence[int]) -> None:
        """Add a path of tokens from the root, as far as the branching factors in ``shape`` allow."""
        node = ROOT
        for token, max_children in zip(tokens, shape, strict=False):
            if self.child(node, token) is None and len(self.children(node)) >= max_children:
                return
            node = self.add(node, token)

    def extend_leaves(self, leaves: Sequence[Leaf], logits: Tensor, count: int) -> list[Leaf]:
        """Add ``count`` children to each leaf, and return the new leaves.

        The first child is the token that the leaf's sampler would choose; the others are the most likely tokens.

        Args:
            leaves: the deepest nodes of the tree.
            logits: ``[leaves, vocabulary]``, float32.
            count: number of children of each leaf.
        """
        return [
            (self.add(node, token), sampler.fork_after(token))
            for (node, sampler), row in zip(leaves, logits, strict=True)
            for token in sampler.draft_candidates(row, count)
        ]

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of a node with the given token, or None."""
        return self._children.get((parent, token))

    def children(self, parent: int) -> list[int]:
        """Return the children of a node, the most likely first."""
        return [node for (node_parent, _), node in self._children.items() if node_parent == parent]

    @property
    def drafted(self) -> int:
        """Return the number of drafted tokens."""
        return len(self.tokens) - self.probes

    @property
    def depth(self) -> int:
        """Return the depth of the tree: the most drafted tokens in a row."""
        depths = {ROOT: 0}
        for node, parent in enumerate(self.parents[: self.drafted]):
            depths[node] = depths[parent] + 1
        return max(depths.values())

    @property
    def is_chain(self) -> bool:
        """Return whether the tree is a chain: one token per position."""
        return self.parents == [*range(ROOT, len(self.tokens) - 1)]

    def mask(self, *, root: bool) -> Tensor:
        """Return the attention mask ``[nodes, nodes]`` (bool, as `Span.tree`); ``root`` adds the root as first node."""
        visible = torch.eye(len(self.tokens) + 1, dtype=torch.bool)
        visible[:, 0] = True
        for node, parent in enumerate(self.parents):
            visible[node + 1] |= visible[parent + 1]
        return visible if root else visible[1:, 1:]
