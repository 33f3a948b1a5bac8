"""Checks and sums of the values of a tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Return whether all values are finite, without allocating a tensor of that size."""
    return not values.numel() or all(math.isfinite(limit) for limit in values.aminmax())


def total(values: Tensor) -> float:
    """Return the sum of all elements in float64, independent of the number of threads."""
    while values.dim() > 1:
        values = values.sum(-1, dtype=torch.float64)
    return math.fsum(values.flatten().tolist())
