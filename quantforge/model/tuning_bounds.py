"""Bounds of tuning, which plans, forecasts and `verify` go by."""

ROWS = 4  # of a step
MOST = 0.5  # no scale or gain changes by more than this part of itself
MOST_STEPS = 1  # of its grid, by which a code changes at most


def learns_codes(epochs: int) -> bool:
    """Return whether codes are learned too."""
    return epochs > 1
