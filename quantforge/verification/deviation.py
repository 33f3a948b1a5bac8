"""Distance of a decoded matrix ``Q`` from its target ``T``, in units of what plain rounding ``P`` of ``T`` costs.

Rounding to nearest keeps every weight near; GPTQ and its like let weights wander, and keep the outputs near instead. So
an error is read twice for each row, and the smaller reading counts:

* as it stands in the weights, each column weighed by the mean square ``h`` of what it multiplies: ``sum h e^2``;
* as it arrives at the outputs, over a sample of inputs ``x``: ``mean (x . e)^2``.

Each is divided by the same of ``P - T``. Whatever sound method made a row, one of the two is near 1 or below; a defect
raises both. A column has no outputs of its own. It is charged with what the error of all outputs would lose if that
column alone were right: GPTQ makes up for a column in the others, so that this is negative for its columns, while a
destroyed one is nearly all of the error. Without inputs there is only the first reading, with ``h = 1``.

Gains are ``<T,Q> / <T,T>``, less those of ``P``, so that a grid that shrinks what it holds does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme
from quantforge.verification.compare import Figures
from quantforge.verification.yardstick import STORED, rounded

PANEL = 1 << 22  # weights that are looked at together
TINY = 1e-300
LUCKY = 0.5  # of the mean loss: the least that a row is measured by
SMALLEST = 1e-9  # of the mean row: what a row of zeros may lose


@dataclass(frozen=True, slots=True)
class Deviation:
    """Figures of one matrix ``[out, in]``; float64 vectors.

    Attributes:
        errors, least: of each row, weighed error of ``Q`` and of ``P``.
        moved, moved_least: the same at the outputs; None without inputs.
        columns: what the error of the outputs (without inputs: of the weights) owes to each column alone, less what
            it does under ``P``, as a share of the whole error of ``P``.
        gains: of each row, less that of ``P``.
        chance: of each row, the gain that an error of its size has by chance: less, the more columns there are.
        own_gains: of each row, the divisor that brings it nearest to its target, less 1: weighed ``<Q,Q> / <T,Q> - 1``.
        gain: of the whole, less that of ``P``.
    """

    errors: Tensor
    least: Tensor
    moved: Tensor | None
    moved_least: Tensor | None
    columns: Tensor
    gains: Tensor
    chance: Tensor
    own_gains: Tensor
    gain: float

    @property
    def whole(self) -> float:
        """Return the error of the whole in units of plain rounding."""
        weighed = float(self.errors.sum()) / max(float(self.least.sum()), TINY)
        if self.moved is None or self.moved_least is None:
            return weighed
        return min(weighed, float(self.moved.sum()) / max(float(self.moved_least.sum()), TINY))

    @property
    def coherence(self) -> float:
        """Return the error at the outputs over that of equal errors with random signs; 1 without inputs."""
        if self.moved is None:
            return 1.0
        return float(self.moved.sum()) / max(float(self.errors.sum()), TINY)

    @property
    def rows(self) -> Tensor:
        """Return the error of each row in units of plain rounding."""
        weighed = self.errors / self.least.clamp(min=TINY)
        if self.moved is None or self.moved_least is None:
            return weighed
        return torch.minimum(weighed, self.moved / self.moved_least.clamp(min=TINY))


def deviation(
    target: Tensor,
    decoded: Tensor,
    found: QuantizedTensor,
    inputs: Tensor | None = None,
    scheme: Scheme | None = None,
) -> Deviation:
    """Measure a matrix against its target.

    Args:
        target: ``[out, in]``, float32.
        decoded: likewise.
        found: what it was decoded from.
        inputs: what it is multiplied with, normalised, ``[tokens, in]``.
        scheme: by which it was rounded, where that is not the one of ``found``.
    """
    weights = target.new_ones(target.shape[1]) if inputs is None else inputs.square().mean(0)
    rows: list[tuple[Tensor, ...]] = []
    charged = torch.zeros(2, target.shape[1], dtype=torch.float64)
    for t, q, p in _panels(target, decoded, found, scheme or found.scheme):
        e, b = q - t, p - t
        rows.append(_of_rows(t, q, e, b, weights, inputs))
        charged += torch.stack([_charged(error, weights, inputs).double() for error in (e, b)])
    sums = [torch.cat(column) for column in zip(*rows, strict=True)]
    errors, least, moved, moved_least, sizes, tt, ee, et, bt, own = sums
    least, moved_least = (_typical(values, sizes) for values in (least, moved_least))
    scale = tt.clamp(min=TINY)
    whole = float(least.sum() if inputs is None else moved_least.sum())
    return Deviation(
        errors,
        least,
        None if inputs is None else moved,
        None if inputs is None else moved_least,
        (charged[0] - charged[1].clamp(min=0)) / max(whole, TINY),
        torch.where(tt > 0, (et - bt) / scale, 0.0),
        (ee / scale / target.shape[1]).sqrt(),
        own,
        float((et - bt).sum() / scale.sum()),
    )


def _panels(
    target: Tensor, decoded: Tensor, found: QuantizedTensor, scheme: Scheme
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield runs of rows of target, decoded and plainly rounded; the latter as a whole where rows share parameters."""
    step = max(1, PANEL // target.shape[1])
    plain = rounded(target, found, scheme) if scheme.whole else None
    for first in range(0, len(target), step):
        run = slice(first, first + step)
        part = rounded(target[run], found, scheme) if plain is None else plain[run]
        yield target[run], decoded[run], part


def _of_rows(
    t: Tensor, q: Tensor, e: Tensor, b: Tensor, weights: Tensor, inputs: Tensor | None
) -> tuple[Tensor, ...]:
    """Return sums over each row in float64, as `deviation` needs them."""
    sizes = (t.square() @ weights).double()
    floor = sizes * STORED**2
    errors, least = (e.square() @ weights).double(), (b.square() @ weights).double() + floor
    if inputs is None:
        moved, moved_least = errors, least
    else:
        moved, moved_least = ((inputs @ v.T).square().double().mean(0) for v in (e, b))
        moved_least = moved_least + floor
    tq, qq = ((t * q) @ weights).double(), (q.square() @ weights).double()
    own = torch.where(tq != 0, qq / torch.where(tq != 0, tq, 1.0), 1.0) - 1
    tt, et, bt = ((t * v).sum(1, dtype=torch.float64) for v in (t, e, b))
    ee = e.square().sum(1, dtype=torch.float64)
    return errors, least, moved, moved_least, sizes, tt, ee, et, bt, own


def _typical(least: Tensor, sizes: Tensor) -> Tensor:
    """Return plain errors of rows, raised where far below those of rows of the same size: some hit the grid by luck."""
    rate = least.sum() / sizes.sum().clamp(min=TINY)
    return torch.maximum(least, LUCKY * rate * sizes) + SMALLEST * least.mean()


def _charged(error: Tensor, weights: Tensor, inputs: Tensor | None) -> Tensor:
    """Return ``[in]``: what the squared error of the outputs loses without each column of ``error`` ``[rows, in]``."""
    alone = error.square().sum(0) * weights
    if inputs is None:
        return alone
    outputs = inputs @ error.T
    return 2 * (inputs * (outputs @ error)).mean(0) - alone


def row(
    name: str, found: QuantizedTensor, figures: Figures, apart: Deviation | None
) -> dict[str, object]:
    """Return the figures of one tensor for `Report.tensors`; those of ``apart`` are None without it."""
    large = figures.tt > 0
    cosines = figures.cosines[large]
    gains = figures.gains[large]
    return {
        "name": name,
        "scheme": str(found.scheme),
        "snr_db": round(figures.snr, 3),
        "cosine": round(figures.cosine, 6),
        "worst_cosine": round(float(cosines.min()), 4) if len(cosines) else None,
        "gains": [round(float(gains.min()), 4), round(float(gains.max()), 4)]
        if len(gains)
        else None,
        "over_rounding": round(apart.whole, 4) if apart else None,
        "worst_row_over_rounding": round(float(apart.rows.max()), 4) if apart else None,
        "worst_column": round(float(apart.columns.max()), 4) if apart else None,
        "gain_off": round(apart.gain, 5) if apart else None,
        "worst_offset_steps": round(float(figures.offsets.abs().max()), 4),
    }
