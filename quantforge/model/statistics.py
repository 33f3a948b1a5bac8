"""Statistics of activations that a quantization method can request, and their observed values. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from quantforge.scheme import Activation

if TYPE_CHECKING:
    from torch import Tensor


EXPERT_BATCH_TOKENS = 1024  # tokens that run through an expert together


class Statistic(StrEnum):
    """Statistics of a linear's input that a method may request."""

    SQUARES = "squares"  # mean of x^2 per column: importance
    HESSIAN = "hessian"  # mean of x x^T
    PEAKS = "peaks"  # largest |x| per column
    HISTOGRAM = "histogram"  # counts of |x|, for a static range
    SAMPLE = "sample"  # the inputs of a few tokens
    CACHE = "cache"  # largest key and value of each head; belongs to a block


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of one shared input, observed over ``tokens`` calibration tokens.

    Attributes:
        tokens: how many activation rows were seen.
        squares: float32 ``[in_features]``, mean of x^2, or None when it was not asked for.
        hessian: float32 ``[in_features, in_features]``, mean of x x^T: summed first, divided once.
        peaks: float32 ``[in_features]``, largest of |x|.
        histogram: int64, see `quantforge.packers.input_rounding.magnitude_histogram`.
        sample: float32 ``[tokens, in_features]``, the inputs themselves.
    """

    tokens: int = 0
    squares: Tensor | None = None
    hessian: Tensor | None = None
    peaks: Tensor | None = None
    histogram: Tensor | None = None
    sample: Tensor | None = None

    @property
    def importance(self) -> Tensor | None:
        """Return the diagonal of the Hessian ``[in_features]``, or the mean squares; None if neither was observed."""
        return self.squares if self.hessian is None else self.hessian.diagonal()

    def copy(self) -> Statistics:
        """Return a deep copy."""
        values = (self.squares, self.hessian, self.peaks, self.histogram, self.sample)
        return Statistics(
            self.tokens, *(None if value is None else value.clone() for value in values)
        )

    def select(self, requested: frozenset[Statistic]) -> Statistics:
        """Return only the requested statistics, sharing tensors; empty statistics for an empty request."""
        if not requested:
            return Statistics()
        return Statistics(
            self.tokens,
            squares=self.squares if Statistic.SQUARES in requested else None,
            hessian=self.hessian if Statistic.HESSIAN in requested else None,
            peaks=self.peaks if Statistic.PEAKS in requested else None,
            histogram=self.histogram if Statistic.HISTOGRAM in requested else None,
            sample=self.sample if Statistic.SAMPLE in requested else None,
        )

    def with_ranges_of(self, other: Statistics) -> Statistics:
        """Return a copy with the ranges (peaks and histogram) of other statistics, sharing tensors."""
        return replace(self, peaks=other.peaks, histogram=other.histogram)

    def shrink_toward(self, prior: Statistics, tokens: float) -> Statistics:
        """Mix these means over ``n`` tokens with those of ``prior``, which count as ``m = tokens`` tokens.

        Each mean becomes ``(n H + m H_0) / (n + m)``; with ``n = 0`` it is the prior. A Hessian of few tokens has low
        rank and says nothing about other directions. Ranges (peaks and histogram) are joined with those of the prior if
        ``n <
        m``. The tensors of these statistics are overwritten.
        """
        own_share = self.tokens / (self.tokens + tokens)
        is_small_sample = self.tokens < tokens
        return Statistics(
            tokens=self.tokens,
            squares=_mix_means(self.squares, prior.squares, own_share),
            hessian=_mix_means(self.hessian, prior.hessian, own_share),
            peaks=_join_ranges(self.peaks, prior.peaks, is_small_sample, lambda a, b: a.maximum(b)),
            histogram=_join_ranges(
                self.histogram, prior.histogram, is_small_sample, lambda a, b: a + b
            ),
        )


def statistics_for_inputs(inputs: Iterable[Activation | None]) -> frozenset[Statistic]:
    """Return the statistics required to quantize activations of these kinds."""
    requested: set[Statistic] = set()
    for activation in inputs:
        if activation is not None and not activation.dynamic:
            requested |= {Statistic.PEAKS, Statistic.HISTOGRAM}
        elif activation is not None and activation.threshold is not None:
            requested.add(Statistic.PEAKS)
    return frozenset(requested)


def _mix_means(current: Tensor | None, prior: Tensor | None, own_share: float) -> Tensor | None:
    """Return the mean of two tensors weighted by ``own_share`` and ``1 - share``; the first is overwritten."""
    if current is None or prior is None:
        return None if prior is None else prior.clone()
    return current.mul_(own_share).add_(prior, alpha=1 - own_share)


def _join_ranges(
    current: Tensor | None,
    prior: Tensor | None,
    join_both: bool,
    join: Callable[[Tensor, Tensor], Tensor],
) -> Tensor | None:
    if current is None or prior is None:
        return prior if current is None else current
    return join(current, prior) if join_both else current
