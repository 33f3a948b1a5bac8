"""Bounds of tuning, which forecasts and `verify` go by."""

ROWS = 4  # of a step
MOST = 0.5  # no scale or gain changes by more than this part of itself
