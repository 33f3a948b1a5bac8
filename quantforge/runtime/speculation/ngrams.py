"""N-grams: copy from the text itself what followed the last time that its last tokens occurred.

Completions quote their prompt (code that is edited, a text that is summarized, names), and repeat themselves. The
longest run of tokens that occurred before is looked up, in constant time per token: for every length a table from the
run to the places after its last occurrences (prompt lookup, the n-gram speculation of vLLM and llama.cpp). A tree holds
what followed several of them, the longest run and the latest place first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.tree import DraftTree

LENGTHS = (4, 3, 2)  # of runs that are looked up
MOST_PLACES = 8  # of a run, whose continuations may be the same


class NgramDrafter(Drafter):
    """Drafter that copies.

    Args:
        shape: of its trees, see `shape_of`.
        lengths: of the runs that are looked up, the longest first; below 2 it copies after any token.
    """

    def __init__(self, shape: Sequence[int], lengths: Sequence[int] = LENGTHS) -> None:
        self._shape, self._lengths = shape, lengths
        self._after: dict[tuple[int, ...], deque[int]] = {}
        self._places = MOST_PLACES if max(shape) > 1 else 1
        self._known = 1  # tokens of the history whose runs are in the table

    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (copies do not draw)
        """Return what followed, as `Drafter.draft`; a copy that reaches the end continues with what it wrote."""
        # The run that ends the history is left out, it would find itself.
        for end in range(self._known, len(history)):
            for length in self._lengths:
                if length <= end:
                    run = tuple(history[end - length : end])
                    self._after.setdefault(run, deque(maxlen=self._places)).append(end)
        self._known = len(history)
        shape, tree = self._shape[:most], DraftTree()
        for length in self._lengths:
            for place in reversed(self._after.get(tuple(history[-length:]), ())):
                copied: list[int] = []
                for at in range(place, place + len(shape)):
                    copied.append(history[at] if at < len(history) else copied[at - len(history)])
                tree.add_path(copied, shape)
                if self._places == 1:
                    return tree
        return tree
