"""8-bit floating point: e4m3 (without infinities) and e5m2, under a scale per tensor, row, group or tile.

A value is ``code * scale``; codes are numbers of torch's float8 types. The plain scale is ``absmax / largest``, with
``largest`` 448 for e4m3 and 57344 for e5m2. Codes are clamped before they are cast: ``absmax / scale`` can round to
more than ``largest``, which a cast makes NaN, infinity or ``largest``, depending on the type and the machine.

The error of floating point is relative to each number, so that a smaller range gains nothing. ``search`` tries scales
from the plain one to twice it, so that the numbers that matter lie nearer to the grid. It gains little, and is not done
for one scale per matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.grids import PerGroup, PerTensor, Row, ScaleType, Tile
from quantforge.packers import Points
from quantforge.packers import row_encoding as loops
from quantforge.packers.hessian_refit import Refit
from quantforge.packers.integer import SCALE_DTYPES, stored
from quantforge.packers.nearest_levels import look_up
from quantforge.packers.scale_search import search_levels
from quantforge.packers.tensor import KernelTerms, QuantizedTensor
from quantforge.scheme import Scheme

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FACTORS = tuple(2.0 ** (step / 8) for step in range(1, 9))


def largest(grid: str) -> float:
    """Return the largest number of a grid."""
    return torch.finfo(DTYPES[grid]).max


def cast(values: Tensor, grid: str) -> Tensor:
    """Clamp ``values`` to the range of the grid and round them to it; NaN is not handled."""
    limit = largest(grid)
    return values.clamp(-limit, limit).to(DTYPES[grid])


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose scales, of the scheme's `parameter_shape`, for ``weight`` ``[out, in]``; see `Packer`.

    Raises:
        InputError: a scale is beyond the largest number of its stored type.
    """
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F32]
    scales = stored(_absmax(weight, scheme) / largest(scheme.grid), dtype)
    if search and not isinstance(scheme.granularity, PerTensor):
        groups = _grouped(weight, scheme)
        weights = None if importance is None else _grouped(importance.unsqueeze(0), scheme, False)
        found = search_levels(
            groups,
            scales.float(),
            None if weights is None else weights[0],
            partial(rounded, grid=scheme.grid),
            partial(_as_stored, dtype),
            FACTORS,
        )
        scales = found.to(dtype)
    return {"scales": scales}


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes of ``weight`` ``[out, n]``, the run ``columns`` of the matrix, as float8."""
    limit, scales = largest(scheme.grid), parameters["scales"].float()
    known = scheme.grid == "fp8_e4m3" and not isinstance(scheme.granularity, Tile)
    if known and loops.suits(weight, columns):
        return loops.e4m3(weight, scales.expand(len(weight), -1))
    codes = torch.empty(weight.shape, dtype=DTYPES[scheme.grid], device=weight.device)
    for rows in loops.chunks(weight):
        scaled = weight[rows] / _spread(scales, scheme, columns, rows, weight.shape[1])
        codes[rows] = scaled.clamp_(-limit, limit)
    return codes


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return ``code * scale`` in float32; ``columns`` as in `encode`."""
    every = slice(0, len(codes))
    scales, tile = parameters["scales"].float(), scheme.granularity
    if isinstance(tile, Tile) and columns is None and not codes.shape[1] % tile.columns:
        return _scaled_tiles(widened(codes), scales, tile)
    return widened(codes).mul_(_spread(scales, scheme, columns, every, codes.shape[1]))


def _scaled_tiles(values: Tensor, scales: Tensor, tile: Tile) -> Tensor:
    """Multiply whole rows in place by the scales of their tiles, of which the last may have fewer rows."""
    whole = len(values) // tile.rows
    parts = values[: whole * tile.rows], values[whole * tile.rows :]
    for part, of_part, high in zip(
        parts, (scales[:whole], scales[whole:]), (tile.rows, 1), strict=True
    ):
        if len(part):
            tiles = part.view(-1, high, scales.shape[1], tile.columns)
            tiles.mul_(of_part[:, None, :, None])
    return values


def rounded(values: Tensor, grid: str) -> Tensor:
    """Return the float32 numbers of the grid that ``values`` are rounded to, as `cast` rounds."""
    return widened(cast(values, grid))


def widened(codes: Tensor) -> Tensor:
    """Return ``codes.float()``, on a CPU in a fifth of the time that torch takes."""
    octets = codes.view(torch.uint8)
    if (
        octets.device.type == "cpu"
        and octets.is_contiguous()
        and octets.shape[-1:].numel() % 2 == 0
    ):
        pairs = torch.empty(octets.shape, dtype=torch.float32)
        numpy.take(
            _pairs(codes.dtype),
            octets.numpy().view(numpy.uint16),
            out=pairs.numpy().view(numpy.int64),
            mode="clip",
        )
        return pairs
    return look_up(_numbers(codes.dtype), octets)


@cache
def _numbers(dtype: torch.dtype) -> Tensor:
    """Return the number of each bit pattern."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


@cache
def _pairs(dtype: torch.dtype) -> NDArray[numpy.int64]:
    """Return the two numbers of each two bit patterns, as they lie in memory."""
    numbers = _numbers(dtype)
    first, second = numbers.expand(256, 256), numbers[:, None].expand(256, 256)
    return torch.stack((first, second), -1).contiguous().numpy().view(numpy.int64).reshape(-1)


def _as_stored(dtype: torch.dtype, scales: Tensor) -> Tensor:
    return scales.to(dtype).float()


def _absmax(weight: Tensor, scheme: Scheme) -> Tensor:
    if isinstance(scheme.granularity, PerTensor):
        return loops.peaks(weight, 1).amax().view(1, 1)
    groups = scheme.groups(weight.shape[1])
    rows = loops.peaks(weight, groups)
    if isinstance(scheme.granularity, Tile):
        high = scheme.granularity.rows
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % high))
        return padded.view(-1, high, groups).amax(1)
    return rows


def _grouped(weight: Tensor, scheme: Scheme, tall: bool = True) -> Tensor:
    """Return ``[rows, groups, size]``: what shares a scale lies along the last dimension.

    With ``tall`` False, ``weight`` is one row of column weights, which is repeated for the rows of a tile.
    """
    columns = weight.shape[1]
    groups = weight.reshape(len(weight), scheme.groups(columns), -1)
    if not isinstance(scheme.granularity, Tile):
        return groups
    high = scheme.granularity.rows
    if not tall:
        return groups.unsqueeze(2).expand(-1, -1, high, -1).flatten(2)
    padded = torch.nn.functional.pad(groups, (0, 0, 0, 0, 0, -len(weight) % high))
    tiles = padded.view(-1, high, *padded.shape[1:]).transpose(1, 2)
    return tiles.flatten(2)


def _spread(
    scales: Tensor, scheme: Scheme, columns: slice | None, rows: slice, width: int
) -> Tensor:
    """Return scales that broadcast over rows ``rows`` and the run ``columns`` (``width`` of them)."""
    if isinstance(scheme.granularity, PerTensor):
        return scales
    if isinstance(scheme.granularity, Row):
        return scales[rows]
    size = scheme.group_size(0)
    run = columns or slice(0, width)
    first, last = run.start // size, (run.stop - 1) // size
    if isinstance(scheme.granularity, PerGroup):
        chosen = scales[rows]
    else:
        index = torch.arange(rows.start, rows.stop, device=scales.device)
        chosen = scales[index // scheme.granularity.rows]
    if first == last:
        return chosen[:, first : first + 1]
    return chosen[:, torch.arange(run.start, run.stop, device=scales.device) // size]


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points | None:  # noqa: ARG001
    """Return None: rounders call `encode` for every column."""
    return None


def refits(scheme: Scheme, in_features: int) -> Sequence[Refit]:  # noqa: ARG001
    """Return nothing: scales stay as they are fitted."""
    return ()


def kernel_terms(tensor: QuantizedTensor) -> KernelTerms:
    """Return a tensor in the terms of the kernels."""
    grid = {"fp8_e4m3": "fp8", "fp8_e5m2": "e5m2"}[tensor.scheme.grid]
    return KernelTerms(grid, tensor.codes.view(torch.uint8), dict(tensor.parameters))
