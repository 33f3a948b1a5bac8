"""Rows quantized as ggml's own quantizers do, with and without an importance matrix, to the last bit.

Without: ``quantize_row_*_ref``; with: ``quantize_*`` given one importance for each column. `ggml_search` holds the
searches of a group; here is what makes blocks of them: the weights, the scales of the scales, and the last rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quantforge.grids import E2M1_VALUES, SUPERBLOCKS, Zero
from quantforge.packers.ggml import lanes, panels
from quantforge.packers.ggml.block_columns import BlockColumns, Found
from quantforge.packers.ggml.ggml_search import (
    EPSILON,
    Steps,
    affine,
    descended,
    from_table,
    mean_squares,
    over,
    positive,
    root,
    signed_extreme,
    single,
    symmetric,
    total,
)
from quantforge.packers.ggml.grid import GRIDS, CodeRange, nearest, power_of_two
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

WITH_IMPORTANCE = Steps(single(-0.9), single(0.05), 36)
CHUNK = 1 << 18  # weights at a time, which the cache holds
# The types that need no search without an importance, and whether they have one with it.
COVERED = {
    "q4_0": (panels.EXTREME, True),
    "q5_0": (panels.EXTREME, True),
    "q4_1": (panels.AFFINE, True),
    "q5_1": (panels.AFFINE, True),
    "q8_0": (panels.MAGNITUDE, False),
    "tq1_0": (panels.MAGNITUDE, False),
    "tq2_0": (panels.MAGNITUDE, False),
    "mxfp4": (panels.POWER, False),
}


def quantize(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> QuantizedTensor:
    """Quantize ``weight`` ``[rows, in]`` float32 as ggml does; it computes on the CPU, whatever the device."""
    device, weight = weight.device, weight.cpu()
    kind, uses_importance = COVERED.get(scheme.grid, (None, True))
    if kind is not None and (importance is None or not uses_importance):
        codes, parameters = _covered(weight, scheme, kind)
    else:
        importance = None if importance is None else importance.float().cpu()
        rows = max(1, CHUNK // weight.shape[1])
        parts = [_quantize(part, scheme, importance) for part in torch.split(weight, rows)]
        codes = torch.cat([part[0] for part in parts])
        parameters = {key: torch.cat([part[1][key] for part in parts]) for key in parts[0][1]}
    moved = {key: value.to(device) for key, value in parameters.items()}
    return QuantizedTensor(codes.to(device), moved, scheme)


def _covered(weight: Tensor, scheme: Scheme, kind: int) -> Found:
    if kind == panels.POWER:
        return _covered_by_powers(weight)
    grid, size = GRIDS[scheme.grid], SUPERBLOCKS[scheme.grid].columns
    scales, mins, codes = lanes.cover(weight, kind, grid, size)
    parameters = {"scales": scales.half()}
    if scheme.zero is Zero.MIN:
        parameters["mins"] = mins.half()
    return codes, parameters


def _covered_by_powers(weight: Tensor) -> Found:
    blocks = weight.view(len(weight), -1, 32)
    exponents = _exponents(torch.maximum(blocks.amax(-1), -blocks.amin(-1)))
    codes = lanes.cover_mxfp4(weight, exponents, power_of_two(torch.arange(256)), _middles())
    return codes, {"exponents": exponents}


def _quantize(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> Found:
    rows, columns = weight.shape
    size = SUPERBLOCKS[scheme.grid].columns
    x = weight.reshape(-1, size).T.contiguous()
    row_mean = None
    if importance is not None:
        importance = importance.view(-1, size).T.repeat(1, rows)
        row_mean = mean_squares(weight).repeat_interleave(columns // size)
    codes, parameters = _QUANTIZERS[scheme.grid](
        BlockColumns(x, importance, row_mean), GRIDS[scheme.grid]
    )
    codes = codes.to(GRIDS[scheme.grid].dtype).T.reshape(rows, columns)
    return codes, {key: value.T.reshape(rows, -1) for key, value in parameters.items()}


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, over(1, scale))


def _symmetric_legacy(blocks: BlockColumns, grid: CodeRange) -> Found:
    scale, codes = symmetric(blocks.x, -grid.low, blocks.by_row())
    return codes, {"scales": scale.half().unsqueeze(0)}


def _affine_legacy(blocks: BlockColumns, grid: CodeRange) -> Found:
    scale, lowered, codes = affine(blocks.x, grid.high, blocks.by_row(), WITH_IMPORTANCE)
    return codes, {"scales": scale.half().unsqueeze(0), "mins": (-lowered).half().unsqueeze(0)}


def _exponents(largest: Tensor) -> Tensor:
    """Return exponents that bring the ``largest`` magnitude of a block to the binade of the largest value, uint8."""
    exponents = (largest.frexp().exponent - 1 - 2 + 127).clamp(min=0)
    return torch.where(largest > 0, exponents, 0).to(torch.uint8)


def _middles() -> Tensor:
    return torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES[:8])])


def _iq4_nl(blocks: BlockColumns, grid: CodeRange) -> Found:
    x = blocks.x
    weights = x * x
    if blocks.importance is not None:
        weights = blocks.weights(32, total(weights) * (2 / 32))[:, 0]
    scale = from_table(x, weights)
    return nearest(x * _inverse(scale), grid), {"scales": scale.half().unsqueeze(0)}


def _iq4_xs(blocks: BlockColumns, grid: CodeRange) -> Found:
    x = blocks.groups(32)
    weights = x * x
    if blocks.importance is not None:
        weights = blocks.weights(32, total(blocks.x * blocks.x) * (2 / 256))
    scales = from_table(x.flatten(1), weights.flatten(1)).view(8, -1)
    unit = -signed_extreme(scales) / 32
    numbers = (_inverse(unit) * scales).round_().clamp_(-32, 31)
    codes = nearest(_inverse(unit * numbers) * x, grid)
    return _joined(codes), {"d": unit.half().unsqueeze(0), "scales": numbers.to(torch.int8)}


def _joined(groups: Tensor) -> Tensor:
    """Undo `BlockColumns.groups`."""
    return groups.transpose(0, 1).flatten(0, 1)


def _requantized(
    x: Tensor, step: Tensor, lowered: Tensor | None, codes: Tensor, grid: CodeRange
) -> Tensor:
    """Round again with the parameters as stored; a group without a step keeps its codes."""
    moved = x if lowered is None else x + lowered
    return _joined(
        torch.where(step == 0, codes, (moved / step).round_().clamp_(grid.low, grid.high))
    )


def _affine_k(blocks: BlockColumns, grid: CodeRange) -> Found:
    size, top = (16, 15) if grid.high == 3 else (32, 63)
    x = blocks.groups(size)
    if blocks.importance is not None:
        squares = total(blocks.x * blocks.x)
        weights = blocks.weights(size, (squares if grid.high == 3 else 2 * squares) / 256)
        steps = WITH_IMPORTANCE
    elif grid.high == 3:
        weights, steps = x.abs(), Steps(single(-0.5), single(0.1), 15, absolute=True)
    else:
        weights = root(total(x * x) / size) + x.abs()
        steps = Steps(-1.0, single(0.1), 20) if grid.high == 15 else Steps(-0.5, single(0.1), 15)
    fitted = affine(x.flatten(1), grid.high, weights.flatten(1), steps)
    scales, lowered, codes = (
        fitted[0].view(x.shape[1:]),
        fitted[1].view(x.shape[1:]),
        fitted[2].view(x.shape),
    )
    shares = total(weights) if blocks.importance is not None else None
    d, scales = _units(scales, top, shares)
    dmin, mins = _units(lowered, top, shares)
    codes = _requantized(x, d.float() * scales, dmin.float() * mins, codes, grid)
    numbers = {"scales": scales.to(torch.uint8), "mins": mins.to(torch.uint8)}
    return codes, {"d": d.unsqueeze(0), "dmin": dmin.unsqueeze(0), **numbers}


def _units(scales: Tensor, top: int, shares: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the float16 unit of ``scales`` ``[groups, blocks]`` and how many of it each is."""
    if shares is not None:
        unit, numbers = positive(scales, top, shares)
        return unit.half(), numbers
    most = scales.amax(0)
    most = torch.where(most > 0, most, 0.0)  # and never -0, which a clamp would keep
    numbers = (over(top, most) * scales).round_().clamp_(max=top)
    return (most / top).half(), torch.where(most > 0, numbers, 0.0)


def _q3_k(blocks: BlockColumns, grid: CodeRange) -> Found:
    x = blocks.groups(16)
    if blocks.importance is None:
        scales, codes = descended(x.flatten(1), 4)
        scales, codes = scales.view(16, -1), codes.view(x.shape)
        unit, numbers = _signed_units(scales, 32)
    else:
        weights = blocks.weights(16, 2 * total(blocks.x * blocks.x) / 256)
        scales, codes = symmetric(x.flatten(1), 4, weights.flatten(1))
        scales, codes = scales.view(16, -1), codes.view(x.shape)
        unit, numbers = symmetric(scales, 32, total(weights))
        unit = unit.half()
    codes = _requantized(x, unit.float() * numbers, None, codes, grid)
    return codes, {"d": unit.unsqueeze(0), "scales": numbers.to(torch.int8)}


def _q6_k(blocks: BlockColumns, grid: CodeRange) -> Found:
    x = blocks.groups(16)
    weights = x * x
    if blocks.importance is not None:
        weights = blocks.importance.view(-1, 16, x.shape[2]).transpose(0, 1)
    scales, codes = symmetric(x.flatten(1), 32, weights.flatten(1))
    scales, codes = scales.view(16, -1), codes.view(x.shape)
    unit, numbers = _signed_units(scales, 128)
    empty = scales.abs().amax(0) < EPSILON
    unit, numbers = torch.where(empty, 0.0, unit), torch.where(empty, 0.0, numbers)
    codes = torch.where(empty, -32.0, codes)
    codes = _requantized(x, unit.float() * numbers, None, codes, grid)
    return codes, {"d": unit.unsqueeze(0), "scales": numbers.to(torch.int8)}


def _signed_units(scales: Tensor, top: int) -> tuple[Tensor, Tensor]:
    inverse = over(-top, signed_extreme(scales))
    numbers = (inverse * scales).round_().clamp_(-top, top - 1)
    none = ~inverse.isfinite()
    return torch.where(none, 0.0, over(1, inverse)).half(), torch.where(none, -top, numbers)


_QUANTIZERS: Mapping[str, Callable[[BlockColumns, CodeRange], Found]] = {
    "q4_0": _symmetric_legacy,
    "q4_1": _affine_legacy,
    "q5_0": _symmetric_legacy,
    "q5_1": _affine_legacy,
    "q2_k": _affine_k,
    "q3_k": _q3_k,
    "q4_k": _affine_k,
    "q5_k": _affine_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
}
