"""Values that the codes of each type stand for: ``step * v(code) + offset``, and the nearest code of a value.

The arithmetic is that of ggml in float32: ``d * scale`` is rounded, then its product with the value, then the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

from quantforge.grids import GGML_BLOCKS

LANES = 64  # rows or groups that compiled loops compute side by side (a panel)
MAX_THRESHOLDS = 15  # thresholds between the 16 values of a table


@dataclass(frozen=True, slots=True)
class CodeRange:
    """The codes of a type, ``low..high``, and the numbers they stand for: themselves, or entries of ``values``."""

    low: int
    high: int
    values: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the codes."""
        return torch.int8 if self.low < 0 else torch.uint8


CODE_RANGES: Mapping[str, CodeRange] = {
    key: CodeRange(*block.codes)
    for key, block in GGML_BLOCKS.items()
    if block.weights_per_code == 1
}
# Ranges of the integer scales and minima of groups.
SCALE_RANGES: Mapping[str, CodeRange] = {
    key: CodeRange(*block.units)
    for key, block in GGML_BLOCKS.items()
    if block.weights_per_code == 1 and block.units is not None
}


def group_steps(parameters: Mapping[str, Tensor], grid: str) -> tuple[Tensor, Tensor | None]:
    """Return step and offset of each group, float32 ``[rows, groups]``; the offset of a symmetric grid is None."""
    if grid == "mxfp4":
        return decode_half_e8m0(parameters["exponents"]), None
    scales = parameters["scales"].float()
    mins = parameters["mins"].float() if "mins" in parameters else None
    if "d" not in parameters:
        return scales, mins
    scales = _multiply_units(parameters["d"], scales)
    return scales, None if mins is None else -_multiply_units(parameters["dmin"], mins)


def _multiply_units(unit: Tensor, integers: Tensor) -> Tensor:
    per_block = integers.reshape(*unit.shape, -1)
    return (unit.float().unsqueeze(-1) * per_block).flatten(-2)


def decode_half_e8m0(exponents: Tensor) -> Tensor:
    """Return ``2^(e - 128)`` for each byte ``e``, half the value of e8m0, as ggml does; subnormal for small ``e``."""
    values = exponents.to(torch.int32)
    bits = torch.where(values < 2, 0x00200000 << values.clamp(max=1), (values - 1) << 23)
    return bits.view(torch.float32)


def column_steps(
    parameters: Mapping[str, Tensor], grid: str, columns: slice | None
) -> tuple[Tensor, Tensor | None]:
    """Return step and offset ``[rows, n]`` of the given columns, or ``[rows, 1]`` if they lie in one group."""
    block = GGML_BLOCKS[grid]
    if columns is None:
        step, offset = group_steps(parameters, grid)
        return _repeat_columns(step, block.group_size), None if offset is None else _repeat_columns(
            offset, block.group_size
        )
    first_block = columns.start // block.columns
    last_block = (columns.stop - 1) // block.columns + 1
    groups = block.columns // block.group_size
    if (columns.stop - 1) // block.group_size == columns.start // block.group_size:
        group_index = columns.start // block.group_size
        block_ranges = {"d": (first_block, first_block + 1), "dmin": (first_block, first_block + 1)}
        selected = {
            key: value[:, slice(*block_ranges.get(key, (group_index, group_index + 1)))]
            for key, value in parameters.items()
        }
        return group_steps(selected, grid)
    block_ranges = {"d": (first_block, last_block), "dmin": (first_block, last_block)}
    selected = {
        key: value[:, slice(*block_ranges.get(key, (first_block * groups, last_block * groups)))]
        for key, value in parameters.items()
    }
    step, offset = group_steps(selected, grid)
    inner_columns = slice(
        columns.start - first_block * block.columns, columns.stop - first_block * block.columns
    )
    step = _repeat_columns(step, block.group_size)[:, inner_columns]
    return step, None if offset is None else _repeat_columns(offset, block.group_size)[
        :, inner_columns
    ]


def split_groups(columns: Tensor, size: int) -> Tensor:
    """View ``[panels, columns, rows]`` as ``[panels, groups, size, rows]``."""
    return columns.view(len(columns), -1, size, columns.shape[2])


def _repeat_columns(parameter: Tensor, size: int) -> Tensor:
    return parameter.repeat_interleave(size, dim=1)


def nearest_codes(ratio: Tensor, grid: CodeRange) -> Tensor:
    """Return the codes whose values are nearest to ``ratio``; ties are resolved as ggml does."""
    if grid.values is None:
        return ratio.round().clamp_(grid.low, grid.high).to(grid.dtype)
    thresholds, codes = (array.to(ratio.device) for array in code_table(grid))
    return codes[torch.bucketize(ratio.contiguous(), thresholds, right=True)]


@cache
def code_table(grid: CodeRange) -> tuple[Tensor, Tensor]:
    """Return the midpoints between the sorted values, and the codes in that order; of equal values the first code."""
    assert grid.values is not None
    ordered = sorted({value: code for code, value in reversed([*enumerate(grid.values)])}.items())
    values = torch.tensor([value for value, _ in ordered], dtype=torch.float32)
    codes = torch.tensor([code for _, code in ordered], dtype=grid.dtype)
    return (values[1:] + values[:-1]) / 2, codes


def decode_values(codes: Tensor, grid: CodeRange) -> Tensor:
    """Return the values that the codes stand for, in units of the step, float32."""
    if grid.values is None:
        return codes.float()
    return torch.tensor(grid.values, dtype=torch.float32, device=codes.device)[codes.int()]


def value_thresholds(grid: CodeRange) -> tuple[Any, ...]:
    """Return the smallest and the largest value, and for a table the thresholds and the value's increment at each."""
    if grid.values is None:
        return numpy.float32(grid.low), numpy.float32(grid.high), None, None
    values = numpy.array(sorted(set(grid.values)), numpy.float32)
    thresholds = numpy.full(MAX_THRESHOLDS, numpy.inf, numpy.float32)
    increments = numpy.zeros(MAX_THRESHOLDS, numpy.float32)
    thresholds[: len(values) - 1] = (values[1:] + values[:-1]) / numpy.float32(2)
    increments[: len(values) - 1] = numpy.diff(values)
    return values[0], values[-1], thresholds, increments


def code_thresholds(grid: CodeRange) -> tuple[Any, ...]:
    """Return `value_thresholds` with codes instead of values."""
    low, high, thresholds, increments = value_thresholds(grid)
    if grid.values is not None:
        first_code = {value: code for code, value in reversed([*enumerate(grid.values)])}
        codes = numpy.array([first_code[value] for value in sorted(first_code)], numpy.float32)
        low = codes[0]
        increments[: len(codes) - 1] = numpy.diff(codes)
    return low, high, thresholds, increments
