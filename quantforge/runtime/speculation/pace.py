"""How many tokens to guess: as many as pay, from what guesses and passes have cost so far; none where they do not.

A pass with k guesses brings ``(1 - a^(k+1)) / (1 - a)`` tokens for the cost of k+1 rows. The acceptance a is a running
mean over the guesses that were judged, the cost of each width a running mean of what it took (widths in between are
interpolated). The k with the most tokens per second is taken; if that is 0 the loop is the plain one, and only now and
then a pass with one guess asks whether that has changed. What is chosen here changes the time, never the text.
"""

from __future__ import annotations

from quantforge.errors import UsageError
from quantforge.runtime.speculation.guesses import expected_tokens

MEMORY = 0.9  # of a running mean, per guess that was judged
OPTIMISM = 0.8  # acceptance that is assumed before anything was judged, as if of PRIOR guesses
PRIOR = 4.0
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # plain steps before guesses are tried again


class Pace:
    """Adaptive number of guesses for one text.

    Args:
        most: guesses of a pass at most.
        fixed: always guess as many.

    Raises:
        UsageError: ``most`` below 1.
    """

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        if most < 1:
            raise UsageError(f"{most} guesses", "from 1 on")
        self._most, self._fixed = most, fixed
        self._right, self._judged = OPTIMISM * PRIOR, PRIOR
        self._seconds: dict[int, float] = {}
        self._pause, self._waited = FIRST_PAUSE, 0

    @property
    def acceptance(self) -> float:
        """Return the running mean."""
        return self._right / self._judged

    def guesses(self) -> int:
        """Return how many guesses the next pass should have."""
        if self._fixed:
            return self._most
        # The plain step and the smallest pass are measured first.
        if 0 not in self._seconds:
            return 0
        if not any(self._seconds.keys() - {0}):
            return min(self._most, 3)
        rates = {k: expected_tokens(self.acceptance, k) / self._cost(k) for k in range(self._most + 1)}
        best = max(rates, key=lambda k: rates[k])
        if best:
            self._pause, self._waited = FIRST_PAUSE, 0
            return best
        self._waited += 1
        if self._waited < self._pause:
            return 0
        self._pause, self._waited = min(2 * self._pause, LONGEST_PAUSE), 0
        return 1

    def took(self, guesses: int, seconds: float) -> None:
        """Note what a pass with so many guesses took, guessing included."""
        before = self._seconds.get(guesses)
        # The first pass of a width prepares what later ones use: the second one counts whole.
        self._seconds[guesses] = seconds if before is None else min(seconds, 0.5 * (before + seconds))

    def judged(self, accepted: int, *, parted: bool) -> None:
        """Note how many guesses of a pass were right, and whether one was wrong."""
        for right in [1] * accepted + [0] * parted:
            self._right = MEMORY * self._right + right
            self._judged = MEMORY * self._judged + 1

    def _cost(self, guesses: int) -> float:
        """Return seconds of a pass, between the two nearest widths that were measured."""
        known = sorted(self._seconds)
        if guesses in self._seconds:
            return self._seconds[guesses]
        below = [k for k in known if k < guesses]
        above = [k for k in known if k > guesses]
        if below and above:
            low, high = below[-1], above[0]
        else:  # beyond all: along the last two; a pass never gets cheaper by guessing more
            low, high = known[-2], known[-1]
        one, two = self._seconds[low], self._seconds[high]
        slope = max(0.0, (two - one) / (high - low))
        return one + slope * (guesses - low)
