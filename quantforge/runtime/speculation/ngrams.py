"""Guesses from the text itself: what followed the last time that its last tokens occurred.

Answers quote their prompt (code that is edited, a text that is summarised, names), and repeat themselves. The longest
run of tokens that occurred before is looked up, in constant time per token: for every length a table from the run to
the place behind its last occurrence (prompt lookup, the n-gram speculation of vLLM and llama.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from quantforge.errors import UsageError
from quantforge.runtime.sampling import RowSampler


class NgramGuesser:
    """Guesser that copies.

    Args:
        longest: length of the runs that are looked up first.
        shortest: of those that are looked up last; below 2 it copies after any token that was there before.

    Raises:
        UsageError: not 1 <= shortest <= longest.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise UsageError(f"runs of {shortest} to {longest} tokens", "1 <= shortest <= longest")
        self._lengths = range(longest, shortest - 1, -1)
        self._behind: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens of the history whose runs are in the table

    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> list[int]:  # noqa: ARG002 (copies do not draw)
        """Return what followed, as `Guesser.guess` says; a copy that reaches the end goes on with what it wrote."""
        # The run that ends the history is left out, it would find itself.
        for end in range(max(1, self._known), len(history)):
            for length in self._lengths:
                if length <= end:
                    self._behind[tuple(history[end - length : end])] = end
        self._known = max(self._known, len(history))
        for length in self._lengths:
            place = self._behind.get(tuple(history[-length:])) if length <= len(history) else None
            if place is not None:
                found: list[int] = []
                for step in range(most):
                    at = place + step
                    found.append(history[at] if at < len(history) else found[at - len(history)])
                return found
        return []
