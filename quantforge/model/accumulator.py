"""Statistics of an activation, summed over micro-batches of fixed size and divided once at the end.

``x`` is ``[tokens, in_features]``. The Hessian of ``||x (w - q)||^2`` is ``x^T x`` up to a factor; it is accumulated in
float32 by matrix products, in place, because it is the largest thing that is held beside the block itself. It is
symmetric: strips of its rows are summed from the diagonal on, which is little more than half of the work, and the other
half is their mirror image. Sums of ``x^2`` are float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.products import Job, addmm_
from quantforge.numerics.threads import side_by_side
from quantforge.packers.input_rounding import histogram


class Accumulator:
    """Running sums for the requested statistics of one activation."""

    def __init__(self, wanted: Iterable[Statistic]) -> None:
        self._wanted = frozenset(wanted)
        self._tokens = 0
        self._mass = 0.0  # of the tokens, each counted with its weight
        self._sums: dict[Statistic, Tensor] = {}
        self._peaks: Tensor | None = None
        self._counts: Tensor | None = None
        self._sample: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Add ``[tokens, in_features]``."""
        side_by_side(lambda job: job(), self.adding([x]))

    def adding(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> list[Job]:
        """Return the work that adds ``inputs``, each ``[tokens, in_features]``: jobs that can be done side by side.

        With ``weights``, each ``[tokens]``, a token counts in means by the square of its own. Peaks and histograms know
        no weights.
        """
        self._tokens += sum(map(len, inputs))
        if Statistic.SAMPLE in self._wanted:
            self._sample += [x.to("cpu", copy=True) for x in inputs]
        jobs: list[Job] = [partial(self._summarise, inputs, Statistic.PEAKS, Statistic.HISTOGRAM)]
        if weights is None:
            self._mass += sum(map(len, inputs))
        else:
            self._mass += sum(float(one.double().square().sum()) for one in weights)
            # Rows without weight add nothing: their products are saved.
            inputs = [x * one[:, None] for x, one in zip(inputs, weights, strict=True) if one.any()]
            if not inputs:
                return jobs
        jobs.append(partial(self._summarise, inputs, Statistic.SQUARES))
        if Statistic.HESSIAN in self._wanted:
            columns = inputs[0].shape[1]
            if Statistic.HESSIAN not in self._sums:
                self._sums[Statistic.HESSIAN] = inputs[0].new_zeros(columns, columns)
            jobs += [partial(self._add_products, inputs, run) for run in _runs(columns)]
        return jobs

    def _summarise(self, inputs: Sequence[Tensor], *which: Statistic) -> None:
        wanted = self._wanted & {*which}
        for x in inputs if wanted else ():
            if Statistic.PEAKS in wanted:
                peaks = x.abs().amax(0)
                self._peaks = peaks if self._peaks is None else torch.maximum(self._peaks, peaks)
            if Statistic.HISTOGRAM in wanted:
                counts = histogram(x)
                self._counts = counts if self._counts is None else self._counts + counts
            if Statistic.SQUARES in wanted:
                self._add(Statistic.SQUARES, x.square().sum(0, dtype=torch.float64))

    def _add_products(self, inputs: Sequence[Tensor], run: slice) -> None:
        rows = self._sums[Statistic.HESSIAN][run, run.start :]
        for x in inputs:
            addmm_(rows, x[:, run].T, x[:, run.start :])

    def result(self) -> Statistics:
        """Return the means: sums divided by the number of tokens, or by the sum of their squared weights.

        The sums are consumed. Where nothing was added, or all weights are 0, the statistics are empty.
        """
        if not self._mass:
            self._sums = {}
            return Statistics()
        if Statistic.HESSIAN in self._sums:
            _mirror(self._sums[Statistic.HESSIAN])
        means = {key: total.div_(self._mass).float() for key, total in self._sums.items()}
        self._sums = {}
        return Statistics(
            tokens=self._tokens,
            squares=means.get(Statistic.SQUARES),
            hessian=means.get(Statistic.HESSIAN),
            peaks=self._peaks,
            histogram=self._counts,
            sample=torch.cat(self._sample) if self._sample else None,
        )

    def _add(self, key: Statistic, sums: Tensor) -> None:
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums


def _runs(in_features: int) -> Iterator[slice]:
    """Yield runs of rows of a Hessian: long enough for fast products, short enough that half of them is saved."""
    step = max(64, min(512, -(-in_features // 4)))
    for start in range(0, in_features, step):
        yield slice(start, min(start + step, in_features))


def _mirror(hessian: Tensor) -> None:
    """Copy the upper triangle to the lower one."""
    for run in _runs(len(hessian)):
        hessian[run.stop :, run] = hessian[run, run.stop :].T
