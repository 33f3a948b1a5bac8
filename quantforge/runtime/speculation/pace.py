"""How many tokens to guess in a row: as many as pay, from what passes have cost so far; none where they do not.

A pass with k guesses brings ``(1 - a^(k+1)) / (1 - a)`` tokens for the cost of k+1 rows. The acceptance a is a running
mean over the guesses that were judged. The cost of each width is the median of its last passes, without the first one,
which prepares what later ones use; widths in between are interpolated. The k with the most tokens per second is taken.
If that is 0 the loop is the plain one, and only now and then a pass with one guess asks whether that has changed. What
is chosen here changes the time, never the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from quantforge.errors import UsageError
from quantforge.runtime.speculation.guesses import expected_tokens

MEMORY = 0.9  # of a running mean, per guess that was judged
OPTIMISM = 0.6  # acceptance that is assumed before anything was judged, as if of PRIOR guesses
PRIOR = 2.0
WIDTHS = (1, 2, 4, 8, 16, 32)  # guesses of a pass; each width has programs of its own
REVIEWED = 8  # plain steps between two looks at whether guesses would pay
REMEMBERED = 5  # passes of a width
FIRST_GUESSES = 2
FIRST_PAUSE, LONGEST_PAUSE = 16, 128  # plain steps before guesses are tried again


class PassCosts:
    """Seconds of passes by their guesses in a row; of one decoder and cache, for any number of texts."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self.known: dict[
            int, float
        ] = {}  # medians of the widths that were measured, the smallest first

    def took(self, guesses: int, seconds: float) -> None:
        """Note a pass; the first of its width is not counted."""
        if guesses in self._last:
            self._last[guesses].append(seconds)
            self.known[guesses] = median(self._last[guesses])
            self.known = dict(sorted(self.known.items()))
        else:
            self._last[guesses] = deque(maxlen=REMEMBERED)


class GuessPace:
    """Adaptive number of guesses in a row for one text.

    Args:
        most: at most.
        fixed: always guess as many.
        costs: what passes took before.

    Raises:
        UsageError: ``most`` below 1.
    """

    def __init__(self, most: int, *, fixed: bool = False, costs: PassCosts | None = None) -> None:
        if most < 1:
            raise UsageError(f"{most} guesses", "from 1 on")
        self._most, self._fixed = most, fixed
        self._right, self._judged = OPTIMISM * PRIOR, PRIOR
        self._costs = costs or PassCosts()
        self._pause, self._waited = FIRST_PAUSE, 0

    @property
    def acceptance(self) -> float:
        """Return the running mean."""
        return self._right / self._judged

    def guesses(self) -> int:
        """Return how many guesses the next pass should have."""
        if self._fixed:
            return self._most
        if self._waited % REVIEWED:  # nothing was judged since guesses did not pay
            self._waited += 1
            return 0
        known = self._costs.known
        if 0 not in known:  # the plain step is measured first, then some pass
            return 0
        if len(known) == 1:
            return min(self._most, FIRST_GUESSES)
        tried = {0, self._most, *(k for k in WIDTHS if k < self._most)}
        rates = {k: expected_tokens(self.acceptance, k) / _cost(k, known) for k in sorted(tried)}
        best = max(rates, key=lambda k: rates[k])
        if best:
            self._pause, self._waited = FIRST_PAUSE, 0
            return best
        if self._waited < self._pause:
            self._waited += 1
            return 0
        self._pause, self._waited = min(2 * self._pause, LONGEST_PAUSE), 0
        return 1

    def took(self, guesses: int, seconds: float) -> None:
        """Note what a pass with so many guesses took, guessing included."""
        self._costs.took(guesses, seconds)

    def judged(self, accepted: int, *, parted: bool) -> None:
        """Note how many guesses of a pass were right, and whether one was wrong."""
        for right in [1] * accepted + [0] * parted:
            self._right = MEMORY * self._right + right
            self._judged = MEMORY * self._judged + 1


def _cost(guesses: int, known: Mapping[int, float]) -> float:
    """Return seconds of a pass, on the line through the two measured widths around it, or through the last two."""
    widths = list(known)
    high = next((place for place, k in enumerate(widths) if k >= guesses), len(widths) - 1)
    low, high = widths[max(0, high - 1)], widths[max(1, high)]
    slope = max(0.0, (known[high] - known[low]) / (high - low))  # never cheaper by guessing more
    return known[low] + slope * (guesses - low)
