"""Trees of guesses: several tokens may be guessed for one place, and the model checks all of them in one pass.

Behind the text stands a tree: each node is a token, and a path from the root is a guess of how the text goes on. Every
node sees the text and its own path (SpecInfer, arXiv 2305.09781). So whichever child the model chooses at each place,
its keys, values and logits are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOT = -1  # the last token of the text


@dataclass(slots=True)
class GuessTree:
    """Tree of guesses behind a text, which grows.

    Attributes:
        tokens: of its nodes.
        parents: for each node the node before it, or `ROOT`; a node stands behind its parent.
        probes: so many last nodes are computed for whoever guesses, and are no guesses.
        early: that there is no guess says nothing yet of whether probes pay.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probes: int = 0
    early: bool = False
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _depths: list[int] = field(default_factory=list)

    def add(self, parent: int, token: int, *, probe: bool = False) -> int:
        """Return the child of a node with a token; a new one where there is none, and always for a probe."""
        known = None if probe else self.child(parent, token)
        if known is not None:
            return known
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(self.depth_of(parent) + 1)
        if probe:
            self.probes += 1
        else:
            assert not self.probes  # they come last
            self._children[parent, token] = len(self.tokens) - 1
        return len(self.tokens) - 1

    def add_path(self, tokens: Iterable[int], shape: Sequence[int]) -> None:
        """Add a guess of some tokens in a row, as far as a shape has room for it."""
        node = ROOT
        for token, most in zip(tokens, shape, strict=False):
            if self.child(node, token) is None and len(self.children(node)) >= most:
                return
            node = self.add(node, token)

    def child(self, parent: int, token: int) -> int | None:
        """Return the guess of a token behind a node, if there is one."""
        return self._children.get((parent, token))

    def children(self, parent: int) -> list[int]:
        """Return the guesses behind a node, the likeliest first."""
        return [node for (above, _), node in self._children.items() if above == parent]

    def depth_of(self, node: int) -> int:
        """Return how many tokens a node lies behind the text; 0 for `ROOT`."""
        return 0 if node == ROOT else self._depths[node]

    @property
    def guesses(self) -> int:
        """Return the number of guesses."""
        return len(self.tokens) - self.probes

    @property
    def depth(self) -> int:
        """Return the length of the longest guess."""
        return max(self._depths[: self.guesses], default=0)

    @property
    def is_chain(self) -> bool:
        """Return whether each place has one guess."""
        return self.parents == [*range(ROOT, len(self.tokens) - 1)]

    def path(self, node: int) -> list[int]:
        """Return the nodes from behind the root to a node."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def mask(self, *, root: bool) -> Tensor:
        """Return which nodes each one sees, ``[nodes, nodes]`` bool as `Span.tree`; with the root before them."""
        first, paths = int(root), {ROOT: [0] if root else []}
        for node, parent in enumerate(self.parents):
            paths[node] = [*paths[parent], node + first]
        if not root:
            del paths[ROOT]
        pairs = [(row, place) for row, path in enumerate(paths.values()) for place in path]
        seen = torch.zeros(len(paths), len(paths), dtype=torch.bool)
        rows, places = torch.tensor(pairs).T
        seen[rows, places] = True
        return seen


def chain(tokens: Iterable[int]) -> GuessTree:
    """Return the tree of one guess for each place."""
    found, node = GuessTree(), ROOT
    for token in tokens:
        node = found.add(node, token)
    return found
