"""Uniform integer grids, 2 to 8 bits: symmetric, with an integer zero point, or with a stored minimum.

A symmetric code ``q`` in ``[-2^(b-1), 2^(b-1) - 1]`` stands for ``q * scale``; an asymmetric one in
``[0, 2^b - 1]`` for ``(q - zero) * scale``, or for ``q * scale + minimum``, as MLX has them. One scale (and zero, or
minimum) serves a group of input columns of one row, a whole row, or the whole matrix.

The plain fit is symmetric ``scale = absmax / (2^(b-1) - 1)``, asymmetric ``scale = (max - min) / (2^b - 1)`` over a
range that includes 0. `quantforge.packers.scale_search` finds better ones. Either way a scale is rounded to its
stored type first and the codes are computed with the rounded scale, so nothing is lost between here and a file.
A scale may be negative: that turns the grid around, and its longer side to the positive weights.

No stored scale is 0 or infinite. A group of zeros gets `EMPTY_SCALE`; a scale too small for its type becomes the
smallest number of the type; one too large is an error, because clamping it would destroy the largest weights.

Minima are fitted plainly as ``mx.quantize`` does: code 0 is the end of the range that is farther from 0 (the scale is
negative where that is the upper end), and the step is changed a little so that 0 lies on the grid. A search takes the
scale and zero point of the asymmetric grid, and stores the minimum ``-zero * scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import PerGroup, PerTensor, ScaleType, Zero
from quantforge.packers import Points
from quantforge.packers import row_encoding as rows
from quantforge.packers.bits import unsigned
from quantforge.packers.hessian_refit import Held, Refit, ScaleMoments
from quantforge.packers.scale_search import search_scales, search_scales_and_zeros
from quantforge.packers.tensor import KernelTerms, QuantizedTensor
from quantforge.scheme import Scheme

SCALE_DTYPES = {
    ScaleType.F16: torch.float16,
    ScaleType.BF16: torch.bfloat16,
    ScaleType.F32: torch.float32,
}
EMPTY_SCALE = 2.0**-14  # the smallest normal float16, exact in every scale type
LEAST_ZERO = 1  # the first GPTQ layout stores zero points less one
LEAST_STEP = 1e-7  # of a group of equal weights under a minimum, as in MLX


def code_range(scheme: Scheme) -> tuple[int, int]:
    """Return the least and the greatest code of the grid."""
    half = 1 << (scheme.bits - 1)
    return (-half, half - 1) if scheme.symmetric else (0, 2 * half - 1)


def code_dtype(scheme: Scheme) -> torch.dtype:
    """Return the type of codes: int8 (symmetric) or uint8 (asymmetric)."""
    return torch.int8 if scheme.symmetric else torch.uint8


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose scales (and zeros, or minima) for ``weight`` ``[out, in]`` float32.

    Args:
        weight: finite values.
        scheme: its group size divides ``in``.
        importance: ``[in]``, non-negative; weights the squared error of the search.
        search: minimise the squared error instead of covering the whole range.

    Returns:
        ``scales`` in the stored type and, for an asymmetric scheme, ``zeros`` uint8, `LEAST_ZERO` or more, or ``mins``
        in the stored type; all of ``parameter_shape``.

    Raises:
        InputError: a scale or minimum is beyond the largest number of its stored type.
    """
    if scheme.zero is Zero.MIN:
        return _fit_minima(weight, scheme, importance, search=search)
    groups = _grouped(weight, scheme)
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F16]
    low, high = code_range(scheme)
    if scheme.symmetric:
        scales = stored(_absmax(weight, scheme) / high, dtype)
        if search:
            weights = _grouped_importance(importance, groups)
            scales = search_scales(groups, scales, weights, low, high)
        return {"scales": scales}
    bottom, top = groups.amin((-2, -1)), groups.amax((-2, -1)).clamp(min=0)
    scales = stored((top - bottom) / high, dtype)
    zeros = (-bottom / scales.float()).round().clamp(0, high)
    # Values that are all but positive: a step is spent on a zero point that every format can hold.
    scales = torch.where(zeros < LEAST_ZERO, stored(top / (high - LEAST_ZERO), dtype), scales)
    zeros = zeros.clamp(min=LEAST_ZERO)
    if search:
        weights = _grouped_importance(importance, groups)
        scales, zeros = search_scales_and_zeros(groups, scales, zeros, weights, LEAST_ZERO, high)
    return {"scales": scales, "zeros": zeros.to(torch.uint8)}


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes of ``weight`` ``[out, n]``, see `code_dtype`.

    ``columns`` is the run of columns of the whole matrix that ``weight`` holds.
    """
    low, high = code_range(scheme)
    if scheme.symmetric and rows.suits(weight, columns):
        return rows.integers(
            weight, parameters["scales"].float().expand(len(weight), -1), low, high
        )
    scales = by_column(parameters["scales"], scheme, columns).float()
    if scheme.zero is Zero.MIN:
        mins = by_column(parameters["mins"], scheme, columns).float()
        codes = (weight - mins) / torch.where(scales == 0, 1, scales)
        return codes.round_().clamp_(low, high).to(torch.uint8)
    codes = (weight / scales).round_()
    if scheme.symmetric:
        return codes.clamp_(low, high).to(code_dtype(scheme))
    codes += by_column(parameters["zeros"], scheme, columns)
    return codes.clamp_(low, high).to(code_dtype(scheme))


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the float32 values of ``codes`` ``[out, n]``; ``columns`` as in `encode`."""
    values, scales = codes.float(), by_column(parameters["scales"], scheme, columns).float()
    if scheme.zero is Zero.MIN:
        return values.mul_(scales).add_(by_column(parameters["mins"], scheme, columns))
    if not scheme.symmetric:
        values -= by_column(parameters["zeros"], scheme, columns)
    return values.mul_(scales)


def stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Round non-negative ``scales`` to ``dtype``: never 0, never infinite.

    Raises:
        InputError: a scale is beyond the largest number of ``dtype``.
    """
    limits = torch.finfo(dtype)
    if bool((scales > limits.max).any()):
        raise InputError(
            f"a scale of {scales.max().item():.3g} is beyond the range of {dtype}",
            "store the scales as f32, e.g. --format compressed-tensors --scheme int4:g128:sym:f32",
        )
    least = limits.smallest_normal * limits.eps  # the smallest subnormal
    return torch.where(scales > 0, scales.clamp(min=least), EMPTY_SCALE).to(dtype)


def _fit_minima(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, *, search: bool
) -> dict[str, Tensor]:
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F16]
    if search:
        found = fit(weight, replace(scheme, zero=Zero.INT), importance, search=True)
        mins = -found["zeros"].float() * found["scales"].float()
        return {"scales": found["scales"], "mins": _stored_minima(mins, dtype)}
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    low, high = groups.amin(-1), groups.amax(-1)
    step = ((high - low) / ((1 << scheme.bits) - 1)).clamp(min=LEAST_STEP)
    turned = low.abs() <= high.abs()
    step = torch.where(turned, -step, step)
    edge = torch.where(turned, high, low)
    whole = (edge / step).round()
    scales = torch.where(whole != 0, edge / torch.where(whole == 0, 1, whole), step)
    mins = torch.where(whole != 0, edge, 0)
    stored(scales.abs(), dtype)  # refuses what is beyond the type
    return {"scales": scales.to(dtype), "mins": _stored_minima(mins, dtype)}


def _stored_minima(mins: Tensor, dtype: torch.dtype) -> Tensor:
    """Round minima to ``dtype``; raise `InputError` where one is beyond its largest number."""
    found = mins.to(dtype)
    if not bool(found.isfinite().all()):
        raise InputError(
            f"a minimum of {mins.abs().max().item():.3g} is beyond the range of {dtype}",
            "store scales and minima as bf16, e.g. --scheme int4:g64:min:bf16",
        )
    return found


def _absmax(weight: Tensor, scheme: Scheme) -> Tensor:
    if isinstance(scheme.granularity, PerTensor):
        return weight.abs().amax().view(1, 1)
    return rows.peaks(weight, scheme.groups(weight.shape[1]))


def _grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """View ``weight`` as ``[rows, groups, parts, size]``: all parts of a group share one scale."""
    if isinstance(scheme.granularity, PerTensor):
        return weight.unsqueeze(0).unsqueeze(0)
    return weight.reshape(len(weight), scheme.groups(weight.shape[1]), 1, -1)


def _grouped_importance(importance: Tensor | None, groups: Tensor) -> Tensor:
    if importance is None:
        return groups.new_ones(1, 1, 1, 1)
    return importance.view(1, groups.shape[1], 1, groups.shape[3])


def by_column(parameter: Tensor, scheme: Scheme, columns: slice | None) -> Tensor:
    """Return a parameter so that it broadcasts over the run ``columns`` of a matrix; None: all columns."""
    if not isinstance(scheme.granularity, PerGroup):
        return parameter
    size = scheme.granularity.size
    if columns is None:
        return parameter.repeat_interleave(size, dim=1)
    first, last = columns.start // size, (columns.stop - 1) // size
    if first == last:
        return parameter[:, first : first + 1]
    run = torch.arange(columns.start, columns.stop, device=parameter.device)
    return parameter[:, run // size]


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points | None:
    """Return the values that ``columns`` can take; None where all rows share one scale."""
    if isinstance(scheme.granularity, PerTensor):
        return None
    grouped = isinstance(scheme.granularity, PerGroup)
    groups = columns // scheme.group_size(0) if grouped else columns * 0
    scales = parameters["scales"].T[groups]
    none = torch.zeros_like(scales)
    zeros, mins = (
        parameters[key].T[groups] if key in parameters else none for key in ("zeros", "mins")
    )
    return Points(scales, zeros, mins, code_range(scheme), code_dtype(scheme))


def refits(scheme: Scheme, in_features: int) -> Sequence[Refit]:
    """Return one step: it fits the scale of a group, under its zero and the two zeros next to that; minima stay."""
    if scheme.zero is Zero.MIN:
        return ()
    return (Refit(scheme.group_size(in_features), partial(_refit, scheme)),)


def _refit(scheme: Scheme, parameters: dict[str, Tensor], held: Held) -> Tensor:
    scales, zeros, group = parameters["scales"], parameters.get("zeros"), held.group
    zero = torch.zeros_like(scales[:, group]) if zeros is None else zeros[:, group].clone()
    whole = isinstance(scheme.granularity, PerTensor)
    moments = ScaleMoments(held.codes - zero, held, whole)
    scale, chosen = scales[:, group].double(), scales[:, group].clone()
    best, moved = torch.zeros_like(scale), torch.zeros_like(chosen)
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F16]
    for shift in (0,) if zeros is None else (0, -1, 1):
        fitted = moments.fit(scale, shift).to(dtype)
        gain = moments.gain(scale, fitted.double(), shift)
        better = (gain > best) & fitted.isfinite() & (fitted != 0)
        if shift:
            better &= (zero + shift >= LEAST_ZERO) & (zero + shift < 1 << scheme.bits)
        best, chosen = torch.where(better, gain, best), torch.where(better, fitted, chosen)
        moved = torch.where(better, shift, moved)
    scales[:, group] = chosen
    if zeros is not None:
        zeros[:, group] += moved
    return best


def kernel_terms(tensor: QuantizedTensor) -> KernelTerms:
    """Return a tensor in the terms of the kernels, which subtract minima."""
    parameters = dict(tensor.parameters)
    if "mins" in parameters:
        parameters["mins"] = -parameters["mins"]
    return KernelTerms("int", unsigned(tensor.codes, tensor.scheme.bits), parameters)
