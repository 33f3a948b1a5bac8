"""Uniform integer grids, 2 to 8 bits: symmetric, with an integer zero point, or with a stored minimum.

A symmetric code ``q`` in ``[-2^(b-1), 2^(b-1) - 1]`` stands for ``q * scale``; an asymmetric one in
``[0, 2^b - 1]`` for ``(q - zero) * scale`` or, as in MLX, for ``q * scale + minimum``. One scale (and zero, or minimum)
is shared by a group of input columns of one row, by a whole row, or by the whole matrix.

The plain fit is ``scale = absmax / (2^(b-1) - 1)`` if symmetric and ``scale = (max - min) / (2^b - 1)`` if asymmetric,
over a range that includes 0. `quantforge.packers.scale_search` finds better ones. In both cases the scale is first
rounded to its stored type and the codes are computed with the rounded scale, so that nothing is lost in the file.
A scale may be negative: this mirrors the grid, so that its longer side covers the positive weights.

A stored scale is never 0 or infinite. A group of zeros gets `EMPTY_SCALE`; a scale too small for its type becomes the
smallest number of the type; one too large is an error, because clamping it would destroy the largest weights.

Plain minima are those of ``mx.quantize``: code 0 is the end of the range that is farther from 0 (the scale is negative
if that is the upper end), and the step is changed a little so that 0 lies on the grid. A search takes the scale and
zero point of the asymmetric grid, and stores the minimum ``-zero * scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import PerGroup, PerTensor, ScaleType, Zero
from quantforge.packers import ColumnGrid
from quantforge.packers import row_encoding as rows
from quantforge.packers.bits import to_unsigned_codes
from quantforge.packers.hessian_refit import FixedCodes, RefitStep, ScaleMoments
from quantforge.packers.scale_search import search_scales, search_scales_and_zeros
from quantforge.packers.tensor import KernelInputs, QuantizedTensor
from quantforge.scheme import Scheme

SCALE_DTYPES = {
    ScaleType.F16: torch.float16,
    ScaleType.BF16: torch.bfloat16,
    ScaleType.F32: torch.float32,
}
EMPTY_SCALE = 2.0**-14  # the smallest normal float16, exact in every scale type
MIN_ZERO = 1  # the first GPTQ layout stores zero points less one
MIN_STEP = 1e-7  # of a group of equal weights under a minimum, as in MLX


def code_range(scheme: Scheme) -> tuple[int, int]:
    """Return the smallest and the largest code of the grid."""
    half = 1 << (scheme.bits - 1)
    return (-half, half - 1) if scheme.symmetric else (0, 2 * half - 1)


def code_dtype(scheme: Scheme) -> torch.dtype:
    """Return the type of the codes: int8 (symmetric) or uint8 (asymmetric)."""
    return torch.int8 if scheme.symmetric else torch.uint8


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose scales (and zeros, or minima) for ``weight`` ``[out, in]`` float32.

    Args:
        weight: finite values.
        scheme: a scheme whose group size divides ``in``.
        importance: ``[in]``, non-negative; weights of the squared error in the search.
        search: minimize the squared error instead of covering the whole range.

    Returns:
        ``scales`` in the stored type and, for an asymmetric scheme, ``zeros`` uint8, at least `MIN_ZERO`, or ``mins``
        in the stored type; all have the scheme's ``parameter_shape``.

    Raises:
        InputError: a scale or minimum is larger than its stored type can hold.
    """
    if scheme.zero is Zero.MIN:
        return _fit_minima(weight, scheme, importance, search=search)
    groups = _split_groups(weight, scheme)
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F16]
    low, high = code_range(scheme)
    if scheme.symmetric:
        scales = round_scales(_absmax(weight, scheme) / high, dtype)
        if search:
            weights = _split_importance(importance, groups)
            scales = search_scales(groups, scales, weights, low, high)
        return {"scales": scales}
    minimum, maximum = groups.amin((-2, -1)), groups.amax((-2, -1)).clamp(min=0)
    scales = round_scales((maximum - minimum) / high, dtype)
    zeros = (-minimum / scales.float()).round().clamp(0, high)
    # Values that are all but positive: a step is spent on a zero point that every format can hold.
    scales = torch.where(zeros < MIN_ZERO, round_scales(maximum / (high - MIN_ZERO), dtype), scales)
    zeros = zeros.clamp(min=MIN_ZERO)
    if search:
        weights = _split_importance(importance, groups)
        scales, zeros = search_scales_and_zeros(groups, scales, zeros, weights, MIN_ZERO, high)
    return {"scales": scales, "zeros": zeros.to(torch.uint8)}


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes of ``weight`` ``[out, n]``, of type `code_dtype`.

    ``columns`` are the positions of ``weight`` in the whole matrix.
    """
    low, high = code_range(scheme)
    if scheme.symmetric and rows.supports(weight, columns):
        return rows.encode_integers(
            weight, parameters["scales"].float().expand(len(weight), -1), low, high
        )
    scales = expand_to_columns(parameters["scales"], scheme, columns).float()
    if scheme.zero is Zero.MIN:
        mins = expand_to_columns(parameters["mins"], scheme, columns).float()
        codes = (weight - mins) / torch.where(scales == 0, 1, scales)
        return codes.round_().clamp_(low, high).to(torch.uint8)
    codes = (weight / scales).round_()
    if scheme.symmetric:
        return codes.clamp_(low, high).to(code_dtype(scheme))
    codes += expand_to_columns(parameters["zeros"], scheme, columns)
    return codes.clamp_(low, high).to(code_dtype(scheme))


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the float32 values of ``codes`` ``[out, n]``; ``columns`` as in `encode`."""
    values, scales = codes.float(), expand_to_columns(parameters["scales"], scheme, columns).float()
    if scheme.zero is Zero.MIN:
        return values.mul_(scales).add_(expand_to_columns(parameters["mins"], scheme, columns))
    if not scheme.symmetric:
        values -= expand_to_columns(parameters["zeros"], scheme, columns)
    return values.mul_(scales)


def round_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Round non-negative ``scales`` to ``dtype``; the result is never 0 or infinite.

    Raises:
        InputError: a scale is larger than ``dtype`` can hold.
    """
    limits = torch.finfo(dtype)
    if bool((scales > limits.max).any()):
        raise InputError(
            f"a scale of {scales.max().item():.3g} is beyond the range of {dtype}",
            "store the scales as f32, e.g. --format compressed-tensors --scheme int4:g128:sym:f32",
        )
    smallest = limits.smallest_normal * limits.eps  # the smallest subnormal
    return torch.where(scales > 0, scales.clamp(min=smallest), EMPTY_SCALE).to(dtype)


def _fit_minima(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, *, search: bool
) -> dict[str, Tensor]:
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F16]
    if search:
        search_result = fit(weight, replace(scheme, zero=Zero.INT), importance, search=True)
        mins = -search_result["zeros"].float() * search_result["scales"].float()
        return {"scales": search_result["scales"], "mins": _round_minima(mins, dtype)}
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    low, high = groups.amin(-1), groups.amax(-1)
    step = ((high - low) / ((1 << scheme.bits) - 1)).clamp(min=MIN_STEP)
    reversed_grid = low.abs() <= high.abs()
    step = torch.where(reversed_grid, -step, step)
    farther_end = torch.where(reversed_grid, high, low)
    edge_code = (farther_end / step).round()
    scales = torch.where(
        edge_code != 0, farther_end / torch.where(edge_code == 0, 1, edge_code), step
    )
    mins = torch.where(edge_code != 0, farther_end, 0)
    round_scales(scales.abs(), dtype)  # refuses what is beyond the type
    return {"scales": scales.to(dtype), "mins": _round_minima(mins, dtype)}


def _round_minima(mins: Tensor, dtype: torch.dtype) -> Tensor:
    """Round minima to ``dtype``; raise `InputError` if one is larger than it can hold."""
    rounded_minima = mins.to(dtype)
    if not bool(rounded_minima.isfinite().all()):
        raise InputError(
            f"a minimum of {mins.abs().max().item():.3g} is beyond the range of {dtype}",
            "store scales and minima as bf16, e.g. --scheme int4:g64:min:bf16",
        )
    return rounded_minima


def _absmax(weight: Tensor, scheme: Scheme) -> Tensor:
    if isinstance(scheme.granularity, PerTensor):
        return weight.abs().amax().view(1, 1)
    return rows.group_absmax(weight, scheme.groups(weight.shape[1]))


def _split_groups(weight: Tensor, scheme: Scheme) -> Tensor:
    """View ``weight`` as ``[rows, groups, parts, size]``, where all parts of a group share one scale."""
    if isinstance(scheme.granularity, PerTensor):
        return weight.unsqueeze(0).unsqueeze(0)
    return weight.reshape(len(weight), scheme.groups(weight.shape[1]), 1, -1)


def _split_importance(importance: Tensor | None, groups: Tensor) -> Tensor:
    if importance is None:
        return groups.new_ones(1, 1, 1, 1)
    return importance.view(1, groups.shape[1], 1, groups.shape[3])


def expand_to_columns(parameter: Tensor, scheme: Scheme, columns: slice | None) -> Tensor:
    """Repeat a parameter per group so that it broadcasts over the given columns of a matrix; None: all columns."""
    if not isinstance(scheme.granularity, PerGroup):
        return parameter
    size = scheme.granularity.size
    if columns is None:
        return parameter.repeat_interleave(size, dim=1)
    first_group, last_group = columns.start // size, (columns.stop - 1) // size
    if first_group == last_group:
        return parameter[:, first_group : first_group + 1]
    column_indices = torch.arange(columns.start, columns.stop, device=parameter.device)
    return parameter[:, column_indices // size]


def column_grid(
    parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor
) -> ColumnGrid | None:
    """Return the values that ``columns`` can take; None if all rows share one scale."""
    if isinstance(scheme.granularity, PerTensor):
        return None
    per_group = isinstance(scheme.granularity, PerGroup)
    groups = columns // scheme.group_size(0) if per_group else columns * 0
    scales = parameters["scales"].T[groups]
    zeros_tensor = torch.zeros_like(scales)
    zeros, minima = (
        parameters[key].T[groups] if key in parameters else zeros_tensor
        for key in ("zeros", "mins")
    )
    return ColumnGrid(scales, zeros, minima, code_range(scheme), code_dtype(scheme))


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:
    """Return one step, which fits each group's scale under its zero, zero - 1 and zero + 1; none for stored minima."""
    if scheme.zero is Zero.MIN:
        return ()
    return (RefitStep(scheme.group_size(in_features), partial(_refit_scale_and_zero, scheme)),)


def _refit_scale_and_zero(
    scheme: Scheme, parameters: dict[str, Tensor], fixed: FixedCodes
) -> Tensor:
    scales, zeros, group = parameters["scales"], parameters.get("zeros"), fixed.group
    old_zero = torch.zeros_like(scales[:, group]) if zeros is None else zeros[:, group].clone()
    per_tensor = isinstance(scheme.granularity, PerTensor)
    moments = ScaleMoments(fixed.codes - old_zero, fixed, per_tensor)
    old_scale, new_scale = scales[:, group].double(), scales[:, group].clone()
    best_gain, zero_shift = torch.zeros_like(old_scale), torch.zeros_like(new_scale)
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F16]
    for shift in (0,) if zeros is None else (0, -1, 1):
        candidate = moments.fit(old_scale, shift).to(dtype)
        gain = moments.gain(old_scale, candidate.double(), shift)
        is_better = (gain > best_gain) & candidate.isfinite() & (candidate != 0)
        if shift:
            is_better &= (old_zero + shift >= MIN_ZERO) & (old_zero + shift < 1 << scheme.bits)
        best_gain, new_scale = (
            torch.where(is_better, gain, best_gain),
            torch.where(is_better, candidate, new_scale),
        )
        zero_shift = torch.where(is_better, shift, zero_shift)
    scales[:, group] = new_scale
    if zeros is not None:
        zeros[:, group] += zero_shift
    return best_gain


def kernel_inputs(tensor: QuantizedTensor) -> KernelInputs:
    """Return the tensor as the kernels take it; they subtract minima, so the stored ones are negated."""
    parameters = dict(tensor.parameters)
    if "mins" in parameters:
        parameters["mins"] = -parameters["mins"]
    return KernelInputs("int", to_unsigned_codes(tensor.codes, tensor.scheme.bits), parameters)
