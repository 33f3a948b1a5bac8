"""The innermost loops of GPTQ and of its refinement on a CPU, compiled by numba, for uniform integer grids.

Both go over the columns of a strip in turn, each changing those after it. In torch that is a dozen small operations for
every column of every matrix; here a tile of rows stays in a core's cache until all columns of the strip are done. Rows
do not see each other, and each is worked off in the order of its columns: the result depends on neither tiles nor
threads. Compiling takes seconds, which pays from `COMPILED_FROM` weights on; the shape alone decides which loops run.

Everything is float32 ``[columns, rows]``: neighbours in memory are rows, and each step is vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from quantforge.packers.integer import code_range
from quantforge.quantizers import COMPILED_FROM
from quantforge.scheme import PerGroup, PerTensor, Scheme

TILE = 256  # rows


class Points(NamedTuple):
    """The grid of a strip: ``(code - zero) * scale`` with ``low <= code <= high``."""

    scales: Tensor  # [columns, rows]
    zeros: Tensor  # [columns, rows], 0 where the grid has none
    low: float
    high: float


def applies(weight: Tensor, scheme: Scheme) -> bool:
    """Whether these loops are for a matrix."""
    return (
        weight.device.type == "cpu"
        and weight.numel() >= COMPILED_FROM
        and scheme.integer
        and not isinstance(scheme.granularity, PerTensor)
    )


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points:
    """Gather the float32 parameters (``[rows, groups]``) of some ``columns``."""
    groups = (
        columns // scheme.granularity.size
        if isinstance(scheme.granularity, PerGroup)
        else columns * 0
    )
    scales = parameters["scales"].T[groups]
    zeros = parameters["zeros"].T[groups] if "zeros" in parameters else torch.zeros_like(scales)
    low, high = code_range(scheme)
    return Points(scales, zeros, float(low), float(high))


def round_strip(
    error: Tensor, pull: Tensor, triangle: Tensor, grid: Points, terms: Tensor
) -> Tensor:
    """Round a strip as `feedback` does: ``error`` and ``terms`` are filled, ``pull`` is used up.

    Returns:
        Codes, float32 ``[columns, rows]``.
    """
    codes = torch.empty_like(error)
    arrays = (error, pull, triangle.contiguous(), grid.scales, grid.zeros, terms, codes)
    _compiled().round(*(item.numpy() for item in arrays), *_limits(grid))
    return codes


def improve_strip(
    gradient: Tensor, hessian: Tensor, weight: Tensor, error: Tensor, grid: Points
) -> tuple[Tensor, Tensor, Tensor]:
    """Move each code of a strip to its best point as `refine` does: ``error`` is updated, ``gradient`` used up.

    Returns:
        Codes and changes of the values, float32 ``[columns, rows]``; by how much the error fell, float64 ``[rows]``.
    """
    codes, change = torch.empty_like(error), torch.empty_like(error)
    gained = torch.zeros(error.shape[1], dtype=torch.float64)
    arrays = (gradient, hessian.contiguous(), weight, error, grid.scales, grid.zeros, codes, change)
    _compiled().improve(*(item.numpy() for item in (*arrays, gained)), *_limits(grid))
    return codes, change, gained


def _limits(grid: Points) -> tuple[Any, Any]:
    return numpy.float32(grid.low), numpy.float32(grid.high)


class _Loops(NamedTuple):
    round: Callable[..., None]
    improve: Callable[..., None]


@cache
def _compiled() -> _Loops:
    import numba

    jit = numba.njit(nogil=True, error_model="numpy")
    return _Loops(jit(_round), jit(_improve))


def _round(error, pull, triangle, scales, zeros, terms, codes, low, high):  # type: ignore[no-untyped-def]
    columns, rows = error.shape
    left = numpy.empty(TILE, numpy.float32)
    for first in range(0, rows, TILE):
        last = min(first + TILE, rows)
        for j in range(columns):
            pivot = triangle[j, j]
            inverse = numpy.float32(1) / pivot
            mine, moved = error[j, first:last], pull[j, first:last]
            scale, zero = scales[j, first:last], zeros[j, first:last]
            term, code = terms[j, first:last], codes[j, first:last]
            for row in range(last - first):
                target = mine[row] + moved[row] * inverse
                point = numpy.rint(target / scale[row]) + zero[row]
                point = low if point < low else point
                point = high if point > high else point
                value = (point - zero[row]) * scale[row]
                term[row] = (target - value) * pivot
                left[row] = mine[row] - value
                mine[row] = left[row]
                code[row] = point
            for k in range(j + 1, columns):
                factor, later = triangle[j, k], pull[k, first:last]
                for row in range(last - first):
                    later[row] += factor * left[row]


def _improve(gradient, hessian, weight, error, scales, zeros, codes, change, gained, low, high):  # type: ignore[no-untyped-def]
    columns, rows = error.shape
    step = numpy.empty(TILE, numpy.float32)
    for first in range(0, rows, TILE):
        last = min(first + TILE, rows)
        for j in range(columns):
            pivot = hessian[j, j]
            inverse = numpy.float32(1) / pivot
            slope, original = gradient[j, first:last], weight[j, first:last]
            wrong, fallen = error[j, first:last], gained[first:last]
            scale, zero = scales[j, first:last], zeros[j, first:last]
            code, changed = codes[j, first:last], change[j, first:last]
            for row in range(last - first):
                value = original[row] - wrong[row]
                target = value + slope[row] * inverse
                point = numpy.rint(target / scale[row]) + zero[row]
                point = low if point < low else point
                point = high if point > high else point
                moved = (point - zero[row]) * scale[row]
                step[row] = moved - value
                changed[row] = step[row]
                wrong[row] = original[row] - moved
                code[row] = point
                fallen[row] += step[row] * (numpy.float32(2) * slope[row] - pivot * step[row])
            for k in range(j + 1, columns):
                factor, later = hessian[j, k], gradient[k, first:last]
                for row in range(last - first):
                    later[row] -= factor * step[row]
