"""Accumulate statistics of one activation over micro-batches, and divide the sums once at the end.

``x`` is ``[tokens, in_features]``. The Hessian of ``||x (w - q)||^2`` is ``x^T x`` up to a factor. It is accumulated in
float32, in place, because it is the largest tensor in memory apart from the block itself. It is symmetric, so only
strips of rows from the diagonal on are summed (little more than half of the work); the lower triangle is copied from
the upper one at the end. Sums of ``x^2`` are float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.products import TileTask, addmm_
from quantforge.numerics.threads import run_parallel
from quantforge.packers.input_rounding import magnitude_histogram


class Accumulator:
    """Running sums for the requested statistics of one activation."""

    def __init__(self, requested: Iterable[Statistic]) -> None:
        self._requested = frozenset(requested)
        self._tokens = 0
        self._total_weight = 0.0  # of the tokens, each counted with its weight
        self._sums: dict[Statistic, Tensor] = {}
        self._peaks: Tensor | None = None
        self._histogram: Tensor | None = None
        self._sample: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Add the tokens ``[tokens, in_features]`` of one batch to the sums."""
        run_parallel(lambda job: job(), self.addition_jobs([x]))

    def addition_jobs(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> list[TileTask]:
        """Return jobs that add ``inputs``, each ``[tokens, in_features]``; the jobs can run in parallel.

        With ``weights`` (each ``[tokens]``), a token counts in the means with the square of its weight. Peaks and
        histograms ignore the weights.
        """
        self._tokens += sum(map(len, inputs))
        if Statistic.SAMPLE in self._requested:
            self._sample += [x.to("cpu", copy=True) for x in inputs]
        jobs: list[TileTask] = [
            partial(self._summarize, inputs, Statistic.PEAKS, Statistic.HISTOGRAM)
        ]
        if weights is None:
            self._total_weight += sum(map(len, inputs))
        else:
            self._total_weight += sum(float(weight.double().square().sum()) for weight in weights)
            # Rows without weight add nothing: their products are saved.
            inputs = [
                x * weight[:, None]
                for x, weight in zip(inputs, weights, strict=True)
                if weight.any()
            ]
            if not inputs:
                return jobs
        jobs.append(partial(self._summarize, inputs, Statistic.SQUARES))
        if Statistic.HESSIAN in self._requested:
            columns = inputs[0].shape[1]
            if Statistic.HESSIAN not in self._sums:
                self._sums[Statistic.HESSIAN] = inputs[0].new_zeros(columns, columns)
            jobs += [partial(self._add_products, inputs, rows) for rows in _row_strips(columns)]
        return jobs

    def _summarize(self, inputs: Sequence[Tensor], *statistics: Statistic) -> None:
        requested = self._requested & {*statistics}
        for x in inputs if requested else ():
            if Statistic.PEAKS in requested:
                peaks = x.abs().amax(0)
                self._peaks = peaks if self._peaks is None else torch.maximum(self._peaks, peaks)
            if Statistic.HISTOGRAM in requested:
                counts = magnitude_histogram(x)
                self._histogram = counts if self._histogram is None else self._histogram + counts
            if Statistic.SQUARES in requested:
                self._add(Statistic.SQUARES, x.square().sum(0, dtype=torch.float64))

    def _add_products(self, inputs: Sequence[Tensor], rows: slice) -> None:
        hessian_rows = self._sums[Statistic.HESSIAN][rows, rows.start :]
        for x in inputs:
            addmm_(hessian_rows, x[:, rows].T, x[:, rows.start :])

    def result(self) -> Statistics:
        """Return the means: the sums divided by the number of tokens, or by the sum of the squared weights.

        The sums are consumed. If nothing was added, or all weights are 0, the statistics are empty.
        """
        if not self._total_weight:
            self._sums = {}
            return Statistics()
        if Statistic.HESSIAN in self._sums:
            _mirror_upper_triangle(self._sums[Statistic.HESSIAN])
        means = {key: total.div_(self._total_weight).float() for key, total in self._sums.items()}
        self._sums = {}
        return Statistics(
            tokens=self._tokens,
            squares=means.get(Statistic.SQUARES),
            hessian=means.get(Statistic.HESSIAN),
            peaks=self._peaks,
            histogram=self._histogram,
            sample=torch.cat(self._sample) if self._sample else None,
        )

    def _add(self, key: Statistic, sums: Tensor) -> None:
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums


def _row_strips(in_features: int) -> Iterator[slice]:
    """Yield slices of Hessian rows: long enough for fast products, short enough to skip half of the work."""
    step = max(64, min(512, -(-in_features // 4)))
    for start in range(0, in_features, step):
        yield slice(start, min(start + step, in_features))


def _mirror_upper_triangle(hessian: Tensor) -> None:
    """Copy the upper triangle of a Hessian to the lower one, in place."""
    for rows in _row_strips(len(hessian)):
        hessian[rows.stop :, rows] = hessian[rows, rows.stop :].T
