"""Bounds of tuning, which `verify` holds its results to."""

MOST = 0.5  # no scale or gain changes by more than this part of itself
