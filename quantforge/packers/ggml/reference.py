"""Quantize rows as ggml's own quantizers do, to the last bit, with and without an importance matrix.

Without one the model is ``quantize_row_*_ref``, with one ``quantize_*``, given one importance per column. `quantize`
splits rows into blocks; the error weights, the scales of the scales and the final rounding are here. The scale of one
group comes from one of ggml's searches, rewritten in the second half (from ggml-quants.c; the names in brackets are
ggml's); their inner loops are in `reference_loops`.

To have ggml's codes to the last bit takes float32 throughout, sums in the order of the elements, and products grouped
as written. Blocks are columns, side by side: tensors are ``[columns, blocks]``, those of groups ``[size, groups]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from quantforge.grids import E2M1_VALUES, GGML_BLOCKS, IQ4_VALUES, Zero
from quantforge.packers.ggml.grid import (
    CODE_RANGES,
    CodeRange,
    decode_half_e8m0,
    nearest_codes,
    value_thresholds,
)
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

# Codes [columns, blocks] and parameters [n, blocks].
CodesAndParams = tuple[Tensor, dict[str, Tensor]]

EPSILON = 1e-15  # groups with smaller magnitudes are treated as zeros
CHUNK_WEIGHTS = 1 << 18  # weights processed at a time, which fit in the cache
TYPES_WITHOUT_SEARCH = frozenset({"q8_0", "tq1_0", "tq2_0", "mxfp4"})
# Types for which ggml covers the range of each block if there is no importance matrix.
TYPES_COVERING_RANGE = TYPES_WITHOUT_SEARCH | {"q4_0", "q4_1", "q5_0", "q5_1"}


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of weights, one per column.

    Attributes:
        x: weights, float32 ``[columns, blocks]``.
        importance: of the same shape, or None.
        row_mean: mean of ``x^2`` over the whole row of each block; None without an importance.
    """

    x: Tensor
    importance: Tensor | None
    row_mean: Tensor | None

    def groups(self, size: int) -> Tensor:
        """Return the weights as ``[size, groups of a block, blocks]``."""
        return self.x.view(-1, size, self.x.shape[1]).transpose(0, 1)

    def weights(self, size: int, mean: Tensor) -> Tensor:
        """Return ``importance * sqrt(mean + x^2)`` in groups of ``size``."""
        assert self.importance is not None
        weights = self.importance * _square_root(mean + self.x * self.x)
        return weights.view(-1, size, self.x.shape[1]).transpose(0, 1)

    def weights_by_row_mean(self) -> Tensor:
        """Return ``importance * sqrt(mean + x^2)``, with the mean of the whole row."""
        assert self.importance is not None
        assert self.row_mean is not None
        return self.importance * _square_root(self.row_mean + self.x * self.x)


def quantize(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> QuantizedTensor:
    """Quantize ``weight`` ``[rows, in]`` float32 as ggml does; the computation runs on the CPU, whatever the device."""
    device, weight = weight.device, weight.cpu()
    if scheme.grid in (TYPES_COVERING_RANGE if importance is None else TYPES_WITHOUT_SEARCH):
        codes, parameters = (
            _cover_mxfp4(weight) if scheme.grid == "mxfp4" else _cover_range(weight, scheme)
        )
    else:
        importance = None if importance is None else importance.float().cpu()
        rows = max(1, CHUNK_WEIGHTS // weight.shape[1])
        chunks = [_quantize_chunk(chunk, scheme, importance) for chunk in torch.split(weight, rows)]
        codes = torch.cat([chunk[0] for chunk in chunks])
        parameters = {key: torch.cat([chunk[1][key] for chunk in chunks]) for key in chunks[0][1]}
    on_device = {key: value.to(device) for key, value in parameters.items()}
    return QuantizedTensor(codes.to(device), on_device, scheme)


def _cover_range(weight: Tensor, scheme: Scheme) -> CodesAndParams:
    """Quantize so that the codes cover the range of each block, without a search."""
    from quantforge.packers.ggml import row_loops

    grid, affine = CODE_RANGES[scheme.grid], scheme.zero is Zero.MIN
    scales = torch.empty(len(weight), weight.shape[1] // GGML_BLOCKS[scheme.grid].columns)
    mins, codes = torch.empty_like(scales), torch.empty(weight.shape, dtype=torch.int8)
    limits = numpy.float32(grid.low), numpy.float32(grid.high)
    outputs = (array.numpy() for array in (scales, mins, codes))
    covers_magnitude = scheme.grid in TYPES_WITHOUT_SEARCH
    row_loops.cover_range(*_to_numpy(weight), affine, covers_magnitude, *limits, *outputs)
    parameters = {"scales": scales.half()} | ({"mins": mins.half()} if affine else {})
    return codes.view(grid.dtype), parameters


def _cover_mxfp4(weight: Tensor) -> CodesAndParams:
    """Quantize to mxfp4 with exponents that bring each block's largest magnitude near the largest mxfp4 value."""
    from quantforge.packers.ggml import row_loops

    blocks = weight.view(len(weight), -1, 32)
    absmax = torch.maximum(blocks.amax(-1), -blocks.amin(-1))
    exponents = (absmax.frexp().exponent - 1 - 2 + 127).clamp(min=0)
    exponents = torch.where(absmax > 0, exponents, 0).to(torch.uint8)
    steps = decode_half_e8m0(torch.arange(256))
    midpoints = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES[:8])])
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    row_loops.cover_mxfp4(*_to_numpy(weight, exponents, steps, midpoints, codes.view(torch.int8)))
    return codes, {"exponents": exponents}


def _quantize_chunk(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> CodesAndParams:
    rows, columns = weight.shape
    size = GGML_BLOCKS[scheme.grid].columns
    x = weight.reshape(-1, size).T.contiguous()
    row_mean = None
    if importance is not None:
        importance = importance.view(-1, size).T.repeat(1, rows)
        row_mean = _mean_squares(weight).repeat_interleave(columns // size)
    codes, parameters = _QUANTIZERS[scheme.grid](
        _Blocks(x, importance, row_mean), CODE_RANGES[scheme.grid]
    )
    codes = codes.to(CODE_RANGES[scheme.grid].dtype).T.reshape(rows, columns)
    return codes, {key: value.T.reshape(rows, -1) for key, value in parameters.items()}


def _safe_reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, _divide_exactly(1, scale))


def _quantize_symmetric_legacy(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    scale, codes = _search_symmetric(blocks.x, -grid.low, blocks.weights_by_row_mean())
    return codes, {"scales": scale.half().unsqueeze(0)}


def _quantize_affine_legacy(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    scale, negated_min, codes = _search_affine(
        blocks.x, grid.high, blocks.weights_by_row_mean(), IMPORTANCE_CANDIDATES
    )
    return codes, {"scales": scale.half().unsqueeze(0), "mins": (-negated_min).half().unsqueeze(0)}


def _quantize_iq4_nl(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    x = blocks.x
    weights = x * x
    if blocks.importance is not None:
        weights = blocks.weights(32, _sum_in_order(weights) * (2 / 32))[:, 0]
    scale = _search_table_scale(x, weights)
    return nearest_codes(x * _safe_reciprocal(scale), grid), {"scales": scale.half().unsqueeze(0)}


def _quantize_iq4_xs(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    x = blocks.groups(32)
    weights = x * x
    if blocks.importance is not None:
        weights = blocks.weights(32, _sum_in_order(blocks.x * blocks.x) * (2 / 256))
    scales = _search_table_scale(x.flatten(1), weights.flatten(1)).view(8, -1)
    unit = -_signed_extreme(scales) / 32
    integers = (_safe_reciprocal(unit) * scales).round_().clamp_(-32, 31)
    codes = nearest_codes(_safe_reciprocal(unit * integers) * x, grid)
    return _join_groups(codes), {"d": unit.half().unsqueeze(0), "scales": integers.to(torch.int8)}


def _join_groups(groups: Tensor) -> Tensor:
    """Reshape groups to ``[columns, blocks]``; the inverse of `_Blocks.groups`."""
    return groups.transpose(0, 1).flatten(0, 1)


def _requantize(
    x: Tensor, step: Tensor, negated_min: Tensor | None, codes: Tensor, grid: CodeRange
) -> Tensor:
    """Round again with the stored parameters; a group whose step is 0 keeps its codes."""
    shifted = x if negated_min is None else x + negated_min
    return _join_groups(
        torch.where(step == 0, codes, (shifted / step).round_().clamp_(grid.low, grid.high))
    )


def _quantize_affine_k(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    size, max_integer = (16, 15) if grid.high == 3 else (32, 63)
    x = blocks.groups(size)
    if blocks.importance is not None:
        squares = _sum_in_order(blocks.x * blocks.x)
        weights = blocks.weights(size, (squares if grid.high == 3 else 2 * squares) / 256)
        candidates = IMPORTANCE_CANDIDATES
    elif grid.high == 3:
        weights = x.abs()
        candidates = _CandidateScales(
            _round_to_float32(-0.5), _round_to_float32(0.1), 15, absolute=True
        )
    else:
        weights = _square_root(_sum_in_order(x * x) / size) + x.abs()
        candidates = (
            _CandidateScales(-1.0, _round_to_float32(0.1), 20)
            if grid.high == 15
            else _CandidateScales(-0.5, _round_to_float32(0.1), 15)
        )
    search_result = _search_affine(x.flatten(1), grid.high, weights.flatten(1), candidates)
    scales, negated_min = (array.view(x.shape[1:]) for array in search_result[:2])
    codes = search_result[2].view(x.shape)
    group_weights = _sum_in_order(weights) if blocks.importance is not None else None
    d, scales = _block_units(scales, max_integer, group_weights)
    dmin, mins = _block_units(negated_min, max_integer, group_weights)
    codes = _requantize(x, d.float() * scales, dmin.float() * mins, codes, grid)
    integers = {"scales": scales.to(torch.uint8), "mins": mins.to(torch.uint8)}
    return codes, {"d": d.unsqueeze(0), "dmin": dmin.unsqueeze(0), **integers}


def _block_units(
    scales: Tensor, max_integer: int, group_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the float16 unit of ``scales`` ``[groups, blocks]``, and the scales as integer multiples of it."""
    if group_weights is not None:
        unit, integers = _search_positive(scales, max_integer, group_weights)
        return unit.half(), integers
    max_scale = scales.amax(0)
    max_scale = torch.where(max_scale > 0, max_scale, 0.0)  # and never -0, which a clamp would keep
    integers = (_divide_exactly(max_integer, max_scale) * scales).round_().clamp_(max=max_integer)
    return (max_scale / max_integer).half(), torch.where(max_scale > 0, integers, 0.0)


def _quantize_q3_k(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    x = blocks.groups(16)
    if blocks.importance is None:
        scales, codes = _search_by_descent(x.flatten(1), 4)
        scales, codes = scales.view(16, -1), codes.view(x.shape)
        unit, integers = _signed_block_units(scales, 32)
    else:
        weights = blocks.weights(16, 2 * _sum_in_order(blocks.x * blocks.x) / 256)
        scales, codes = _search_symmetric(x.flatten(1), 4, weights.flatten(1))
        scales, codes = scales.view(16, -1), codes.view(x.shape)
        unit, integers = _search_symmetric(scales, 32, _sum_in_order(weights))
        unit = unit.half()
    codes = _requantize(x, unit.float() * integers, None, codes, grid)
    return codes, {"d": unit.unsqueeze(0), "scales": integers.to(torch.int8)}


def _quantize_q6_k(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    x = blocks.groups(16)
    weights = x * x
    if blocks.importance is not None:
        weights = blocks.importance.view(-1, 16, x.shape[2]).transpose(0, 1)
    scales, codes = _search_symmetric(x.flatten(1), 32, weights.flatten(1))
    scales, codes = scales.view(16, -1), codes.view(x.shape)
    unit, integers = _signed_block_units(scales, 128)
    empty = scales.abs().amax(0) < EPSILON
    unit, integers = torch.where(empty, 0.0, unit), torch.where(empty, 0.0, integers)
    codes = torch.where(empty, -32.0, codes)
    codes = _requantize(x, unit.float() * integers, None, codes, grid)
    return codes, {"d": unit.unsqueeze(0), "scales": integers.to(torch.int8)}


def _signed_block_units(scales: Tensor, max_magnitude: int) -> tuple[Tensor, Tensor]:
    inverse = _divide_exactly(-max_magnitude, _signed_extreme(scales))
    integers = (inverse * scales).round_().clamp_(-max_magnitude, max_magnitude - 1)
    is_empty = ~inverse.isfinite()
    return torch.where(is_empty, 0.0, _divide_exactly(1, inverse)).half(), torch.where(
        is_empty, -max_magnitude, integers
    )


# ggml's searches for the scale of one group


@dataclass(frozen=True, slots=True)
class _CandidateScales:
    """Candidates of `_search_affine`: inverse scales ``(high + first + i * width) / range``, ``i`` in ``0..count``."""

    first: float
    width: float
    count: int
    absolute: bool = False  # weighted absolute errors instead of squares


def _sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    """Sum each column in the order of its elements."""
    first, *other_terms = terms
    result = first.clone()
    for term in other_terms:
        result += term
    return result


def _divide_exactly(numerator: float, denominator: Tensor) -> Tensor:
    """Divide with correct rounding, where torch would multiply with the reciprocal."""
    return torch.full_like(denominator, numerator) / denominator


def _square_root(values: Tensor) -> Tensor:
    """Return the correctly rounded square root, which torch does not guarantee in float32."""
    return torch.from_numpy(numpy.sqrt(values.numpy()))


def _signed_extreme(values: Tensor) -> Tensor:
    """Return the element of largest magnitude of each column with its sign, the first of several."""
    extremes = torch.empty(values.shape[1])
    _load_loops().signed_extreme(*_to_numpy(values), extremes.numpy())
    return extremes


def _round_to_float32(value: float) -> float:
    """Round to float32."""
    return float(numpy.float32(value))


def _add_tenths(codes: int, tenths: int) -> float:
    """Return ``codes + 0.1 tenths`` in float32."""
    return float(numpy.float32(codes) + numpy.float32(0.1) * numpy.float32(tenths))


def _mean_squares(rows: Tensor) -> Tensor:
    """Return the mean square of each row, summed in order."""
    means = torch.empty(len(rows))
    _load_loops().mean_squares(*_to_numpy(rows), means.numpy())
    return means


def _search_symmetric(x: Tensor, high: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Search scale and codes ``-high..high - 1`` [make_qx_quants]; codes of an empty group are ``-high``."""
    numerators = [high, *(_add_tenths(high, tenths) for tenths in (*range(-9, 0), *range(1, 10)))]
    scales, codes = torch.empty(x.shape[1]), torch.empty(x.shape)
    options = numpy.float32(high), numpy.array(numerators, numpy.float32)
    _load_loops().search_symmetric(*_to_numpy(x, weights), *options, scales.numpy(), codes.numpy())
    return scales, codes


def _search_by_descent(x: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Search scale and codes by coordinate descent, with the squares as weights [make_q3_quants]."""
    extreme = _signed_extreme(x)
    codes = (_divide_exactly(-high, extreme) * x).round_().clamp_(-high, high - 1)
    scale = _descend_coordinates(x, codes, x * x, (-high, high - 1))
    empty = extreme.abs() < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, -high, codes)


def _descend_coordinates(
    x: Tensor, codes: Tensor, weights: Tensor, limits: tuple[int, int]
) -> Tensor:
    """Change one code at a time while the fit improves, up to five rounds, in place; return the scale."""
    scales = torch.empty(x.shape[1])
    low, high = map(numpy.float32, limits)
    _load_loops().descend_coordinates(
        *_to_numpy(x, weights), low, high, codes.numpy(), scales.numpy()
    )
    return scales


def _search_affine(
    x: Tensor, high: int, weights: Tensor, candidates: _CandidateScales
) -> tuple[Tensor, Tensor, Tensor]:
    """Search scale, negated minimum (>= 0) and codes ``0..high`` [make_qkx2_quants, make_qkx3_quants]."""
    start, step = numpy.float32(candidates.first), numpy.float32(candidates.width)
    counts = numpy.arange(candidates.count + 1, dtype=numpy.float32)
    numerators = start + step * counts + numpy.float32(high)
    scales, negated_min, codes = (torch.empty(shape) for shape in (x.shape[1], x.shape[1], x.shape))
    outputs = (array.numpy() for array in (scales, negated_min, codes))
    _load_loops().search_affine(
        *_to_numpy(x, weights), numpy.float32(high), numerators, candidates.absolute, *outputs
    )
    return scales, negated_min, codes


def _search_positive(x: Tensor, high: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Search scale and codes ``0..high`` of non-negative values [make_qp_quants]."""
    max_value = x.amax(0).clamp(min=0)

    def codes_of(inverse: Tensor) -> Tensor:
        return (inverse * x).round_().clamp_(max=high)

    def error(inverse: Tensor) -> Tensor:
        difference = x - _divide_exactly(1, inverse) * codes_of(inverse)
        return _sum_in_order(weights * difference * difference)

    inverse = _divide_exactly(high, max_value)
    best_error = error(inverse)
    for tenths in (*range(-4, 0), *range(1, 5)):
        candidate = _divide_exactly(_add_tenths(high, tenths), max_value)
        candidate_error = error(candidate)
        is_better = candidate_error < best_error
        best_error, inverse = (
            torch.where(is_better, candidate_error, best_error),
            torch.where(is_better, candidate, inverse),
        )
    codes = codes_of(inverse)
    scale = _descend_coordinates(x, codes, weights, (0, high))
    empty = max_value < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, 0.0, codes)


def _search_table_scale(x: Tensor, weights: Tensor) -> Tensor:
    """Search the scale for the IQ4 table [quantize_row_iq4_nl_impl]."""
    low, _, thresholds, increments = value_thresholds(CodeRange(0, 15, IQ4_VALUES))
    ratios = numpy.array([0, *(low + shift for shift in range(-7, 8))], numpy.float32)
    scales = torch.empty(x.shape[1])
    _load_loops().search_table_scale(
        *_to_numpy(x, weights), ratios, low, thresholds, increments, scales.numpy()
    )
    return scales


def _load_loops() -> ModuleType:
    from quantforge.packers.ggml import reference_loops

    return reference_loops


def _to_numpy(*tensors: Tensor) -> list[numpy.ndarray[Any, Any]]:
    return [tensor.contiguous().numpy() for tensor in tensors]


IMPORTANCE_CANDIDATES = _CandidateScales(_round_to_float32(-0.9), _round_to_float32(0.05), 36)
_QUANTIZERS: Mapping[str, Callable[[_Blocks, CodeRange], CodesAndParams]] = {
    "q4_0": _quantize_symmetric_legacy,
    "q4_1": _quantize_affine_legacy,
    "q5_0": _quantize_symmetric_legacy,
    "q5_1": _quantize_affine_legacy,
    "q2_k": _quantize_affine_k,
    "q3_k": _quantize_q3_k,
    "q4_k": _quantize_affine_k,
    "q5_k": _quantize_affine_k,
    "q6_k": _quantize_q6_k,
    "iq4_nl": _quantize_iq4_nl,
    "iq4_xs": _quantize_iq4_xs,
}
