"""What keeps the order of a sum, where it would else depend on how many threads torch has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import fsum

import torch
from torch import Tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def total(values: Tensor) -> float:
    """Return the sum of all elements in float64, one dimension after the other: torch shares out one long sum."""
    while values.dim() > 1:
        values = values.sum(-1, dtype=torch.float64)
    return fsum(values.flatten().tolist())
