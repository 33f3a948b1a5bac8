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

LANES = 64  # rows or groups that compiled loops compute side by side: a panel
MAX_THRESHOLDS = 15  # between the values of a table


@dataclass(frozen=True, slots=True)
class CodeRange:
    """The codes of a type, ``low..high``, and what they stand for: themselves, or entries of ``values``."""

    low: int
    high: int
    values: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the codes."""
        return torch.int8 if self.low < 0 else torch.uint8


CODE_RANGES: Mapping[str, CodeRange] = {
    key: CodeRange(*block.codes) for key, block in GGML_BLOCKS.items() if block.vector == 1
}
# Of the integers that scales and minima of groups are.
SCALE_RANGES: Mapping[str, CodeRange] = {
    key: CodeRange(*block.units)
    for key, block in GGML_BLOCKS.items()
    if block.vector == 1 and block.units is not None
}


def group_steps(parameters: Mapping[str, Tensor], grid: str) -> tuple[Tensor, Tensor | None]:
    """Return step and offset of each group, float32 ``[rows, groups]``; no offset of a symmetric grid."""
    if grid == "mxfp4":
        return decode_half_e8m0(parameters["exponents"]), None
    scales = parameters["scales"].float()
    mins = parameters["mins"].float() if "mins" in parameters else None
    if "d" not in parameters:
        return scales, mins
    scales = _multiply_units(parameters["d"], scales)
    return scales, None if mins is None else -_multiply_units(parameters["dmin"], mins)


def _multiply_units(unit: Tensor, numbers: Tensor) -> Tensor:
    spread = numbers.reshape(*unit.shape, -1)
    return (unit.float().unsqueeze(-1) * spread).flatten(-2)


def decode_half_e8m0(exponents: Tensor) -> Tensor:
    """Return ``2^(e - 128)`` of each byte, half of what e8m0 stands for, as ggml has it; subnormal where it must be."""
    numbers = exponents.to(torch.int32)
    bits = torch.where(numbers < 2, 0x00200000 << numbers.clamp(max=1), (numbers - 1) << 23)
    return bits.view(torch.float32)


def column_steps(
    parameters: Mapping[str, Tensor], grid: str, columns: slice | None
) -> tuple[Tensor, Tensor | None]:
    """Return step and offset ``[rows, columns]`` of the run ``columns``; ``[rows, 1]`` inside of one group."""
    block = GGML_BLOCKS[grid]
    if columns is None:
        step, offset = group_steps(parameters, grid)
        return _repeat_columns(step, block.group), None if offset is None else _repeat_columns(
            offset, block.group
        )
    first, last = columns.start // block.columns, (columns.stop - 1) // block.columns + 1
    groups = block.columns // block.group
    if (columns.stop - 1) // block.group == columns.start // block.group:
        place = columns.start // block.group
        runs = {"d": (first, first + 1), "dmin": (first, first + 1)}
        run = {
            key: value[:, slice(*runs.get(key, (place, place + 1)))]
            for key, value in parameters.items()
        }
        return group_steps(run, grid)
    runs = {"d": (first, last), "dmin": (first, last)}
    run = {
        key: value[:, slice(*runs.get(key, (first * groups, last * groups)))]
        for key, value in parameters.items()
    }
    step, offset = group_steps(run, grid)
    inside = slice(columns.start - first * block.columns, columns.stop - first * block.columns)
    step = _repeat_columns(step, block.group)[:, inside]
    return step, None if offset is None else _repeat_columns(offset, block.group)[:, inside]


def split_groups(columns: Tensor, size: int) -> Tensor:
    """View ``[panels, columns, rows]`` as ``[panels, groups, size, rows]``."""
    return columns.view(len(columns), -1, size, columns.shape[2])


def _repeat_columns(parameter: Tensor, size: int) -> Tensor:
    return parameter.repeat_interleave(size, dim=1)


def nearest_codes(ratio: Tensor, grid: CodeRange) -> Tensor:
    """Return the codes whose values are nearest to ``ratio``; of two as near, as ggml chooses."""
    if grid.values is None:
        return ratio.round().clamp_(grid.low, grid.high).to(grid.dtype)
    middles, codes = (part.to(ratio.device) for part in code_table(grid))
    return codes[torch.bucketize(ratio.contiguous(), middles, right=True)]


@cache
def code_table(grid: CodeRange) -> tuple[Tensor, Tensor]:
    """Return midpoints between the sorted values, and the codes in that order; of equal values the first code."""
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
    """Return the least and the greatest value; of a table also the thresholds and the rise of the value at each."""
    if grid.values is None:
        return numpy.float32(grid.low), numpy.float32(grid.high), None, None
    values = numpy.array(sorted(set(grid.values)), numpy.float32)
    middles = numpy.full(MAX_THRESHOLDS, numpy.inf, numpy.float32)
    rises = numpy.zeros(MAX_THRESHOLDS, numpy.float32)
    middles[: len(values) - 1] = (values[1:] + values[:-1]) / numpy.float32(2)
    rises[: len(values) - 1] = numpy.diff(values)
    return values[0], values[-1], middles, rises


def code_thresholds(grid: CodeRange) -> tuple[Any, ...]:
    """Return `value_thresholds` with the codes in the place of the values."""
    low, high, middles, rises = value_thresholds(grid)
    if grid.values is not None:
        first = {value: code for code, value in reversed([*enumerate(grid.values)])}
        codes = numpy.array([first[value] for value in sorted(first)], numpy.float32)
        low = codes[0]
        rises[: len(codes) - 1] = numpy.diff(codes)
    return low, high, middles, rises
