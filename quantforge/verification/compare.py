"""Comparison of a decoded matrix ``Q`` with the matrix ``T`` that it stands for, as a whole and group by group.

With ``<.,.>`` over the weights of one group (columns that share a scale, in one row):

* cosine ``<T,Q> / |T||Q|``: another direction, as when two groups are swapped;
* gain ``<T,Q> / <T,T>``: another length, as when a scale is 1.5 times too large;
* offset ``mean(Q - T) / step``: a zero point that is off by one is an offset of exactly one step.

Rounding spreads all three around 1, 1 and 0, the wider the fewer bits there are. What is out of line is therefore
judged against the spread of all groups of the same tensor, and has to be wrong by a fixed amount as well. Groups whose
error is no larger than usual are left alone, whatever their shape: that is how nearly empty groups look.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.grids import PerGroup, Row
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

LEAST_GROUP = 16  # with fewer weights the three figures are noise
PANEL = 1 << 24  # weights that are compared at a time
COSINES = {1: -0.3, 2: -0.3, 3: 0.3, 4: 0.7, 5: 0.8}
DEFAULT_COSINE = 0.9
UNUSUAL = 4.0  # times the median error of a group
SPREADS = 8.0  # robust standard deviations
GAIN, OFFSET = 0.25, 0.6
NARROW = {
    3: 32,
    4: 16,
}  # by bits: groups of as many weights, as of MLX, Q3_K and nvfp4, are left ...
NARROW_COSINE, NARROW_GAIN = 0.45, 0.45  # ... with 0.58 and 0.66 by healthy rounding
FEW_GAIN = 1.2  # at 2 bits, where GPTQ may leave a group empty


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over groups, float64 ``[rows, groups]``.

    Attributes:
        tt, qq, tq, shift: sums of ``T*T``, ``Q*Q``, ``T*Q`` and ``Q-T``.
        size: weights of a group.
        step: distance of neighbouring codes, None where there is none.
    """

    tt: Tensor
    qq: Tensor
    tq: Tensor
    shift: Tensor
    size: int
    step: Tensor | None

    @property
    def errors(self) -> Tensor:
        """Return the squared error of each group."""
        return (self.tt - 2 * self.tq + self.qq).clamp(min=0)

    @property
    def snr(self) -> float:
        """Return signal over error in decibels, infinite for equal tensors."""
        signal, error = float(self.tt.sum()), float(self.errors.sum())
        if error <= signal * 1e-14:
            return math.inf
        return 10 * math.log10(max(signal, 1e-300) / error)

    @property
    def cosine(self) -> float:
        """Return the cosine of the whole matrices; 1 where both are zero."""
        norm = math.sqrt(float(self.tt.sum()) * float(self.qq.sum()))
        return float(self.tq.sum()) / norm if norm else float(self.tt.sum() == self.qq.sum())

    @property
    def cosines(self) -> Tensor:
        """Return the cosine of each group; 1 where both are empty."""
        norm = (self.tt * self.qq).sqrt()
        return torch.where(
            norm > 0, self.tq / norm.clamp(min=1e-300), (self.tt == self.qq).double()
        )

    @property
    def gains(self) -> Tensor:
        """Return the gain of each group; 1 where the target is empty."""
        return torch.where(self.tt > 0, self.tq / self.tt.clamp(min=1e-300), 1.0)

    @property
    def offsets(self) -> Tensor:
        """Return the mean error of each group in steps; 0 where there are no steps."""
        if self.step is None:
            return torch.zeros_like(self.tt)
        return self.shift / self.size / self.step.abs().clamp(min=1e-30)


@dataclass(frozen=True, slots=True)
class Outlier:
    """The worst group that is out of line: what is wrong, where, how many like it there are."""

    what: str
    row: int
    group: int
    value: float
    count: int

    def __str__(self) -> str:
        more = f", and {self.count - 1} more" if self.count > 1 else ""
        return f"row {self.row}, group {self.group}: {self.what} {self.value:.3g}{more}"


def group_of(scheme: Scheme, columns: int) -> int:
    """Return how many columns are judged together: a group's, or more where groups are small or do not fill a row."""
    block = scheme.block
    size = block.group if block else scheme.group_size(columns)
    if size < LEAST_GROUP or columns % size:
        return next((wide for wide in (128, 64, 32) if columns % wide == 0), columns)
    return size


def compare(
    target: Tensor, decoded: Tensor, found: QuantizedTensor, scheme: Scheme | None = None
) -> Figures:
    """Compare ``decoded`` with its ``target``, both float32 ``[out, in]``.

    ``found`` is what was decoded, and ``scheme`` has its groups before they were split, if it is another.
    """
    size = group_of(scheme or found.scheme, target.shape[1])
    parts = list(_panels(target, decoded, size))
    tt, qq, tq, shift = (torch.cat(column) for column in zip(*parts, strict=True))
    return Figures(tt, qq, tq, shift, size, _steps(found, tt.shape))


def _panels(target: Tensor, found: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, PANEL // target.shape[1])
    for first in range(0, len(target), rows):
        t, q = (value[first : first + rows].double().view(-1, target.shape[1] // size, size)
                for value in (target, found))  # fmt: skip
        yield (
            t.square().sum(-1), q.square().sum(-1), (t * q).sum(-1), (q - t).sum(-1),
        )  # fmt: skip


def _steps(found: QuantizedTensor, shape: torch.Size) -> Tensor | None:
    """Return the distance of neighbouring codes, per group, for integers on one scale; None for others.

    ``shape`` ``[rows, groups]`` may have fewer groups than the file, which then repeats their scales.
    """
    scheme = found.scheme
    if not scheme.integer or not isinstance(scheme.granularity, PerGroup | Row):
        return None
    scales = found.parameters.get("scales")
    if scales is None or scheme.group_size(1) == 1 or scales.shape[1] % shape[1]:
        return None
    return scales[:, :: scales.shape[1] // shape[1]].double()


def outliers(figures: Figures, scheme: Scheme) -> list[Outlier]:
    """Return the groups that are out of line: at most one finding for each of cosine, gain and offset."""
    errors = figures.errors
    unusual = (errors > UNUSUAL * errors.median()) & (figures.tt > 0)
    if figures.size < LEAST_GROUP:
        return []
    found = []
    narrow = figures.size <= NARROW.get(scheme.weight_bits, 0)
    least = COSINES.get(scheme.weight_bits, DEFAULT_COSINE)
    least = min(least, NARROW_COSINE) if narrow else least
    most = FEW_GAIN if scheme.weight_bits <= 2 else NARROW_GAIN if narrow else GAIN
    low = unusual & (figures.cosines < least)
    if bool(low.any()):
        found.append(_worst("cosine", figures.cosines, low, -figures.cosines))
    gains = unusual & _out_of_line(figures.gains, most) & ~low
    if bool(gains.any()):
        found.append(_worst("gain", figures.gains, gains, (figures.gains - 1).abs()))
    # Without its offset, a zero point that is off leaves nothing unusual; what wandered or was clipped does.
    left = errors - figures.shift.square() / figures.size
    offsets = unusual & _out_of_line(figures.offsets, OFFSET) & (left < UNUSUAL * errors.median())
    # GPTQ shifts small groups for the sake of others, and a symmetric one has no zero point that could be off.
    if bool(offsets.any()) and not (narrow and scheme.symmetric):
        found.append(_worst("offset in steps", figures.offsets, offsets, figures.offsets.abs()))
    return found


def _out_of_line(values: Tensor, least: float) -> Tensor:
    """Mark values that are far from the median, by ``least`` and by the spread of all."""
    distance = (values - values.median()).abs()
    spread = 1.4826 * distance.median()
    return distance > torch.clamp(SPREADS * spread, min=least)


def _worst(what: str, values: Tensor, chosen: Tensor, badness: Tensor) -> Outlier:
    ranked = badness.masked_fill(~chosen, -math.inf)
    row, group = divmod(int(ranked.argmax()), values.shape[1])
    return Outlier(what, row, group, float(values[row, group]), int(chosen.sum()))
