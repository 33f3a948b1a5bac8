"""N-gram drafting (prompt lookup): copy what followed the text's last tokens at an earlier place.

Completions quote their prompt (edited code, summaries, names) and repeat themselves. The longest suffix of the text
that occurred before is looked up in constant time per token, in a table from n-grams to the positions after their
latest occurrences (also known as the n-gram speculation of vLLM and llama.cpp). A draft tree holds the continuations of
several occurrences, longest n-gram and latest position first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.tree import DraftTree

NGRAM_LENGTHS = (4, 3, 2)  # lengths of the n-grams that are looked up
MAX_OCCURRENCES = 8  # remembered occurrences of an n-gram; their continuations may be equal


class NgramDrafter(Drafter):
    """Drafter that copies continuations of n-grams from the text itself.

    Args:
        shape: branching factors of the draft tree by depth, see `parse_tree_shape`.
        lengths: lengths of the n-grams to look up, the longest first; 1 matches any repeated token.
    """

    def __init__(self, shape: Sequence[int], lengths: Sequence[int] = NGRAM_LENGTHS) -> None:
        self._shape, self._lengths = shape, lengths
        self._positions_after: dict[tuple[int, ...], deque[int]] = {}
        self._max_occurrences = MAX_OCCURRENCES if max(shape) > 1 else 1
        self._indexed_tokens = 1  # tokens of the history whose n-grams are in the table

    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (copies do not draw)
        """Draft the tokens that followed earlier occurrences; see `Drafter.draft`.

        A copy that reaches the end of the text continues with the tokens copied so far.
        """
        # The n-gram at the end of the history is not indexed yet: it would match itself.
        for end in range(self._indexed_tokens, len(history)):
            for length in self._lengths:
                if length <= end:
                    ngram = tuple(history[end - length : end])
                    self._positions_after.setdefault(
                        ngram, deque(maxlen=self._max_occurrences)
                    ).append(end)
        self._indexed_tokens = len(history)
        shape, tree = self._shape[:most], DraftTree()
        for length in self._lengths:
            for position in reversed(self._positions_after.get(tuple(history[-length:]), ())):
                copied: list[int] = []
                for source in range(position, position + len(shape)):
                    copied.append(
                        history[source] if source < len(history) else copied[source - len(history)]
                    )
                tree.add_path(copied, shape)
                if self._max_occurrences == 1:
                    return tree
        return tree
