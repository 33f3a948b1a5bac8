"""Statistics of an activation, summed over micro-batches of fixed size and divided once at the end.

``x`` is ``[tokens, in_features]``. The Hessian of ``||x (w - q)||^2`` is ``x^T x`` up to a factor; it is accumulated in
float32 by matrix products, in place, because it is the largest thing that is held beside the block itself. It is
symmetric: runs of its rows are summed from the diagonal on, which is little more than half of the work, and the other
half is their mirror image. Sums of ``x^2`` are float64. With a fixed micro-batch the results do not depend
on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from quantforge.packers.inputs import histogram
from quantforge.quantizers import Statistic, Statistics


class Accumulator:
    """Running sums of what is wanted of one activation."""

    def __init__(self, wanted: Iterable[Statistic]) -> None:
        self._wanted = frozenset(wanted)
        self._tokens = 0
        self._sums: dict[Statistic, Tensor] = {}
        self._peaks: Tensor | None = None
        self._counts: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Add ``[tokens, in_features]``."""
        self._tokens += x.shape[0]
        if Statistic.PEAKS in self._wanted:
            peaks = x.abs().amax(0)
            self._peaks = peaks if self._peaks is None else torch.maximum(self._peaks, peaks)
        if Statistic.HISTOGRAM in self._wanted:
            counts = histogram(x)
            self._counts = counts if self._counts is None else self._counts + counts
        if Statistic.SQUARES in self._wanted:
            self._add(Statistic.SQUARES, x.square().sum(0, dtype=torch.float64))
        if Statistic.HESSIAN in self._wanted:
            if Statistic.HESSIAN not in self._sums:
                self._sums[Statistic.HESSIAN] = x.new_zeros(x.shape[1], x.shape[1])
            for run in _runs(x.shape[1]):
                rows = self._sums[Statistic.HESSIAN][run, run.start :]
                rows.addmm_(x[:, run].T, x[:, run.start :])

    def result(self) -> Statistics:
        """Divide by the number of tokens. The sums are consumed."""
        if Statistic.HESSIAN in self._sums:
            _mirror(self._sums[Statistic.HESSIAN])
        means = {key: total.div_(self._tokens).float() for key, total in self._sums.items()}
        self._sums = {}
        return Statistics(
            tokens=self._tokens,
            squares=means.get(Statistic.SQUARES),
            hessian=means.get(Statistic.HESSIAN),
            peaks=self._peaks,
            histogram=self._counts,
        )

    def _add(self, key: Statistic, sums: Tensor) -> None:
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums


def _runs(in_features: int) -> Iterator[slice]:
    """Runs of rows of a Hessian: long enough for fast products, short enough that half of them is saved."""
    step = max(64, min(512, -(-in_features // 4)))
    for start in range(0, in_features, step):
        yield slice(start, min(start + step, in_features))


def _mirror(hessian: Tensor) -> None:
    """Copy what is right of the diagonal to the left of it."""
    for run in _runs(len(hessian)):
        hessian[run.stop :, run] = hessian[run, run.stop :].T


def first_nonfinite(x: Tensor) -> int | None:
    """Index of the first row of ``[rows, ...]`` that holds a NaN or an infinity, or None.

    A finite sum proves that all are finite, at a fraction of the cost of looking at each.
    """
    if torch.isfinite(x.sum()):
        return None
    bad = ~torch.isfinite(x).flatten(1).all(1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None
