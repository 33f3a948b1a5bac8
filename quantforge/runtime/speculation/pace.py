"""Pace: how many tokens to draft in a row, from what passes have cost so far; none where drafting does not pay.

A pass with k drafted tokens brings ``(1 - a^(k+1)) / (1 - a)`` tokens for the cost of k+1 rows. The acceptance a is a
running mean over the drafted tokens that were judged. The cost of each width is the median of its last passes, without
the first one, which prepares what later ones use; widths in between are interpolated. The k with the most tokens per
second is taken. If that is 0 the loop is the plain one, and only now and then a pass with one drafted token asks
whether that has changed. What is chosen here changes the time, never the text.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from quantforge.runtime.speculation.verify import expected_tokens

MEMORY = 0.9  # of a running mean, per drafted token that was judged
OPTIMISM = 0.6  # acceptance that is assumed before anything was judged, as if of PRIOR tokens
PRIOR = 2.0
WIDTHS = (1, 2, 4, 8, 16, 32)  # drafted tokens of a pass; each width has programs of its own
REVIEWED = 8  # plain steps between two looks at whether drafting would pay
REMEMBERED = 5  # passes of a width
FIRST_DRAFT = 2
FIRST_PAUSE, LONGEST_PAUSE = 16, 128  # plain steps before drafting is tried again


class Pace:
    """Adaptive number of drafted tokens in a row.

    Args:
        most: at most.
        fixed: always draft as many.
    """

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self._most, self._fixed = most, fixed
        self._right, self._judged = OPTIMISM * PRIOR, PRIOR
        self._seconds: dict[int, deque[float]] = {}  # of passes by drafted tokens
        self._pause, self._waited = FIRST_PAUSE, 0

    def tokens(self) -> int:
        """Return how many tokens to draft for the next pass."""
        if self._fixed:
            return self._most
        if self._waited % REVIEWED:  # nothing was judged since drafting did not pay
            self._waited += 1
            return 0
        costs = {k: median(taken) for k, taken in sorted(self._seconds.items()) if taken}
        if 0 not in costs:  # the plain step is measured first, then some pass
            return 0
        if len(costs) == 1:
            return min(self._most, FIRST_DRAFT)
        acceptance = self._right / self._judged
        tried = {0, self._most, *(k for k in WIDTHS if k < self._most)}
        rates = {k: expected_tokens(acceptance, k) / _cost(k, costs) for k in sorted(tried)}
        best = max(rates, key=lambda k: rates[k])
        if best:
            self._pause, self._waited = FIRST_PAUSE, 0
            return best
        if self._waited < self._pause:
            self._waited += 1
            return 0
        self._pause, self._waited = min(2 * self._pause, LONGEST_PAUSE), 0
        return 1

    def took(self, drafted: int, seconds: float) -> None:
        """Note what a pass took, drafting included; the first of its width is not counted."""
        if drafted in self._seconds:
            self._seconds[drafted].append(seconds)
        else:
            self._seconds[drafted] = deque(maxlen=REMEMBERED)

    def judged(self, accepted: int, *, missed: bool) -> None:
        """Note how many drafted tokens of a pass were right, and whether one was wrong."""
        for right in [1] * accepted + [0] * missed:
            self._right = MEMORY * self._right + right
            self._judged = MEMORY * self._judged + 1


def _cost(drafted: int, costs: dict[int, float]) -> float:
    """Return seconds of a pass, on the line through the two measured widths around it, or through the last two."""
    widths = list(costs)
    high = next((place for place, k in enumerate(widths) if k >= drafted), len(widths) - 1)
    low, high = widths[max(0, high - 1)], widths[max(1, high)]
    slope = max(0.0, (costs[high] - costs[low]) / (high - low))  # never cheaper by drafting more
    return costs[low] + slope * (drafted - low)
