"""8-bit floating point: e4m3 (without infinities) and e5m2, under a scale per tensor, row, group or tile.

A value is ``code * scale``; codes are numbers of torch's float8 types. The plain scale is ``absmax / max_value``, with
``max_value`` 448 for e4m3 and 57344 for e5m2. Codes are clamped before they are cast: ``absmax / scale`` can round to
more than ``max_value``, which a cast turns into NaN, infinity or ``max_value``, depending on the type and the machine.

The error of floating point is relative to each number, so that a smaller range gains nothing. ``search`` tries scales
from the plain one to twice it, so that the important numbers lie nearer to the grid. It gains little, and is skipped
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
from quantforge.packers import row_encoding as loops
from quantforge.packers.hessian_refit import RefitStep
from quantforge.packers.integer import SCALE_DTYPES, round_scales
from quantforge.packers.nearest_levels import look_up
from quantforge.packers.scale_search import search_levels
from quantforge.packers.tensor import KernelInputs, QuantizedTensor
from quantforge.scheme import Scheme

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SEARCH_FACTORS = tuple(2.0 ** (step / 8) for step in range(1, 9))


def max_value(grid: str) -> float:
    """Return the largest number of a grid."""
    return torch.finfo(DTYPES[grid]).max


def round_to_float8(values: Tensor, grid: str) -> Tensor:
    """Clamp ``values`` to the range of the grid and round them to its float8 type; NaN is not handled."""
    limit = max_value(grid)
    return values.clamp(-limit, limit).to(DTYPES[grid])


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose scales, of the scheme's `parameter_shape`, for ``weight`` ``[out, in]``; see `Packer`.

    Raises:
        InputError: a scale is beyond the largest number of its stored type.
    """
    dtype = SCALE_DTYPES[scheme.scale or ScaleType.F32]
    scales = round_scales(_absmax(weight, scheme) / max_value(scheme.grid), dtype)
    if search and not isinstance(scheme.granularity, PerTensor):
        groups = _split_scale_groups(weight, scheme)
        weights = (
            None
            if importance is None
            else _split_scale_groups(importance.unsqueeze(0), scheme, False)
        )
        searched_scales = search_levels(
            groups,
            scales.float(),
            None if weights is None else weights[0],
            partial(round_values, grid=scheme.grid),
            partial(_round_trip, dtype),
            SEARCH_FACTORS,
        )
        scales = searched_scales.to(dtype)
    return {"scales": scales}


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes of ``weight`` ``[out, n]``, the given columns of the whole matrix, as float8."""
    max_code, scales = max_value(scheme.grid), parameters["scales"].float()
    has_compiled_loop = scheme.grid == "fp8_e4m3" and not isinstance(scheme.granularity, Tile)
    if has_compiled_loop and loops.supports(weight, columns):
        return loops.encode_e4m3(weight, scales.expand(len(weight), -1))
    codes = torch.empty(weight.shape, dtype=DTYPES[scheme.grid], device=weight.device)
    for rows in loops.row_chunks(weight):
        scaled = weight[rows] / _broadcast_scales(scales, scheme, columns, rows, weight.shape[1])
        codes[rows] = scaled.clamp_(-max_code, max_code)
    return codes


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return ``code * scale`` in float32; ``columns`` as in `encode`."""
    all_rows = slice(0, len(codes))
    scales, granularity = parameters["scales"].float(), scheme.granularity
    if (
        isinstance(granularity, Tile)
        and columns is None
        and not codes.shape[1] % granularity.columns
    ):
        return _multiply_tiles(to_float32(codes), scales, granularity)
    return to_float32(codes).mul_(
        _broadcast_scales(scales, scheme, columns, all_rows, codes.shape[1])
    )


def _multiply_tiles(values: Tensor, scales: Tensor, tile: Tile) -> Tensor:
    """Multiply whole rows in place with the scales of their tiles; the last tiles may have fewer rows."""
    num_whole_tiles = len(values) // tile.rows
    values_parts = values[: num_whole_tiles * tile.rows], values[num_whole_tiles * tile.rows :]
    for values_part, part_scales, tile_rows in zip(
        values_parts,
        (scales[:num_whole_tiles], scales[num_whole_tiles:]),
        (tile.rows, 1),
        strict=True,
    ):
        if len(values_part):
            tiles = values_part.view(-1, tile_rows, scales.shape[1], tile.columns)
            tiles.mul_(part_scales[:, None, :, None])
    return values


def round_values(values: Tensor, grid: str) -> Tensor:
    """Round ``values`` to the grid as `round_to_float8` does, and return them in float32."""
    return to_float32(round_to_float8(values, grid))


def to_float32(codes: Tensor) -> Tensor:
    """Return ``codes.float()``, on a CPU five times as fast as torch."""
    code_bytes = codes.view(torch.uint8)
    if (
        code_bytes.device.type == "cpu"
        and code_bytes.is_contiguous()
        and code_bytes.shape[-1:].numel() % 2 == 0
    ):
        pairs = torch.empty(code_bytes.shape, dtype=torch.float32)
        numpy.take(
            _byte_pair_values(codes.dtype),
            code_bytes.numpy().view(numpy.uint16),
            out=pairs.numpy().view(numpy.int64),
            mode="clip",
        )
        return pairs
    return look_up(_byte_values(codes.dtype), code_bytes)


@cache
def _byte_values(dtype: torch.dtype) -> Tensor:
    """Return the float value of each byte."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


@cache
def _byte_pair_values(dtype: torch.dtype) -> NDArray[numpy.int64]:
    """Return the two float values of each pair of bytes, side by side as they lie in memory."""
    values = _byte_values(dtype)
    first, second = values.expand(256, 256), values[:, None].expand(256, 256)
    return torch.stack((first, second), -1).contiguous().numpy().view(numpy.int64).reshape(-1)


def _round_trip(dtype: torch.dtype, scales: Tensor) -> Tensor:
    return scales.to(dtype).float()


def _absmax(weight: Tensor, scheme: Scheme) -> Tensor:
    if isinstance(scheme.granularity, PerTensor):
        return loops.group_absmax(weight, 1).amax().view(1, 1)
    groups = scheme.groups(weight.shape[1])
    row_absmax = loops.group_absmax(weight, groups)
    if isinstance(scheme.granularity, Tile):
        tile_rows = scheme.granularity.rows
        padded = torch.nn.functional.pad(row_absmax, (0, 0, 0, -len(row_absmax) % tile_rows))
        return padded.view(-1, tile_rows, groups).amax(1)
    return row_absmax


def _split_scale_groups(weight: Tensor, scheme: Scheme, repeat_rows: bool = True) -> Tensor:
    """Return ``[rows, groups, size]``, with all weights that share a scale along the last dimension.

    With ``repeat_rows`` False, ``weight`` is one row of column weights, which is repeated for each row of a tile.
    """
    columns = weight.shape[1]
    groups = weight.reshape(len(weight), scheme.groups(columns), -1)
    if not isinstance(scheme.granularity, Tile):
        return groups
    tile_rows = scheme.granularity.rows
    if not repeat_rows:
        return groups.unsqueeze(2).expand(-1, -1, tile_rows, -1).flatten(2)
    padded = torch.nn.functional.pad(groups, (0, 0, 0, 0, 0, -len(weight) % tile_rows))
    tiles = padded.view(-1, tile_rows, *padded.shape[1:]).transpose(1, 2)
    return tiles.flatten(2)


def _broadcast_scales(
    scales: Tensor, scheme: Scheme, columns: slice | None, rows: slice, num_columns: int
) -> Tensor:
    """Return scales that broadcast over the given rows and columns (``num_columns`` of them)."""
    if isinstance(scheme.granularity, PerTensor):
        return scales
    if isinstance(scheme.granularity, Row):
        return scales[rows]
    size = scheme.group_size(0)
    column_range = columns or slice(0, num_columns)
    first_group, last_group = column_range.start // size, (column_range.stop - 1) // size
    if isinstance(scheme.granularity, PerGroup):
        row_scales = scales[rows]
    else:
        row_indices = torch.arange(rows.start, rows.stop, device=scales.device)
        row_scales = scales[row_indices // scheme.granularity.rows]
    if first_group == last_group:
        return row_scales[:, first_group : first_group + 1]
    return row_scales[
        :, torch.arange(column_range.start, column_range.stop, device=scales.device) // size
    ]


def column_grid(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> None:
    """Return None: quantizers call `encode` for each column."""


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:  # noqa: ARG001
    """Return no steps: scales stay as they were fitted."""
    return ()


def kernel_inputs(tensor: QuantizedTensor) -> KernelInputs:
    """Return the tensor as the kernels take it."""
    grid = {"fp8_e4m3": "fp8", "fp8_e5m2": "e5m2"}[tensor.scheme.grid]
    return KernelInputs(grid, tensor.codes.view(torch.uint8), dict(tensor.parameters))
