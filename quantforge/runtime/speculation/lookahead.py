"""Lookahead decoding: the model guesses for itself, many places at once (Fu et al., arXiv 2402.02057).

Beside the last token a pass computes a window: a few columns, each a run of tokens that may stand so far ahead. What
the model says behind each run makes it a token longer, and after some passes, when nothing is left of the tokens it
began with, a column is an n-gram that the model itself wrote, word by word, for text like this one (Jacobi iteration).
Such n-grams are kept by their first token, and those that begin with the text's last token are the guesses of a pass.

The window is a tree too. The first tokens of the columns stand behind each other, and the rest of each column hangs on
its first token: so a token sees the first tokens of the columns before it, and its own column.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.guess_trees import ROOT, GuessTree
from quantforge.runtime.speculation.guesses import Computed

COLUMNS = 8  # of the window
LENGTH = 4  # tokens of an n-gram
KEPT = 8  # n-grams that begin with a token, the latest ones


class LookaheadGuesser:
    """Guesser whose window of further tokens is computed in each pass.

    Args:
        columns: of the window.
        length: tokens of an n-gram, at least 2.

    Attributes:
        blocks: of those it sees what goes into them: none.
    """

    blocks: tuple[int, ...] = ()

    def __init__(self, columns: int = COLUMNS, length: int = LENGTH) -> None:
        self._width, self._length = columns, length
        self._columns: list[list[int]] = []  # runs of length - 1 tokens
        self._ages: list[int] = []  # tokens at the end of each that the model wrote
        self._places: list[list[int]] = []  # nodes of each in the last tree
        self._pool: dict[int, deque[tuple[int, ...]]] = {}
        self._draw = random.Random(0)

    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> GuessTree:  # noqa: ARG002 (it does not draw)
        """Return n-grams that begin with the last token, as `Guesser.guess` says, and the window as probes."""
        tree = GuessTree()
        shape = (KEPT, *[KEPT] * (self._length - 2))
        for found in reversed(self._pool.get(history[-1], ())):
            tree.add_path(found, shape[:most])
        while len(self._columns) < self._width:  # they begin with anything of the text
            self._columns.append([self._draw.choice(history) for _ in range(self._length - 1)])
            self._ages.append(0)
        tree.early = min(self._ages) < self._length - 1
        first = ROOT
        self._places = []
        for column in self._columns:
            node = first = tree.add(first, column[0], probe=True)
            self._places.append([node])
            for token in column[1:]:
                node = tree.add(node, token, probe=True)
                self._places[-1].append(node)
        return tree

    def watch(self, computed: Computed) -> None:
        """Make each column longer by what the model says behind it, and keep those that are all the model's."""
        if not computed.tree.probes:  # without guesses; the window stays where it was in the text
            self._columns, self._ages = [], []
            return
        best = computed.logits.argmax(-1).tolist()
        for place, column in enumerate(self._columns):
            following = best[self._places[place][-1] + 1]
            if self._ages[place] >= self._length - 1:
                self._keep((*column, following))
            self._columns[place] = [*column[1:], following]
            self._ages[place] += 1
        gone = len(computed.following) - 1  # their places are text now
        del self._columns[:gone], self._ages[:gone]

    def _keep(self, run: tuple[int, ...]) -> None:
        kept = self._pool.setdefault(run[0], deque(maxlen=KEPT))
        if run[1:] in kept:
            kept.remove(run[1:])
        kept.append(run[1:])
