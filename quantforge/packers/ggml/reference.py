"""Rows quantized as ggml's own quantizers do, to the last bit, with and without an importance matrix.

Without: ``quantize_row_*_ref``; with: ``quantize_*`` given one importance for each column. `quantize` makes blocks of
rows: the weights of errors, the scales of the scales and the last rounding are here. The scale of one group comes from
one of ggml's searches, restated in the second half (ggml-quants.c; names there in brackets); what takes the time of
these is in `reference_loops`.

To have ggml's codes to the last bit takes float32 throughout, sums in the order of the elements, and products grouped
as written. Blocks are columns, side by side: tensors are ``[columns, blocks]``, of groups ``[size, groups]``.
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

CodesAndParams = tuple[
    Tensor, dict[str, Tensor]
]  # codes [columns, blocks] and parameters [n, blocks]

EPSILON = 1e-15  # a group below it is empty
CHUNK_WEIGHTS = 1 << 18  # weights at a time, which the cache holds
TYPES_WITHOUT_SEARCH = frozenset({"q8_0", "tq1_0", "tq2_0", "mxfp4"})
TYPES_COVERING_RANGE = TYPES_WITHOUT_SEARCH | {
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
}  # without an importance


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks as columns.

    Attributes:
        x: ``[columns, blocks]``, float32.
        importance: of the same shape, or None.
        row_mean: mean of ``x^2`` over the whole row of each block, where there is an importance.
    """

    x: Tensor
    importance: Tensor | None
    row_mean: Tensor | None

    def groups(self, size: int) -> Tensor:
        """Return the values as ``[size, groups of a block, blocks]``."""
        return self.x.view(-1, size, self.x.shape[1]).transpose(0, 1)

    def weights(self, size: int, mean: Tensor) -> Tensor:
        """Return ``importance * sqrt(mean + x^2)`` in groups of ``size``."""
        assert self.importance is not None
        weights = self.importance * _square_root(mean + self.x * self.x)
        return weights.view(-1, size, self.x.shape[1]).transpose(0, 1)

    def by_row(self) -> Tensor:
        """Return ``importance * sqrt(mean + x^2)``, the mean of the whole row."""
        assert self.importance is not None
        assert self.row_mean is not None
        return self.importance * _square_root(self.row_mean + self.x * self.x)


def quantize(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> QuantizedTensor:
    """Quantize ``weight`` ``[rows, in]`` float32 as ggml does; it computes on the CPU, whatever the device."""
    device, weight = weight.device, weight.cpu()
    if scheme.grid in (TYPES_COVERING_RANGE if importance is None else TYPES_WITHOUT_SEARCH):
        codes, parameters = (
            _cover_mxfp4(weight) if scheme.grid == "mxfp4" else _cover_range(weight, scheme)
        )
    else:
        importance = None if importance is None else importance.float().cpu()
        rows = max(1, CHUNK_WEIGHTS // weight.shape[1])
        parts = [_quantize_chunk(part, scheme, importance) for part in torch.split(weight, rows)]
        codes = torch.cat([part[0] for part in parts])
        parameters = {key: torch.cat([part[1][key] for part in parts]) for key in parts[0][1]}
    moved = {key: value.to(device) for key, value in parameters.items()}
    return QuantizedTensor(codes.to(device), moved, scheme)


def _cover_range(weight: Tensor, scheme: Scheme) -> CodesAndParams:
    """Cover the range of each block with codes, without a search."""
    from quantforge.packers.ggml import row_loops

    grid, affine = CODE_RANGES[scheme.grid], scheme.zero is Zero.MIN
    scales = torch.empty(len(weight), weight.shape[1] // GGML_BLOCKS[scheme.grid].columns)
    mins, codes = torch.empty_like(scales), torch.empty(weight.shape, dtype=torch.int8)
    limits = numpy.float32(grid.low), numpy.float32(grid.high)
    found = (part.numpy() for part in (scales, mins, codes))
    magnitude = scheme.grid in TYPES_WITHOUT_SEARCH
    row_loops.cover_range(*_to_numpy(weight), affine, magnitude, *limits, *found)
    parameters = {"scales": scales.half()} | ({"mins": mins.half()} if affine else {})
    return codes.view(grid.dtype), parameters


def _cover_mxfp4(weight: Tensor) -> CodesAndParams:
    """Bring the largest magnitude of each block to the binade of the largest value of mxfp4."""
    from quantforge.packers.ggml import row_loops

    blocks = weight.view(len(weight), -1, 32)
    largest = torch.maximum(blocks.amax(-1), -blocks.amin(-1))
    exponents = (largest.frexp().exponent - 1 - 2 + 127).clamp(min=0)
    exponents = torch.where(largest > 0, exponents, 0).to(torch.uint8)
    steps = decode_half_e8m0(torch.arange(256))
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES[:8])])
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    row_loops.cover_mxfp4(*_to_numpy(weight, exponents, steps, middles, codes.view(torch.int8)))
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
    scale, codes = _search_symmetric(blocks.x, -grid.low, blocks.by_row())
    return codes, {"scales": scale.half().unsqueeze(0)}


def _quantize_affine_legacy(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    scale, lowered, codes = _search_affine(blocks.x, grid.high, blocks.by_row(), WITH_IMPORTANCE)
    return codes, {"scales": scale.half().unsqueeze(0), "mins": (-lowered).half().unsqueeze(0)}


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
    numbers = (_safe_reciprocal(unit) * scales).round_().clamp_(-32, 31)
    codes = nearest_codes(_safe_reciprocal(unit * numbers) * x, grid)
    return _join_groups(codes), {"d": unit.half().unsqueeze(0), "scales": numbers.to(torch.int8)}


def _join_groups(groups: Tensor) -> Tensor:
    """Undo `_Blocks.groups`."""
    return groups.transpose(0, 1).flatten(0, 1)


def _requantize(
    x: Tensor, step: Tensor, lowered: Tensor | None, codes: Tensor, grid: CodeRange
) -> Tensor:
    """Round again with the parameters as stored; a group without a step keeps its codes."""
    moved = x if lowered is None else x + lowered
    return _join_groups(
        torch.where(step == 0, codes, (moved / step).round_().clamp_(grid.low, grid.high))
    )


def _quantize_affine_k(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    size, top = (16, 15) if grid.high == 3 else (32, 63)
    x = blocks.groups(size)
    if blocks.importance is not None:
        squares = _sum_in_order(blocks.x * blocks.x)
        weights = blocks.weights(size, (squares if grid.high == 3 else 2 * squares) / 256)
        steps = WITH_IMPORTANCE
    elif grid.high == 3:
        weights, steps = (
            x.abs(),
            _CandidateScales(_round_to_float32(-0.5), _round_to_float32(0.1), 15, absolute=True),
        )
    else:
        weights = _square_root(_sum_in_order(x * x) / size) + x.abs()
        steps = (
            _CandidateScales(-1.0, _round_to_float32(0.1), 20)
            if grid.high == 15
            else _CandidateScales(-0.5, _round_to_float32(0.1), 15)
        )
    fitted = _search_affine(x.flatten(1), grid.high, weights.flatten(1), steps)
    scales, lowered = (part.view(x.shape[1:]) for part in fitted[:2])
    codes = fitted[2].view(x.shape)
    shares = _sum_in_order(weights) if blocks.importance is not None else None
    d, scales = _block_units(scales, top, shares)
    dmin, mins = _block_units(lowered, top, shares)
    codes = _requantize(x, d.float() * scales, dmin.float() * mins, codes, grid)
    numbers = {"scales": scales.to(torch.uint8), "mins": mins.to(torch.uint8)}
    return codes, {"d": d.unsqueeze(0), "dmin": dmin.unsqueeze(0), **numbers}


def _block_units(scales: Tensor, top: int, shares: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the float16 unit of ``scales`` ``[groups, blocks]`` and how many of it each is."""
    if shares is not None:
        unit, numbers = _search_positive(scales, top, shares)
        return unit.half(), numbers
    most = scales.amax(0)
    most = torch.where(most > 0, most, 0.0)  # and never -0, which a clamp would keep
    numbers = (_divide_exactly(top, most) * scales).round_().clamp_(max=top)
    return (most / top).half(), torch.where(most > 0, numbers, 0.0)


def _quantize_q3_k(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    x = blocks.groups(16)
    if blocks.importance is None:
        scales, codes = _search_by_descent(x.flatten(1), 4)
        scales, codes = scales.view(16, -1), codes.view(x.shape)
        unit, numbers = _signed_block_units(scales, 32)
    else:
        weights = blocks.weights(16, 2 * _sum_in_order(blocks.x * blocks.x) / 256)
        scales, codes = _search_symmetric(x.flatten(1), 4, weights.flatten(1))
        scales, codes = scales.view(16, -1), codes.view(x.shape)
        unit, numbers = _search_symmetric(scales, 32, _sum_in_order(weights))
        unit = unit.half()
    codes = _requantize(x, unit.float() * numbers, None, codes, grid)
    return codes, {"d": unit.unsqueeze(0), "scales": numbers.to(torch.int8)}


def _quantize_q6_k(blocks: _Blocks, grid: CodeRange) -> CodesAndParams:
    x = blocks.groups(16)
    weights = x * x
    if blocks.importance is not None:
        weights = blocks.importance.view(-1, 16, x.shape[2]).transpose(0, 1)
    scales, codes = _search_symmetric(x.flatten(1), 32, weights.flatten(1))
    scales, codes = scales.view(16, -1), codes.view(x.shape)
    unit, numbers = _signed_block_units(scales, 128)
    empty = scales.abs().amax(0) < EPSILON
    unit, numbers = torch.where(empty, 0.0, unit), torch.where(empty, 0.0, numbers)
    codes = torch.where(empty, -32.0, codes)
    codes = _requantize(x, unit.float() * numbers, None, codes, grid)
    return codes, {"d": unit.unsqueeze(0), "scales": numbers.to(torch.int8)}


def _signed_block_units(scales: Tensor, top: int) -> tuple[Tensor, Tensor]:
    inverse = _divide_exactly(-top, _signed_extreme(scales))
    numbers = (inverse * scales).round_().clamp_(-top, top - 1)
    none = ~inverse.isfinite()
    return torch.where(none, 0.0, _divide_exactly(1, inverse)).half(), torch.where(
        none, -top, numbers
    )


# ggml's searches for the scale of one group


@dataclass(frozen=True, slots=True)
class _CandidateScales:
    """Candidates of `_search_affine`: inverse scales ``(high + first + i * width) / range``, ``i`` from 0 to ``count``."""

    first: float
    width: float
    count: int
    absolute: bool = False  # weighted absolute errors instead of squares


def _sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    """Sum each column in the order of its elements."""
    first, *others = terms
    result = first.clone()
    for term in others:
        result += term
    return result


def _divide_exactly(numerator: float, denominator: Tensor) -> Tensor:
    """Divide truly: torch would multiply by the reciprocal."""
    return torch.full_like(denominator, numerator) / denominator


def _square_root(values: Tensor) -> Tensor:
    """Return the correctly rounded square root, which torch does not promise in float32."""
    return torch.from_numpy(numpy.sqrt(values.numpy()))


def _signed_extreme(values: Tensor) -> Tensor:
    """Return the element of largest magnitude of each column, the first of several."""
    found = torch.empty(values.shape[1])
    _load_loops().signed_extreme(*_to_numpy(values), found.numpy())
    return found


def _round_to_float32(value: float) -> float:
    """Round to float32."""
    return float(numpy.float32(value))


def _add_tenths(codes: int, tenths: int) -> float:
    """Return ``codes + 0.1 tenths`` in float32."""
    return float(numpy.float32(codes) + numpy.float32(0.1) * numpy.float32(tenths))


def _mean_squares(rows: Tensor) -> Tensor:
    """Return the mean square of each row, summed in order."""
    found = torch.empty(len(rows))
    _load_loops().mean_squares(*_to_numpy(rows), found.numpy())
    return found


def _search_symmetric(x: Tensor, high: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and codes ``-high..high - 1`` [make_qx_quants]; codes of an empty group are ``-high``."""
    tried = [high, *(_add_tenths(high, tenths) for tenths in (*range(-9, 0), *range(1, 10)))]
    scales, codes = torch.empty(x.shape[1]), torch.empty(x.shape)
    numbers = numpy.float32(high), numpy.array(tried, numpy.float32)
    _load_loops().symmetric(*_to_numpy(x, weights), *numbers, scales.numpy(), codes.numpy())
    return scales, codes


def _search_by_descent(x: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Find scale and codes by coordinate descent, squares as weights [make_q3_quants]."""
    extreme = _signed_extreme(x)
    codes = (_divide_exactly(-high, extreme) * x).round_().clamp_(-high, high - 1)
    scale = _descend_coordinates(x, codes, x * x, (-high, high - 1))
    empty = extreme.abs() < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, -high, codes)


def _descend_coordinates(
    x: Tensor, codes: Tensor, weights: Tensor, limits: tuple[int, int]
) -> Tensor:
    """Change one code at a time while the fit gets better, five times over, in place; return the scale."""
    scales = torch.empty(x.shape[1])
    low, high = map(numpy.float32, limits)
    _load_loops().descend(*_to_numpy(x, weights), low, high, codes.numpy(), scales.numpy())
    return scales


def _search_affine(
    x: Tensor, high: int, weights: Tensor, steps: _CandidateScales
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, minus the minimum (>= 0) and codes ``0..high`` [make_qkx2_quants, make_qkx3_quants]."""
    first, width = numpy.float32(steps.first), numpy.float32(steps.width)
    counts = numpy.arange(steps.count + 1, dtype=numpy.float32)
    widths = first + width * counts + numpy.float32(high)
    scales, lowered, codes = (torch.empty(shape) for shape in (x.shape[1], x.shape[1], x.shape))
    found = (part.numpy() for part in (scales, lowered, codes))
    _load_loops().affine(
        *_to_numpy(x, weights), numpy.float32(high), widths, steps.absolute, *found
    )
    return scales, lowered, codes


def _search_positive(x: Tensor, high: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and codes ``0..high`` of values that are not negative [make_qp_quants]."""
    most = x.amax(0).clamp(min=0)

    def codes_of(inverse: Tensor) -> Tensor:
        return (inverse * x).round_().clamp_(max=high)

    def error(inverse: Tensor) -> Tensor:
        difference = x - _divide_exactly(1, inverse) * codes_of(inverse)
        return _sum_in_order(weights * difference * difference)

    inverse = _divide_exactly(high, most)
    best = error(inverse)
    for tenths in (*range(-4, 0), *range(1, 5)):
        tried = _divide_exactly(_add_tenths(high, tenths), most)
        found = error(tried)
        better = found < best
        best, inverse = torch.where(better, found, best), torch.where(better, tried, inverse)
    codes = codes_of(inverse)
    scale = _descend_coordinates(x, codes, weights, (0, high))
    empty = most < EPSILON
    return torch.where(empty, 0.0, scale), torch.where(empty, 0.0, codes)


def _search_table_scale(x: Tensor, weights: Tensor) -> Tensor:
    """Return the scale of the IQ4 table [quantize_row_iq4_nl_impl]."""
    low, _, middles, rises = value_thresholds(CodeRange(0, 15, IQ4_VALUES))
    ratios = numpy.array([0, *(low + shift for shift in range(-7, 8))], numpy.float32)
    scales = torch.empty(x.shape[1])
    _load_loops().from_table(*_to_numpy(x, weights), ratios, low, middles, rises, scales.numpy())
    return scales


def _load_loops() -> ModuleType:
    from quantforge.packers.ggml import reference_loops

    return reference_loops


def _to_numpy(*tensors: Tensor) -> list[numpy.ndarray[Any, Any]]:
    return [tensor.contiguous().numpy() for tensor in tensors]


WITH_IMPORTANCE = _CandidateScales(_round_to_float32(-0.9), _round_to_float32(0.05), 36)
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
