"""Trees of drafted tokens: several tokens may be drafted for one place, and the model checks all of them in one pass.

The tree stands after the text: each node is a token, and a path from the root is one way the text may continue. Each
node attends to the text and its own path (SpecInfer, arXiv 2305.09781). So whichever child the model chooses at each
place, its keys, values and logits are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantforge.runtime.sampling import RowSampler

ROOT = -1  # the last token of the text
Leaf = tuple[int, RowSampler]  # a node, and what chooses the token after it


@dataclass(slots=True)
class DraftTree:
    """Tree of drafted tokens after a text.

    Attributes:
        tokens: of its nodes.
        parents: for each node the node before it, or `ROOT`; parents come first.
        probes: so many last nodes are computed for the drafter, and are not drafted tokens.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probes: int = 0
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, parent: int, token: int, *, probe: bool = False) -> int:
        """Return the child of a node with a token; a new one where there is none, and always for a probe."""
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
        """Add tokens in a row, as far as a shape has room for them."""
        node = ROOT
        for token, most in zip(tokens, shape, strict=False):
            if self.child(node, token) is None and len(self.children(node)) >= most:
                return
            node = self.add(node, token)

    def grow(self, leaves: Sequence[Leaf], logits: Tensor, count: int) -> list[Leaf]:
        """Add ``count`` tokens after each leaf, and return the new leaves.

        The first is what the leaf's sampler would choose with the draw of that place, the others are the most likely.

        Args:
            leaves: nodes of the last depth.
            logits: ``[leaves, vocabulary]``, float32.
            count: of tokens after each.
        """
        return [
            (self.add(node, token), sampler.after(token))
            for (node, sampler), row in zip(leaves, logits, strict=True)
            for token in sampler.likely(row, count)
        ]

    def child(self, parent: int, token: int) -> int | None:
        """Return the node of a drafted token after a node, if there is one."""
        return self._children.get((parent, token))

    def children(self, parent: int) -> list[int]:
        """Return the nodes drafted after a node, the most likely first."""
        return [node for (above, _), node in self._children.items() if above == parent]

    @property
    def drafted(self) -> int:
        """Return the number of drafted tokens."""
        return len(self.tokens) - self.probes

    @property
    def depth(self) -> int:
        """Return the most drafted tokens in a row."""
        depths = {ROOT: 0}
        for node, parent in enumerate(self.parents[: self.drafted]):
            depths[node] = depths[parent] + 1
        return max(depths.values())

    @property
    def is_chain(self) -> bool:
        """Return whether each place has one token."""
        return self.parents == [*range(ROOT, len(self.tokens) - 1)]

    def mask(self, *, root: bool) -> Tensor:
        """Return which nodes each one attends to, ``[nodes, nodes]`` bool as `Span.tree`; ``root`` adds it in front."""
        seen = torch.eye(len(self.tokens) + 1, dtype=torch.bool)
        seen[:, 0] = True
        for node, parent in enumerate(self.parents):
            seen[node + 1] |= seen[parent + 1]
        return seen if root else seen[1:, 1:]
