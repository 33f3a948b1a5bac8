"""Lookahead decoding: the model drafts for itself, many places at once (Fu et al., arXiv 2402.02057).

Besides the last token a pass computes a window: a few columns, each a run of tokens that may stand so far ahead. What
the model predicts after each run makes it a token longer, and after some passes, when nothing is left of the tokens it
began with, a column is an n-gram that the model itself wrote, word by word, for text like this one (Jacobi iteration).
Such n-grams are kept by their first token, and those that begin with the text's last token are the draft of a pass.

The window is a tree too. The first tokens of the columns follow each other, and the rest of each column follows its
first token: so a token attends to the first tokens of the columns before it, and to its own column.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Computed, Drafter
from quantforge.runtime.speculation.tree import ROOT, DraftTree

COLUMNS = 8  # of the window
LENGTH = 4  # tokens of an n-gram
KEPT = 8  # n-grams that begin with a token, the latest ones


@dataclass(slots=True)
class _Column:
    """A run of tokens in the window, how many at its end the model wrote, and the node of its last token."""

    tokens: list[int]
    written: int = 0
    node: int = ROOT


class LookaheadDrafter(Drafter):
    """Drafter whose window of further tokens is computed in each pass.

    Args:
        columns: of the window.
        length: tokens of an n-gram, at least 2.
    """

    taps = ()

    def __init__(self, columns: int = COLUMNS, length: int = LENGTH) -> None:
        self._width, self._length = columns, length
        self._columns: list[_Column] = []
        self._pool: dict[int, deque[tuple[int, ...]]] = {}
        self._draw = random.Random(0)

    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (it does not draw)
        """Return n-grams that begin with the last token, as `Drafter.draft`, and the window as probes."""
        tree = DraftTree()
        for run in reversed(self._pool.get(history[-1], ())):
            tree.add_path(run, [KEPT] * min(most, self._length - 1))
        while len(self._columns) < self._width:  # they begin with anything of the text
            column = _Column([self._draw.choice(history) for _ in range(self._length - 1)])
            self._columns.append(column)
        first = ROOT
        for column in self._columns:
            node = first = tree.add(first, column.tokens[0], probe=True)
            for token in column.tokens[1:]:
                node = tree.add(node, token, probe=True)
            column.node = node
        return tree

    def observe(self, computed: Computed) -> None:
        """Make each column longer by what the model predicts after it, and keep those that are all the model's."""
        if not computed.tree.probes:  # a plain pass; the window stayed where it was in the text
            self._columns = []
            return
        best = computed.logits.argmax(-1).tolist()
        for column in self._columns:
            run = [*column.tokens, best[column.node + 1]]
            if column.written >= self._length - 1:
                self._keep(run[0], tuple(run[1:]))
            column.tokens = run[1:]
            column.written += 1
        del self._columns[: len(computed.following) - 1]  # their places are text now

    def _keep(self, first: int, rest: tuple[int, ...]) -> None:
        kept = self._pool.setdefault(first, deque(maxlen=KEPT))
        if rest in kept:
            kept.remove(rest)
        kept.append(rest)
