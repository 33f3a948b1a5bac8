"""How far a quantized matrix is from the source's, in units of what plain rounding of the same matrix loses.

A limit in decibels would say little: what a scheme loses depends on the matrix, its outliers and its groups. So the
source's matrix ``T`` is rounded once more, to nearest, with scales that cover its range: ``P``. The error ``e = Q - T``
of the stored matrix ``Q`` is then divided by the error ``b = P - T``. Both are measured by what they do to the outputs
of the layer, over inputs ``x`` that the source itself shows:

* column by column, ``sum h e^2`` with ``h`` the mean square of what a column is multiplied with;
* at the outputs, ``mean (x . e)^2``: GPTQ and its like let weights wander, and keep the outputs near instead.

Of a row and of the whole matrix the smaller of the two counts. Whatever sound method made the matrix, the ratio is near
1 or below. A single group may have a hundred times the error of plain rounding and be healthy: a search of scales
sacrifices one weight to the others of its group, and GPTQ lets a group wander that others make up for.

The matrix may lie on the grid already, so that plain rounding loses nothing and every other method "infinitely" more.
The error that is divided by is therefore never smaller than that of random weights under the stored step,
``step^2 / 12``, than half the tensor's usual error for weights of this size, and than what storing values in 16 bits
loses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import GRIDS, PerGroup, PerTensor, Row
from quantforge.packers import packer_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

PANEL = 1 << 22  # weights that are compared at a time
LEAST_GROUP = 16  # columns of a group: the error of a smaller group is mostly noise
STORED = 2.0**-9  # relative: what storing a scale or a value in 16 bits loses
LUCKY = 0.5  # of the tensor's usual error for weights of the same size
NOTHING = (
    1e-2  # of the mean error of a group: what any may lose, as one of numbers that float16 lacks
)


@dataclass(frozen=True, slots=True)
class RoundingError:
    """Errors of one matrix ``[out, in]`` in units of plain rounding.

    Attributes:
        whole: of the matrix.
        rows: ``[out]``.
        groups: ``[out, groups]`` of `group_of` columns each.
        columns: ``[in]``, what the error at the outputs owes to each column alone, as a share of the error of plain
            rounding of the whole; negative where a column makes up for others.
        shift: the mean error of the median group, in steps of the grid; 0 where there are none.
        longer, shorter: ``<T,Q> / <T,T>`` and ``<T,Q> / <Q,Q>`` of the median group, over that of ``P`` where that is
            above 1. Rounding errors lower both as a rule; too large scales raise the first, too small ones the second.
        cosine: of ``Q`` and ``T``; 1 where both are zero.
        error: squared error of the weights, and ``size``: squared weights of the source.
    """

    whole: float
    rows: Tensor
    groups: Tensor
    columns: Tensor
    shift: float
    longer: float
    shorter: float
    cosine: float
    error: float
    size: float


def group_of(scheme: Scheme, columns: int) -> int:
    """Return how many columns are compared together: a group's, or more where groups are small or do not fill a row."""
    size = scheme.block.group if scheme.block else scheme.group_size(columns)
    if size < LEAST_GROUP or columns % size:
        return next((wide for wide in (128, 64, 32) if columns % wide == 0), columns)
    return size


def plain_rounding(target: Tensor, scheme: Scheme, outliers: Tensor | None = None) -> Tensor:
    """Round ``target`` ``[out, in]`` (float32) to nearest, with scales that cover its range.

    An unrounded copy is returned where the scheme cannot represent the matrix. ``outliers``: columns kept in 16 bits.
    """
    packer = packer_of(scheme)
    try:
        parameters = packer.fit(target, scheme)
    except InputError:
        return target.clone()
    values = packer.decode(packer.encode(target, parameters, scheme), parameters, scheme)
    if outliers is not None:
        values[:, outliers] = target[:, outliers]
    return values


def steps(tensor: QuantizedTensor, size: int) -> Tensor | None:
    """Return the distance of neighbouring codes in each group of ``size`` columns, ``[out, groups]``.

    None for floats, whose codes have no common distance, and for code vectors.
    """
    scheme, (_, columns) = tensor.scheme, tensor.shape
    if GRIDS[scheme.grid].weights_per_code > 1 or not isinstance(
        scheme.granularity, PerGroup | Row | PerTensor
    ):
        return None
    parameters = {
        name: value if value.dtype == torch.uint8 else value.float()
        for name, value in tensor.parameters.items()
    }
    points = packer_of(scheme).points(parameters, scheme, torch.arange(0, columns, size))
    if points is None or points.table is not None:
        return None
    return points.scales.abs().T


def measure(
    target: Tensor,
    decoded: Tensor,
    plain: Tensor,
    tensor: QuantizedTensor,
    inputs: Tensor | None = None,
    scheme: Scheme | None = None,
) -> RoundingError:
    """Measure a matrix against the source's.

    Args:
        target: the source's, float32 ``[out, in]``.
        decoded: the stored one, likewise.
        plain: ``target``, rounded plainly.
        tensor: what was decoded.
        inputs: what the matrix is multiplied with, ``[tokens, in]``; None counts all columns alike.
        scheme: the groups that it was rounded in, where that is not the scheme of ``tensor``.
    """
    columns = target.shape[1]
    size = group_of(scheme or tensor.scheme, columns)
    step = steps(tensor, size)
    h = target.new_ones(columns) if inputs is None else inputs.square().mean(0)
    sums = [_Sums.of(*panel, h, inputs, size) for panel in _panels(target, decoded, plain, step)]
    errors, least, sizes = (_joined(sums, key) for key in ("errors", "least", "sizes"))
    usual = float(least.sum()) / float(sizes.sum()) if float(sizes.sum()) else 0.0
    least = torch.maximum(least, LUCKY * usual * sizes) + NOTHING * least.mean()
    moved, moved_least = _joined(sums, "moved"), _joined(sums, "moved_least")
    row_least = least.sum(1)
    moved_least = torch.maximum(moved_least, LUCKY * usual * sizes.sum(1))
    moved_least = moved_least + NOTHING * least.mean()
    weighted, at_outputs = errors.sum(1), moved
    whole = min(_ratio(weighted, row_least), _ratio(at_outputs, moved_least))
    charged = sum((s.columns for s in sums), torch.zeros(columns, dtype=torch.float64))
    tt, qq, tq = (sum(float(getattr(s, key)) for s in sums) for key in ("tt", "qq", "tq"))
    return RoundingError(
        whole,
        torch.minimum(_divided(weighted, row_least), _divided(at_outputs, moved_least)),
        _divided(errors, least),
        charged / max(float(moved_least.sum()), 1e-300),
        0.0 if step is None else float(_joined(sums, "shifts").median()),
        _beyond(_joined(sums, "longer"), _joined(sums, "plain_longer")),
        _beyond(_joined(sums, "shorter"), _joined(sums, "plain_shorter")),
        tq / (tt * qq) ** 0.5 if tt and qq else float(tt == qq),
        max(tt - 2 * tq + qq, 0.0),
        tt,
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over a panel of rows, float64: see `RoundingError`."""

    errors: Tensor  # [rows, groups], weighted by the inputs
    least: Tensor
    sizes: Tensor
    shifts: Tensor  # mean errors in steps
    moved: Tensor  # [rows], at the outputs
    moved_least: Tensor
    columns: Tensor  # [in]
    longer: Tensor  # [rows, groups]
    shorter: Tensor
    plain_longer: Tensor
    plain_shorter: Tensor
    tt: float
    qq: float
    tq: float

    @classmethod
    def of(
        cls,
        t: Tensor,
        q: Tensor,
        p: Tensor,
        step: Tensor | None,
        h: Tensor,
        inputs: Tensor | None,
        size: int,
    ) -> _Sums:
        e, b = q - t, p - t

        def grouped(value: Tensor) -> Tensor:
            return (value.square() * h).view(len(t), -1, size).sum(-1, dtype=torch.float64)

        errors, least, sizes = grouped(e), grouped(b), grouped(t)
        random = torch.zeros_like(least)
        shifts = torch.zeros_like(least)
        if step is not None:
            shifts = e.view(len(t), -1, size).mean(-1) / step.clamp(min=1e-30)
            shifts = torch.where(step > 0, shifts, 0.0)
            random = step.double().square() / 12 * h.view(-1, size).sum(-1, dtype=torch.float64)
            least = torch.maximum(least, random)
        stored = sizes * STORED**2
        least = least + stored
        if inputs is None:
            moved, moved_least = errors.sum(1), least.sum(1)
            charged = e.square().sum(0) - b.square().sum(0)
        else:
            ye, yb = inputs @ e.T, inputs @ b.T
            moved = ye.square().mean(0, dtype=torch.float64)
            moved_least = yb.square().mean(0, dtype=torch.float64)
            moved_least = torch.maximum(moved_least, random.sum(1)) + stored.sum(1)
            charged = _charged(e, ye, h, inputs) - _charged(b, yb, h, inputs).clamp(min=0)
        tt, qq, tq, pp, tp = (
            (one * other).view(len(t), -1, size).sum(-1)
            for one, other in ((t, t), (q, q), (t, q), (p, p), (t, p))
        )
        ratios = [
            one / torch.where(own > 0, own, torch.nan)
            for one, own in ((tq, tt), (tq, qq), (tp, tt), (tp, pp))
        ]
        sums = [float(value.double().sum()) for value in (tt, qq, tq)]
        longer, shorter, plain_longer, plain_shorter = ratios
        return cls(
            errors, least, sizes, shifts, moved, moved_least, charged.double(), longer, shorter, plain_longer,
            plain_shorter, *sums,
        )  # fmt: skip


def _panels(
    target: Tensor, decoded: Tensor, plain: Tensor, step: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    rows = max(1, PANEL // target.shape[1])
    for first in range(0, len(target), rows):
        run = slice(first, first + rows)
        part = step[run] if step is not None and len(step) == len(target) else step
        yield target[run], decoded[run], plain[run], part


def _charged(error: Tensor, outputs: Tensor, h: Tensor, inputs: Tensor) -> Tensor:
    """Return ``[in]``: what the squared error of the outputs loses without each column of ``error`` ``[rows, in]``."""
    alone = error.square().sum(0) * h
    return 2 * (inputs * (outputs @ error)).mean(0) - alone


def _beyond(ratios: Tensor, plain: Tensor) -> float:
    """Return the median ratio, over that of plain rounding where this is above 1; 1 without any."""
    found, usual = (float(values.nanmedian().nan_to_num(1.0)) for values in (ratios, plain))
    return found / max(usual, 1.0)


def _joined(sums: list[_Sums], key: str) -> Tensor:
    return torch.cat([getattr(item, key) for item in sums])


def _ratio(error: Tensor, least: Tensor) -> float:
    return float(_divided(error.sum(), least.sum()))


def _divided(error: Tensor, least: Tensor) -> Tensor:
    """Return the quotient; 0 where there is no error, infinite where there is one and nothing may be lost."""
    ratio = error / torch.where(least > 0, least, 1.0)
    return torch.where(least > 0, ratio, torch.where(error > 0, torch.inf, 0.0))
