"""Statistics of an activation, summed over micro-batches of fixed size and divided once at the end.

``x`` is ``[tokens, in_features]``. The Hessian of ``||x (w - q)||^2`` is ``x^T x`` up to a factor; it is accumulated in
float32 by matrix products, in place, because it is the largest thing that is held beside the block itself. Sums of
``|x|`` and ``x^2`` are float64. With a fixed micro-batch the results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quantforge.quantizers import Statistic, Statistics


class Accumulator:
    """Running sums of what is wanted of one activation."""

    def __init__(self, wanted: Iterable[Statistic]) -> None:
        self._wanted = frozenset(wanted)
        self._tokens = 0
        self._sums: dict[Statistic, Tensor] = {}

    def add(self, x: Tensor) -> None:
        """Add ``[tokens, in_features]``."""
        self._tokens += x.shape[0]
        if Statistic.MAGNITUDE in self._wanted:
            self._add(Statistic.MAGNITUDE, x.abs().sum(0, dtype=torch.float64))
        if Statistic.SQUARES in self._wanted:
            self._add(Statistic.SQUARES, x.square().sum(0, dtype=torch.float64))
        if Statistic.HESSIAN in self._wanted:
            if Statistic.HESSIAN not in self._sums:
                self._sums[Statistic.HESSIAN] = x.new_zeros(x.shape[1], x.shape[1])
            self._sums[Statistic.HESSIAN].addmm_(x.T, x)

    def result(self) -> Statistics:
        """Divide by the number of tokens. The sums are consumed."""
        means = {key: total.div_(self._tokens).float() for key, total in self._sums.items()}
        self._sums = {}
        return Statistics(
            tokens=self._tokens,
            squares=means.get(Statistic.SQUARES),
            magnitude=means.get(Statistic.MAGNITUDE),
            hessian=means.get(Statistic.HESSIAN),
        )

    def _add(self, key: Statistic, sums: Tensor) -> None:
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums


def first_nonfinite(x: Tensor) -> int | None:
    """Index of the first row of ``[rows, ...]`` that holds a NaN or an infinity, or None.

    A finite sum proves that all are finite, at a fraction of the cost of looking at each.
    """
    if torch.isfinite(x.sum()):
        return None
    bad = ~torch.isfinite(x).flatten(1).all(1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None
