"""Guesses from the text itself: what followed the last time that its last tokens occurred.

Answers quote their prompt (code that is edited, a text that is summarised, names), and repeat themselves. The longest
run of tokens that occurred before is looked up, in constant time per token: for every length a table from the run to
the places behind its last occurrences (prompt lookup, the n-gram speculation of vLLM and llama.cpp). A tree of guesses
holds what followed several of them, the longest run and the latest place first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import prod

from quantforge.errors import UsageError
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.guess_trees import GuessTree

MOST_PLACES = 8  # of a run, whose continuations may be the same


class NgramGuesser:
    """Guesser that copies.

    Args:
        longest: length of the runs that are looked up first.
        shortest: of those that are looked up last; below 2 it copies after any token that was there before.
        shape: of its trees, see `shape_of`; none: one guess for each place.

    Raises:
        UsageError: not 1 <= shortest <= longest.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, shape: Sequence[int] = ()) -> None:
        if not 1 <= shortest <= longest:
            raise UsageError(f"runs of {shortest} to {longest} tokens", "1 <= shortest <= longest")
        self._lengths = range(longest, shortest - 1, -1)
        self._shape = tuple(shape)
        self._behind: dict[tuple[int, ...], deque[int]] = {}
        self._places = MOST_PLACES if prod(self._shape) > 1 else 1
        self._known = 0  # tokens of the history whose runs are in the table

    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> GuessTree:  # noqa: ARG002 (copies do not draw)
        """Return what followed, as `Guesser.guess` says; a copy that reaches the end goes on with what it wrote."""
        # The run that ends the history is left out, it would find itself.
        for end in range(max(1, self._known), len(history)):
            for length in self._lengths:
                if length <= end:
                    run = tuple(history[end - length : end])
                    self._behind.setdefault(run, deque(maxlen=self._places)).append(end)
        self._known = max(self._known, len(history))
        shape = self._shape[:most] or (1,) * most
        tree = GuessTree()
        for length in self._lengths:
            run = tuple(history[-length:]) if length <= len(history) else ()
            for place in reversed(self._behind.get(run, ())):
                tree.add_path(_copied(history, place, len(shape)), shape)
            if tree.tokens and not self._shape:
                break
        return tree


def _copied(history: Sequence[int], place: int, count: int) -> list[int]:
    found: list[int] = []
    for at in range(place, place + count):
        found.append(history[at] if at < len(history) else found[at - len(history)])
    return found
