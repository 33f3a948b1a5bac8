"""Innermost loops of GPTQ and of its refinement, over the columns of a chunk: each column updates the following ones.

A chunk is processed in one of three ways, depending on its packer:

- If the packer returns `ColumnGrid`, on a CPU: loops in numpy or, for large matrices, compiled by numba
  (`column_kernels`). In torch each column takes a dozen small operations, most of which cost more to call than to
  compute. The compiled loops keep a tile of rows in a core's cache until all columns of the chunk are done, and are two
  to five times as fast, but compiling takes seconds in each process, which pays off from `COMPILED_FROM` weights. Both
  do the same float32 arithmetic and give identical bits (a test compares them); the numpy version is easier to read.
- If a code represents several columns, they are rounded together, as a vector. With ``H + diag(ridge) = R R^T`` (see
  `hessian`) the terms of the columns ``B`` of a vector are ``E_B R_BB + P``, where ``P`` comes from the errors of
  earlier columns. They are smallest for the code vector ``q`` nearest to the target ``t = w + P R_BB^-1`` under the
  distance ``|(t - q) R_BB|``: the same as for one column, with a triangle in place of its pivot (vectors in GPTVQ,
  van Baalen et al., arXiv 2402.15319; BlockLDLQ in QuIP#, Tseng et al., arXiv 2402.04396). In a sweep of the refinement
  the target is ``q + G_B H_BB^-1``, and the distance ``|(t - q) L|`` with ``H_BB = L L^T``.
- Otherwise the packer encodes and decodes one column after the other.

Rows are independent, and the columns of each are processed in order: the result depends on neither tiles nor threads.
All arrays are float32 ``[columns, rows]``: rows are the innermost dimension, so that each step is vectorized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.numerics import COMPILED_FROM
from quantforge.numerics.products import matmul
from quantforge.numerics.threads import one_thread
from quantforge.packers import ColumnGrid, VectorPacker, get_packer
from quantforge.scheme import Scheme

Array = NDArray[Any]  # float32 [columns, rows] unless stated otherwise
_ONE, _TWO = numpy.float32(1), numpy.float32(2)


class Loops(NamedTuple):
    """The two loops for columns with `ColumnGrid`, in numpy or compiled."""

    round: Callable[..., None]
    improve: Callable[..., None]


def loops_for(weight: Tensor) -> Loops | None:
    """Return the loops for a matrix; None if it is not on a CPU."""
    if weight.device.type != "cpu":
        return None
    if weight.numel() < COMPILED_FROM:
        return Loops(round_points, improve_points)
    from quantforge.quantizers.gptq import column_kernels  # numba takes a moment to import

    return Loops(column_kernels.round_points, column_kernels.improve_points)


def column_major(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 copies of parameters in which each column is contiguous, as the loops require."""
    return {
        key: value.to(torch.float32, copy=True).T.contiguous().T
        for key, value in parameters.items()
    }


def round_chunk(
    loops: Loops | None,
    remaining: Tensor,
    compensation: Tensor,
    triangle: Tensor,
    columns: Tensor,
    terms: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> Tensor:
    """Round the columns of a chunk in order, each to minimize its own term of the error.

    Args:
        loops: as `loops_for` returns them.
        remaining: weights ``[columns, rows]``; replaced by their errors, column after column.
        compensation: sum of the terms due to errors of earlier columns, ``[columns, rows]``; overwritten.
        triangle: block of ``R``, ``[columns, columns]``.
        columns: indices of the columns in the matrix, int64.
        terms: filled with ``E R``.
        parameters: parameters of the whole matrix, as `column_major` returns them.
        scheme: scheme of the matrix.

    Returns:
        Codes ``[rows, columns]``; one per code vector.
    """
    grid = get_packer(scheme).column_grid(parameters, scheme, columns) if loops else None
    if loops is not None and grid is not None:
        codes = torch.empty_like(remaining)
        arrays = (remaining, compensation, triangle.contiguous(), terms, codes)
        loops.round(*(item.numpy() for item in arrays), *_to_numpy(grid))
        return codes.to(grid.dtype).T
    round_function = (
        _round_one_by_one if GRIDS[scheme.grid].weights_per_code == 1 else _round_vectors
    )
    return torch.cat(
        round_function(
            remaining, compensation, triangle, columns.tolist(), terms, parameters, scheme
        ),
        1,
    )


def improve_chunk(
    loops: Loops | None,
    gradient_rows: Tensor,
    hessian: Tensor,
    weight: Tensor,
    error: Tensor,
    first: int,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> tuple[Tensor, Tensor, Tensor]:
    """Update each code of a chunk in order to its best value, given all other codes.

    Args:
        loops: as `loops_for` returns them.
        gradient_rows: gradient ``G`` of the columns.
        hessian: Hessian of the columns, with the ridge, ``[columns, columns]``.
        weight: columns of the matrix.
        error: errors of these columns; updated.
        first: index of the first column in the matrix.
        parameters: parameters of the whole matrix, as `column_major` returns them.
        scheme: scheme of the matrix.

    Returns:
        Codes ``[columns, rows]`` (one per code vector), changes of the values, and the decrease of the error of each
        row, float64 ``[rows]``.
    """
    columns = torch.arange(first, first + len(gradient_rows))
    grid = get_packer(scheme).column_grid(parameters, scheme, columns) if loops else None
    if loops is not None and grid is not None:
        codes, change = torch.empty_like(error), torch.empty_like(error)
        error_decrease = torch.zeros(error.shape[1], dtype=torch.float64)
        arrays = (
            gradient_rows.clone(),
            hessian.contiguous(),
            weight,
            error,
            codes,
            change,
            error_decrease,
        )
        loops.improve(*(item.numpy() for item in arrays), *_to_numpy(grid))
        return codes.to(grid.dtype), change, error_decrease
    improved = _improve_one_by_one if GRIDS[scheme.grid].weights_per_code == 1 else _improve_vectors
    codes, change = improved(
        gradient_rows.clone(), hessian, weight, error, first, parameters, scheme
    )
    chunk_decrease = change * (2 * gradient_rows - matmul(hessian, change))
    return codes, change, chunk_decrease.sum(0, dtype=torch.float64)


def vector_target_offsets(terms: Tensor, root: Tensor, width: int) -> Tensor:
    """Return targets minus chosen values ``[in, out]``, given the terms of vectors of ``width`` columns."""
    offsets = torch.empty_like(terms)
    for start in range(0, len(terms), width):
        vector = slice(start, start + width)
        offsets[vector] = matmul(_inverse(root[vector, vector]).T, terms[vector])
    return offsets


# Grids with `ColumnGrid`, in numpy


def _to_numpy(grid: ColumnGrid) -> tuple[Any, ...]:
    table = None if grid.table is None else tuple(tensor.numpy() for tensor in grid.table)
    parameters = (tensor.numpy() for tensor in (grid.scales, grid.zeros, grid.offsets))
    return (*parameters, *(numpy.float32(limit) for limit in grid.limits), table)


class _ChunkPoints:
    """Grid points of all columns of a chunk; see `ColumnGrid`."""

    def __init__(
        self,
        scales: Array,
        zeros: Array,
        offsets: Array,
        low: Any,
        high: Any,
        table: tuple[Array, Array, Array] | None,
    ) -> None:
        self._steps, self._zeros, self._offsets = scales, zeros, offsets
        self._low, self._high, self._table = low, high, table
        # If the step is 0, all codes have the same value.
        self._divisors = numpy.where(scales == 0, _ONE, scales)

    def round_to_point(self, column: int, target: Array, code: Array, value: Array) -> None:
        """Fill in the code and the value of the grid point nearest to each ``target``."""
        offset, step = self._offsets[column], self._steps[column]
        numpy.subtract(target, offset, out=value)
        value /= self._divisors[column]
        if self._table is None:
            zero = self._zeros[column]
            numpy.rint(value, out=code)
            code += zero
            numpy.maximum(code, self._low, out=code)
            numpy.minimum(code, self._high, out=code)
            numpy.subtract(code, zero, out=value)
        else:
            middles, values, codes = self._table
            nearest = numpy.searchsorted(middles, value, side="right")
            value[:], code[:] = values[nearest], codes[nearest]
        value *= step
        value += offset


def round_points(
    error: Array, compensation: Array, triangle: Array, terms: Array, codes: Array, *grid: Any
) -> None:
    """Round a chunk of columns in numpy; see `round_chunk`."""
    points = _ChunkPoints(*grid)
    target, value, target_offset = (numpy.empty_like(like) for like in (error[0], error[0], error))
    for j, column_error in enumerate(error):
        pivot, later_columns = triangle[j, j], slice(j + 1, None)
        numpy.multiply(compensation[j], _ONE / pivot, out=target)
        target += column_error
        points.round_to_point(j, target, codes[j], value)
        numpy.subtract(target, value, out=terms[j])
        terms[j] *= pivot
        error[j] -= value
        compensation[later_columns] += numpy.multiply(
            triangle[j, later_columns, None], column_error, out=target_offset[later_columns]
        )


def improve_points(
    gradient: Array,
    hessian: Array,
    weight: Array,
    error: Array,
    codes: Array,
    change: Array,
    error_decrease: Array,  # float64 [rows]
    *grid: Any,
) -> None:
    """Update the codes of a chunk of columns in numpy; see `improve_chunk`."""
    points = _ChunkPoints(*grid)
    target, value, target_offset = (numpy.empty_like(like) for like in (error[0], error[0], error))
    for j, (column_gradient, original, column_error) in enumerate(
        zip(gradient, weight, error, strict=True)
    ):
        pivot, later_columns, step = hessian[j, j], slice(j + 1, None), change[j]
        value_before = original - column_error
        numpy.multiply(column_gradient, _ONE / pivot, out=target)
        target += value_before
        points.round_to_point(j, target, codes[j], value)
        numpy.subtract(value, value_before, out=step)
        numpy.subtract(original, value, out=column_error)
        error_decrease += step * (_TWO * column_gradient - pivot * step)
        gradient[later_columns] -= numpy.multiply(
            hessian[j, later_columns, None], step, out=target_offset[later_columns]
        )


# One column after the other


def _round_one_by_one(
    error: Tensor,
    compensation: Tensor,
    triangle: Tensor,
    columns: list[int],
    terms: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> list[Tensor]:
    packer, codes = get_packer(scheme), []
    for j, (column, pivot) in enumerate(zip(columns, triangle.diagonal().tolist(), strict=True)):
        column_slice = slice(column, column + 1)
        target = error[j].add(compensation[j], alpha=1 / pivot)
        codes.append(packer.encode(target.unsqueeze(1), parameters, scheme, column_slice))
        value = packer.decode(codes[-1], parameters, scheme, column_slice)[:, 0]
        torch.mul(target.sub_(value), pivot, out=terms[j])
        error[j] -= value
        compensation[j + 1 :].addr_(triangle[j, j + 1 :], error[j])
    return codes


def _improve_one_by_one(
    gradient: Tensor,
    hessian: Tensor,
    weight: Tensor,
    error: Tensor,
    first: int,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> tuple[Tensor, Tensor]:
    packer, codes, change = get_packer(scheme), [], torch.empty_like(gradient)
    for j, pivot in enumerate(hessian.diagonal().tolist()):
        column, column_slice = slice(j, j + 1), slice(first + j, first + j + 1)
        value = weight[column] - error[column]
        target = value.add(gradient[j], alpha=1 / pivot).T
        codes.append(packer.encode(target, parameters, scheme, column_slice))
        new_value = packer.decode(codes[-1], parameters, scheme, column_slice).T
        torch.sub(new_value, value, out=change[column])
        error[column] = weight[column] - new_value
        gradient[j + 1 :].addr_(hessian[j, j + 1 :], change[j], alpha=-1)
    return torch.cat(codes, 1).T, change


# Code vectors: columns that share a code


def _round_vectors(
    error: Tensor,
    compensation: Tensor,
    triangle: Tensor,
    columns: list[int],
    terms: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> list[Tensor]:
    packer = cast("VectorPacker", get_packer(scheme))
    codes: list[Tensor] = []
    for vector in _vectors(len(error), scheme):
        root, column_slice = triangle[vector, vector], _column_slice(columns[vector.start], vector)
        target = error[vector] + matmul(_inverse(root).T, compensation[vector])
        codes.append(packer.nearest_vectors(target.T, parameters, scheme, column_slice, root))
        value = packer.decode(codes[-1], parameters, scheme, column_slice).T
        terms[vector] = matmul(root.T, target - value)
        error[vector] -= value
        later_columns = slice(vector.stop, None)
        compensation[later_columns] += matmul(triangle[vector, later_columns].T, error[vector])
    return codes


def _improve_vectors(
    gradient: Tensor,
    hessian: Tensor,
    weight: Tensor,
    error: Tensor,
    first: int,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> tuple[Tensor, Tensor]:
    packer = cast("VectorPacker", get_packer(scheme))
    values, change = weight - error, torch.empty_like(gradient)
    codes: list[Tensor] = []
    for vector in _vectors(len(gradient), scheme):
        block, column_slice = hessian[vector, vector], _column_slice(first + vector.start, vector)
        with one_thread():
            root = torch.linalg.cholesky(block)
            inverse = torch.cholesky_inverse(root)
        target = values[vector] + matmul(inverse, gradient[vector])
        codes.append(packer.nearest_vectors(target.T, parameters, scheme, column_slice, root))
        new_values = packer.decode(codes[-1], parameters, scheme, column_slice).T
        torch.sub(new_values, values[vector], out=change[vector])
        later_columns = slice(vector.stop, None)
        gradient[later_columns] -= matmul(hessian[later_columns, vector], change[vector])
    error -= change
    return torch.cat(codes, 1).T, change


def _vectors(columns: int, scheme: Scheme) -> Iterator[slice]:
    width = GRIDS[scheme.grid].weights_per_code
    yield from (slice(start, start + width) for start in range(0, columns, width))


def _column_slice(column: int, vector: slice) -> slice:
    return slice(column, column + vector.stop - vector.start)


def _inverse(triangle: Tensor) -> Tensor:
    """Return the inverse of an upper triangle; unlike solving, products with it are equal for any number of threads."""
    identity = torch.eye(len(triangle), dtype=triangle.dtype, device=triangle.device)
    with one_thread():
        inverse: Tensor = torch.linalg.solve_triangular(triangle, identity, upper=True)
    return inverse
