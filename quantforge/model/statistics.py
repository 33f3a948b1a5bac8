"""Statistics of what shared inputs read: which a method may ask for, and what was observed. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from quantforge.scheme import Activation

if TYPE_CHECKING:
    from torch import Tensor


EXPERT_TOKENS = 1024  # that pass an expert together


class Statistic(StrEnum):
    """Statistics of a linear's input that a method may request."""

    SQUARES = "squares"  # mean of x^2 per column: importance
    HESSIAN = "hessian"  # mean of x x^T
    PEAKS = "peaks"  # largest |x| per column
    HISTOGRAM = "histogram"  # counts of |x|, for a static range
    SAMPLE = "sample"  # the inputs themselves: of a few tokens
    CACHE = "cache"  # largest key and value of each head: of a block, not of a shared input


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of one shared input, observed over ``tokens`` calibration tokens.

    Attributes:
        tokens: how many activation rows were seen.
        squares: float32 ``[in_features]``, mean of x^2, or None when it was not asked for.
        hessian: float32 ``[in_features, in_features]``, mean of x x^T: summed first, divided once.
        peaks: float32 ``[in_features]``, largest of |x|.
        histogram: int64, see `quantforge.packers.input_rounding.histogram`.
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
        """Return the diagonal of the Hessian ``[in_features]``, or else the squares; None without either."""
        return self.squares if self.hessian is None else self.hessian.diagonal()

    def copy(self) -> Statistics:
        """Return a deep copy."""
        values = (self.squares, self.hessian, self.peaks, self.histogram, self.sample)
        return Statistics(
            self.tokens, *(None if value is None else value.clone() for value in values)
        )

    def only(self, wanted: frozenset[Statistic]) -> Statistics:
        """Return only the wanted statistics, sharing tensors; empty statistics if nothing is wanted."""
        if not wanted:
            return Statistics()
        return Statistics(
            self.tokens,
            squares=self.squares if Statistic.SQUARES in wanted else None,
            hessian=self.hessian if Statistic.HESSIAN in wanted else None,
            peaks=self.peaks if Statistic.PEAKS in wanted else None,
            histogram=self.histogram if Statistic.HISTOGRAM in wanted else None,
            sample=self.sample if Statistic.SAMPLE in wanted else None,
        )

    def with_ranges_of(self, other: Statistics) -> Statistics:
        """Return these statistics with the ranges (peaks and histogram) of others, sharing tensors."""
        return replace(self, peaks=other.peaks, histogram=other.histogram)

    def toward(self, prior: Statistics, tokens: float) -> Statistics:
        """Mix these means of ``n`` tokens with those of ``prior``, which count as ``m = tokens`` tokens.

        Each mean is ``(n H + m H_0) / (n + m)``, that of the prior alone where these have none.
        Few tokens give a Hessian of low rank, which says nothing of other directions. Ranges (peaks and histogram) are
        joined with the prior's while ``n < m``. The tensors of these statistics are overwritten.
        """
        share = self.tokens / (self.tokens + tokens)
        few = self.tokens < tokens
        return Statistics(
            tokens=self.tokens,
            squares=_mixed(self.squares, prior.squares, share),
            hessian=_mixed(self.hessian, prior.hessian, share),
            peaks=_joined(self.peaks, prior.peaks, few, lambda a, b: a.maximum(b)),
            histogram=_joined(self.histogram, prior.histogram, few, lambda a, b: a + b),
        )


def of_inputs(inputs: Iterable[Activation | None]) -> frozenset[Statistic]:
    """Return the statistics that activation quantization of these kinds needs."""
    wanted: set[Statistic] = set()
    for activation in inputs:
        if activation is not None and not activation.dynamic:
            wanted |= {Statistic.PEAKS, Statistic.HISTOGRAM}
        elif activation is not None and activation.threshold is not None:
            wanted.add(Statistic.PEAKS)
    return frozenset(wanted)


def _mixed(own: Tensor | None, prior: Tensor | None, share: float) -> Tensor | None:
    """Return the mean of two tensors weighted by ``share`` and ``1 - share``; the first is overwritten."""
    if own is None or prior is None:
        return None if prior is None else prior.clone()
    return own.mul_(share).add_(prior, alpha=1 - share)


def _joined(
    own: Tensor | None, prior: Tensor | None, both: bool, join: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    if own is None or prior is None:
        return prior if own is None else own
    return join(own, prior) if both else own
