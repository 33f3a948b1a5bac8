"""Bounds of tuning, which plans, forecasts and `verify` go by."""

ROWS = 4  # of a step over the whole model
HELD = 8  # one row of so many decides which epoch is kept, and nothing is learned on it
MOST = 0.5  # no scale or gain changes by more than this part of itself
MOST_STEPS = 1  # of its grid, by which a code changes at most, on each way
RATE = 0.035  # of the codes' offsets, at most
REACH = 1.4  # steps of its grid that a code goes in all steps where every gradient agrees


def whole_epochs(epochs: int) -> int:
    """Return how many of all epochs learn on the whole model; the first is gone through block after block."""
    return max(0, epochs - 1)


def rate_of(steps: int) -> float:
    """Return the first rate of codes, which falls over so many steps."""
    return min(RATE, 2 * REACH / steps)
