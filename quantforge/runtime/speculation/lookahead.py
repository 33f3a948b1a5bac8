"""Lookahead decoding: the model drafts for itself at several positions in parallel (Fu et al., arXiv 2402.02057).

In addition to the last token, each pass computes a window: a few columns, each a guess of the tokens at some positions
ahead. The model's prediction after each column is appended to it and its first token is dropped (Jacobi iteration).
When all of its initial random tokens are replaced, the column is an n-gram that the model itself generated. These
n-grams are pooled by their first token, and those that begin with the text's last token are the draft of a pass.

The window is a tree too. The first tokens of the columns form a chain, and the rest of each column follows its first
token: so a token attends to the first tokens of the columns before it, and to its own column.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Drafter, PassOutputs
from quantforge.runtime.speculation.tree import ROOT, DraftTree

COLUMNS = 8  # columns of the window
NGRAM_LENGTH = 4  # tokens of an n-gram
POOL_SIZE = 8  # most n-grams kept for each first token, the latest ones


@dataclass(slots=True)
class _Column:
    """A column of the window: its tokens, how many of the last ones the model predicted, and the node of the last."""

    tokens: list[int]
    predicted: int = 0
    node: int = ROOT


class LookaheadDrafter(Drafter):
    """Drafter that collects n-grams from a lookahead window computed in each pass.

    Args:
        columns: number of columns of the window.
        length: tokens of an n-gram, at least 2.
    """

    taps = ()

    def __init__(self, columns: int = COLUMNS, length: int = NGRAM_LENGTH) -> None:
        self._num_columns, self._length = columns, length
        self._columns: list[_Column] = []
        self._pool: dict[int, deque[tuple[int, ...]]] = {}
        self._random = random.Random(0)

    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (it does not draw)
        """Draft the pooled n-grams that begin with the last token; add the window as probes. See `Drafter.draft`."""
        tree = DraftTree()
        for ngram in reversed(self._pool.get(history[-1], ())):
            tree.add_path(ngram, [POOL_SIZE] * min(most, self._length - 1))
        while len(self._columns) < self._num_columns:  # they start with random tokens of the text
            column = _Column([self._random.choice(history) for _ in range(self._length - 1)])
            self._columns.append(column)
        first = ROOT
        for column in self._columns:
            node = first = tree.add(first, column.tokens[0], probe=True)
            for token in column.tokens[1:]:
                node = tree.add(node, token, probe=True)
            column.node = node
        return tree

    def observe(self, computed: PassOutputs) -> None:
        """Append the model's prediction to each column and pool the n-grams that the model generated completely."""
        if not computed.tree.probes:  # a pass without a window: the columns are out of date
            self._columns = []
            return
        predictions = computed.logits.argmax(-1).tolist()
        for column in self._columns:
            ngram = [*column.tokens, predictions[column.node + 1]]
            if column.predicted >= self._length - 1:
                self._add_to_pool(ngram[0], tuple(ngram[1:]))
            column.tokens = ngram[1:]
            column.predicted += 1
        del self._columns[: len(computed.next_tokens) - 1]  # the text has reached their positions

    def _add_to_pool(self, first: int, continuation: tuple[int, ...]) -> None:
        pooled = self._pool.setdefault(first, deque(maxlen=POOL_SIZE))
        if continuation in pooled:
            pooled.remove(continuation)
        pooled.append(continuation)
