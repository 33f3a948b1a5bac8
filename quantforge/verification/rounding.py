"""Measure the error of a quantized matrix, relative to the error of rounding the same matrix to nearest.

A limit in decibels would say little: the loss of a scheme depends on the matrix, its outliers and its groups. So the
source's matrix ``T`` is rounded once more, to nearest, with scales that cover its range: ``P``. The error ``e = Q - T``
of the stored matrix ``Q`` is divided by the error ``b = P - T``. Both are measured by their effect on the outputs of
the layer, over inputs ``x`` observed in the source:

* per column, ``sum h e^2``, with ``h`` the mean square of the column's input;
* at the outputs, ``mean (x . e)^2``: GPTQ and similar methods move weights further but keep the outputs close.

For a row and for the whole matrix, the smaller of the two counts. For any sound method, the ratio is near 1 or below. A
single group may have a hundred times the error of rounding to nearest and be fine: a search of scales sacrifices one
weight to the others of its group, and GPTQ compensates the error of one group in others.

The matrix may already lie on the grid, so that rounding to nearest loses nothing and the ratio of any other method is
infinite. Therefore the divisor is at least the error of random weights with the stored step, ``step^2 / 12``, half the
tensor's usual error for weights of this size, and the loss from storing values or scales.

`unusual_errors` describes errors that rounding to nearest does not explain. `find_damaged_part` finds a part that is
wrong while the rest is exactly the source's, rounded to nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.formats.convert import ggml_as_integers
from quantforge.grids import GRIDS, PerGroup, PerTensor, Row, ScaleType
from quantforge.packers import get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

MAX_PANEL_WEIGHTS = 1 << 22  # weights per panel of rows
MIN_GROUP_WIDTH = 16  # columns of a group: the error of a smaller group is mostly noise
# Relative errors of scales stored in 16 bits and in 8 bits.
SCALE_STORAGE_ERROR, E4M3_STORAGE_ERROR = 2.0**-9, 2.0**-4
# Rounding to nearest may be exact by chance, so the divisor of an error is at least this share of the tensor's usual
# error for weights of the same size, plus this share of the mean error of a group (float16 lacks some numbers).
USUAL_ERROR_SHARE, MEAN_ERROR_SHARE = 0.5, 1e-2
# Largest usual errors, relative to rounding to nearest: of a whole tensor, of a row, and the share that one column may
# contribute. Without observed inputs they are multiplied: GPTQ moves weights further than it moves outputs.
MAX_TENSOR_ERROR, MAX_ROW_ERROR, MAX_COLUMN_SHARE = 2.5, 16.0, 0.5
WITHOUT_INPUTS_FACTOR = 3.0
# By how much the median scale may be too large, by bit width and for 4 bits or more, and by how much too small: a
# search of scales sacrifices outliers to the other weights of a group.
MAX_SCALE_EXCESS, MAX_SCALE_EXCESS_FROM_4_BITS = {1: 0.1, 2: 0.08, 3: 0.05}, 0.03
MAX_SCALE_DEFICIT = 0.08
# Shift of the median group in grid steps if zero points or codes are off by one, and if weights were rounded down
# instead of to nearest. Intact artifacts stay below 0.1.
OFF_BY_ONE_SHIFT, ROUNDED_DOWN_SHIFT = 0.7, 0.3
# A tensor counts as rounded to nearest if in most groups nearly all codes are nearest to the source's weights. Then a
# group with few such codes and a large error is damaged, unless the rest of its row compensates the error, as in GPTQ.
MIN_NEAREST_SHARE, MIN_NEAREST_GROUPS, MAX_DAMAGED_SHARE = 0.98, 0.75, 0.5
MIN_DAMAGED_GROUP_ERROR, MIN_DAMAGED_ROW_ERROR = 4.0, 1.5
# If only the scale of a group is wrong: share of the squared error that another scale leaves at most, and the largest
# factor between a chosen and the best scale.
MAX_RESCALED_ERROR, MAX_SCALE_FACTOR = 0.25, 4.0


@dataclass(frozen=True, slots=True)
class RoundingError:
    """Errors of one matrix ``[out, in]``, relative to rounding to nearest.

    Attributes:
        whole: error of the whole matrix.
        rows: errors of rows, ``[out]``.
        groups: errors of groups, ``[out, groups]``, with `group_width` columns each.
        columns: ``[in]``, contribution of each column to the error at the outputs, as a share of the error of rounding
            the whole matrix to nearest; negative for a column that compensates others.
        mean_shift: mean error of the median group, in grid steps; 0 if there are no steps.
        scale_high, scale_low: ``<T,Q> / <T,T>`` and ``<T,Q> / <Q,Q>`` of the median group, relative to those of ``P``
            if these are above 1. Rounding usually lowers both; too large scales raise the first, too small ones the
            second.
        cosine: cosine similarity of ``Q`` and ``T``; 1 if both are zero.
        squared_error: squared error of the weights.
        size: squared weights of the source.
    """

    whole: float
    rows: Tensor
    groups: Tensor
    columns: Tensor
    mean_shift: float
    scale_high: float
    scale_low: float
    cosine: float
    squared_error: float
    size: float

    def to_json(self) -> dict[str, float]:
        """Return the main figures as plain data."""
        ratio = self.size / self.squared_error if self.squared_error else math.inf
        decibels = 10 * math.log10(ratio) if 0 < ratio < math.inf else ratio or -math.inf
        return {
            "snr_db": round(decibels, 3),
            "cosine": round(self.cosine, 6),
            "error_vs_rtn": round(self.whole, 4),
            "worst_row_error_vs_rtn": round(float(self.rows.max()), 4),
            "worst_column_error_vs_rtn": round(float(self.columns.max()), 4),
            "scale_high": round(self.scale_high, 5),
            "scale_low": round(self.scale_low, 5),
        }


def effective_scheme(quantized: QuantizedTensor) -> Scheme:
    """Return the scheme with which a tensor was rounded: with longer groups, if its groups repeat their parameters.

    An export expresses one scale per row, or per long group, as equal scales of all groups of its format. Columns with
    scattered groups (act-order) are one group.
    """
    if quantized.scheme.granularity == PerGroup(1):
        return replace(quantized.scheme, granularity=Row())
    tensor = ggml_as_integers(quantized)
    scheme, shape = tensor.scheme, tensor.scheme.parameter_shape(tensor.shape)
    values = [v.float() for k, v in tensor.parameters.items() if k in {"scales", "zeros", "mins"}]
    has_groups = scheme.integer and isinstance(scheme.granularity, PerGroup | Row) and values
    if not has_groups or any(tuple(value.shape) != shape for value in values):
        return quantized.scheme
    if all(bool((value == value[0, 0]).all()) for value in values):
        return replace(scheme, granularity=PerTensor())
    rows, groups = shape
    for run_length in range(groups, 1, -1):
        runs = [v.view(rows, -1, run_length) for v in values] if groups % run_length == 0 else []
        if runs and all(bool((run == run[..., :1]).all()) for run in runs):
            width = scheme.group_size(tensor.shape[1]) * run_length
            return replace(scheme, granularity=Row() if run_length == groups else PerGroup(width))
    return quantized.scheme


def group_width(scheme: Scheme, columns: int) -> int:
    """Return how many columns are compared together.

    It is the size of a group, or more if groups are small or do not divide a row.
    """
    size = scheme.block.group_size if scheme.block else scheme.group_size(columns)
    if size < MIN_GROUP_WIDTH or columns % size:
        return next((width for width in (128, 64, 32) if columns % width == 0), columns)
    return size


def round_to_nearest(target: Tensor, scheme: Scheme, outliers: Tensor | None = None) -> Tensor:
    """Round ``target`` ``[out, in]`` (float32) to nearest, with scales that cover its range.

    Return an unrounded copy if the scheme cannot represent the matrix.

    Args:
        target: the matrix.
        scheme: the scheme.
        outliers: columns that are kept in 16 bits.
    """
    packer = get_packer(scheme)
    try:
        parameters = packer.fit(target, scheme)
    except InputError:
        return target.clone()
    values = packer.decode(packer.encode(target, parameters, scheme), parameters, scheme)
    if outliers is not None:
        values[:, outliers] = target[:, outliers]
    return values


def group_steps(tensor: QuantizedTensor, width: int) -> Tensor | None:
    """Return the grid step of each group of ``width`` columns, ``[out or 1, groups]``.

    None for floats, which have no constant step, and for code vectors.
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
    points = get_packer(scheme).column_grid(parameters, scheme, torch.arange(0, columns, width))
    return None if points is None or points.table is not None else points.scales.abs().T


def measure_rounding(
    target: Tensor,
    decoded: Tensor,
    rtn_decoded: Tensor,
    tensor: QuantizedTensor,
    inputs: Tensor | None = None,
    scheme: Scheme | None = None,
) -> RoundingError:
    """Measure the error of a stored matrix relative to the source's.

    Args:
        target: the source's matrix, float32 ``[out, in]``.
        decoded: the stored matrix, decoded, float32 ``[out, in]``.
        rtn_decoded: ``target``, rounded to nearest.
        tensor: the stored tensor.
        inputs: observed inputs, ``[tokens, in]``; None weights all columns equally.
        scheme: the scheme with which it was rounded, if that is not the scheme of ``tensor``.
    """
    width = group_width(scheme or tensor.scheme, target.shape[1])
    step = group_steps(tensor, width)
    storage = E4M3_STORAGE_ERROR if tensor.scheme.scale is ScaleType.E4M3 else SCALE_STORAGE_ERROR
    panel_sums, panel = [], max(1, MAX_PANEL_WEIGHTS // target.shape[1])
    for first in range(0, len(target), panel):
        run = slice(first, first + panel)
        distance = step[run] if step is not None and len(step) == len(target) else step
        panel_sums.append(
            _panel_sums(
                target[run], decoded[run], rtn_decoded[run], distance, storage, inputs, width
            )
        )
    sums = {
        key: torch.cat([sums_of_panel[key] for sums_of_panel in panel_sums])
        for key in panel_sums[0]
    }
    errors, sizes, outputs = sums["errors"], sums["sizes"], sums["outputs"]
    min_relative_error = (
        USUAL_ERROR_SHARE * float(sums["floor"].sum()) / (float(sizes.sum()) or 1.0)
    )
    floor = (
        torch.maximum(sums["floor"], min_relative_error * sizes)
        + MEAN_ERROR_SHARE * sums["floor"].mean()
    )
    floor_outputs = torch.maximum(sums["floor_outputs"], min_relative_error * sizes.sum(1))
    floor_outputs = floor_outputs + MEAN_ERROR_SHARE * floor.mean()
    by_weights, by_outputs = (errors.sum(1), floor.sum(1)), (outputs, floor_outputs)
    tt, qq, tq = (float(sums[key].sum(dtype=torch.float64)) for key in ("tt", "qq", "tq"))
    return RoundingError(
        whole=min(float(_ratio(a.sum(), b.sum())) for a, b in (by_weights, by_outputs)),
        rows=torch.minimum(_ratio(*by_weights), _ratio(*by_outputs)),
        groups=_ratio(errors, floor),
        columns=sums["columns"].sum(0) / max(float(floor_outputs.sum()), 1e-300),
        mean_shift=float(sums["shifts"].median()),
        scale_high=_median_ratio(sums["tq"], sums["tt"])
        / max(_median_ratio(sums["tp"], sums["tt"]), 1.0),
        scale_low=_median_ratio(sums["tq"], sums["qq"])
        / max(_median_ratio(sums["tp"], sums["pp"]), 1.0),
        cosine=tq / (tt * qq) ** 0.5 if tt and qq else float(tt == qq),
        squared_error=max(tt - 2 * tq + qq, 0.0),
        size=tt,
    )


def _panel_sums(
    t: Tensor,
    q: Tensor,
    p: Tensor,
    step: Tensor | None,
    storage: float,
    inputs: Tensor | None,
    width: int,
) -> dict[str, Tensor]:
    """Sum errors over the groups of a panel of rows; sums are ``[rows, groups]`` unless noted.

    Returns:
        ``errors``, their divisor ``floor``, and ``sizes``, float64, weighted by the inputs; ``shifts``, mean errors in
        steps; ``outputs`` and ``floor_outputs``, float64 ``[rows]``, errors at the outputs; ``columns``, float64 ``[1,
        in]``; products of source, stored and rounded weights, ``tt`` to ``tp``.
    """
    e, b = q - t, p - t
    weights = t.new_ones(t.shape[1]) if inputs is None else inputs.square().mean(0)

    def grouped(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return value.view(len(value), -1, width).sum(-1, dtype=dtype)

    errors, floor, sizes = (grouped(v.square() * weights, torch.float64) for v in (e, b, t))
    stored = sizes * storage**2
    random = shifts = torch.zeros_like(floor)
    if step is not None:
        shifts = torch.where(step > 0, grouped(e) / width / step.clamp(min=1e-30), 0.0)
        random = step.double().square() / 12 * grouped(weights[None], torch.float64)
    floor = torch.maximum(floor, random) + stored
    if inputs is None:
        outputs, floor_outputs = errors.sum(1), floor.sum(1)
        columns = e.square().sum(0) - b.square().sum(0)
    else:
        ye, yb = inputs @ e.T, inputs @ b.T
        outputs, floor_outputs = (y.square().mean(0, dtype=torch.float64) for y in (ye, yb))
        floor_outputs = torch.maximum(floor_outputs, random.sum(1)) + stored.sum(1)
        columns = _column_contributions(e, ye, weights, inputs) - _column_contributions(
            b, yb, weights, inputs
        ).clamp(min=0)
    return {
        "errors": errors,
        "floor": floor,
        "sizes": sizes,
        "shifts": shifts,
        "outputs": outputs,
        "floor_outputs": floor_outputs,
        "columns": columns.double()[None],
        "tt": grouped(t * t),
        "qq": grouped(q * q),
        "tq": grouped(t * q),
        "pp": grouped(p * p),
        "tp": grouped(t * p),
    }


def _column_contributions(
    error: Tensor, outputs: Tensor, weights: Tensor, inputs: Tensor
) -> Tensor:
    """Return ``[in]``: the decrease of the squared output error without each column of ``error`` ``[rows, in]``."""
    own_error = error.square().sum(0) * weights
    return 2 * (inputs * (outputs @ error)).mean(0) - own_error


def _median_ratio(products: Tensor, squares: Tensor) -> float:
    """Return the median ratio of the groups that are not zero; 1 if all are."""
    ratios = products / torch.where(squares > 0, squares, torch.nan)
    return float(ratios.nanmedian().nan_to_num(1.0))


def _ratio(error: Tensor, floor: Tensor) -> Tensor:
    """Return ``error / floor``; 0 for no error, infinite for an error if ``floor`` is zero."""
    ratio = error / torch.where(floor > 0, floor, 1.0)
    return torch.where(floor > 0, ratio, torch.where(error > 0, torch.inf, 0.0))


def unusual_errors(
    error: RoundingError, scheme: Scheme, limit_factor: float = 1.0
) -> Iterator[str]:
    """Yield descriptions of errors that rounding does not explain; ``limit_factor`` multiplies the limits."""
    if error.whole > MAX_TENSOR_ERROR * limit_factor:
        yield f"its error is {error.whole:.3g} times that of plain rounding to {scheme}"
    scale_high = MAX_SCALE_EXCESS.get(scheme.weight_bits, MAX_SCALE_EXCESS_FROM_4_BITS)
    if (
        error.scale_high > 1 + scale_high and not scheme.has_power_of_two_scales
    ):  # powers of two are far apart
        yield f"the median scale is {error.scale_high:.3f} times what fits the source's weights"
    if error.scale_low > 1 + MAX_SCALE_DEFICIT and not scheme.has_power_of_two_scales:
        yield f"the median scale is {1 / error.scale_low:.3f} times what fits the source's weights"
    if abs(error.mean_shift) > ROUNDED_DOWN_SHIFT:
        yield f"the median group is {error.mean_shift:+.2f} steps of the grid off the source's: not rounded to nearest"
    large_rows = error.rows > MAX_ROW_ERROR * limit_factor
    if bool(large_rows.any()):
        worst = f"row {int(error.rows.argmax())}: its error is {float(error.rows.max()):.3g} times"
        yield f"{worst} that of plain rounding{_more_suffix(large_rows)}"
    max_share = float(error.columns.max())
    if max_share > MAX_COLUMN_SHARE * limit_factor:
        column = int(error.columns.argmax())
        yield f"column {column}: its error alone is {max_share:.2g} times that of plain rounding of the whole tensor"


def _more_suffix(is_different: Tensor) -> str:
    count = int(is_different.sum()) - 1
    return f", and {count} more" if count else ""


def find_damaged_part(
    target: Tensor, value: Tensor, quantized: QuantizedTensor, error: RoundingError
) -> tuple[str, bool] | None:
    """Describe a part of a tensor that is wrong while the rest is the source's, rounded to nearest.

    With the stored scales, the nearest code to every weight of the source is known. A wrong scale is not proven: a
    method may sacrifice a group to one important weight, as ggml does.

    Returns:
        A description, and whether codes are wrong and not only scales; None if no part is damaged.
    """
    packer, scheme = get_packer(quantized.scheme), quantized.scheme
    if GRIDS[scheme.grid].weights_per_code > 1:
        return None
    codes = packer.encode(target, quantized.parameters, scheme)
    nearest = packer.decode(codes, quantized.parameters, scheme)
    if quantized.outlier_columns is not None:
        nearest[:, quantized.outlier_columns] = target[:, quantized.outlier_columns]
    max_difference = (nearest - target).abs() + 1e-3 * target.abs().amax(1, keepdim=True)
    is_nearest = (value - target).abs() <= max_difference
    rows, groups = error.groups.shape
    shares = is_nearest.view(rows, groups, -1).float().mean(-1)
    if float((shares >= MIN_NEAREST_SHARE).float().mean()) < MIN_NEAREST_GROUPS:
        return None
    damaged = (
        (shares < MAX_DAMAGED_SHARE)
        & (error.groups > MIN_DAMAGED_GROUP_ERROR)
        & (error.rows[:, None] > MIN_DAMAGED_ROW_ERROR)
    )
    if not bool(damaged.any()):
        return None
    t, q = target.view(rows, groups, -1), value.view(rows, groups, -1)
    size = q.square().sum(-1)
    factor = (q * t).sum(-1) / torch.where(size > 0, size, 1.0)
    remaining_error = (factor[..., None] * q - t).square().sum(-1)
    is_wrong = damaged & (
        (remaining_error > MAX_RESCALED_ERROR * (q - t).square().sum(-1))
        | (factor < 1 / MAX_SCALE_FACTOR)
    )
    proven = bool(is_wrong.any())
    candidate_groups, width = is_wrong if proven else damaged, value.shape[1] // groups
    row, group = divmod(int((error.groups * candidate_groups).argmax()), groups)
    location = f"row {row}, columns {group * width} to {(group + 1) * width - 1}{_more_suffix(candidate_groups)}"
    if not proven:
        scale_ratio = 1 / float(factor[row, group])
        return (
            f"{location}: the scale is {scale_ratio:.3g} times what fits the source's weights",
            False,
        )
    nearest_share = f"{float(is_nearest.float().mean()):.2%}"
    text = f"{location}: the codes are not those nearest to the source's weights, as {nearest_share} of the tensor are"
    return text, True
