"""The innermost loops of GPTQ and of its refinement on a CPU, for integers and ggml's blocks.

Both go over the columns of a strip in turn, each changing those after it. In torch that is a dozen small operations
for every column of every matrix, and calling most of them costs more than computing them. Here a column takes fewer
steps, of numpy (`strip_arrays`), or, for large matrices, loops compiled by numba (`strip_kernels`), in which a tile of
rows stays in a core's cache until all columns of the strip are done: two to five times as fast, but compiling takes
seconds, which pays from `COMPILED_FROM` weights on. Both do the same float32 arithmetic and give the same bits. Rows
do not see each other, and each is worked off in the order of its columns: the result depends on neither tiles nor
threads.

Everything is float32 ``[columns, rows]``: neighbours in memory are rows, and each step is vector instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from quantforge.grids import PerGroup, PerTensor
from quantforge.packers.ggml.grid import GRIDS, steps, table, values_of
from quantforge.packers.integer import code_dtype, code_range
from quantforge.quantizers import COMPILED_FROM
from quantforge.scheme import Scheme


class Points(NamedTuple):
    """The grid of a strip: ``(code - zero) * scale + offset`` with codes inside of ``limits``.

    With a ``table`` (thresholds, then the values between them and the codes of these) it is ``value * scale + offset``.
    """

    scales: Tensor  # [columns, rows], as the two that follow
    zeros: Tensor
    offsets: Tensor
    limits: tuple[int, int]
    dtype: torch.dtype  # of the codes
    table: tuple[Tensor, Tensor, Tensor] | None = None


def loops_for(weight: Tensor, scheme: Scheme) -> ModuleType | None:
    """Return the module whose loops are for a matrix, or None: not on a CPU, or another kind of grid."""
    uniform = scheme.integer and not isinstance(scheme.granularity, PerTensor)
    if weight.device.type != "cpu" or not (uniform or scheme.block is not None):
        return None
    # Imported when first needed: numba takes a moment.
    loops = "strip_kernels" if weight.numel() >= COMPILED_FROM else "strip_arrays"
    return import_module(f"quantforge.quantizers.{loops}")


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points:
    """Gather the float32 parameters (``[rows, groups]``) of some ``columns``."""
    if scheme.block is not None:
        return _block_points(parameters, scheme, columns)
    groups = (
        columns // scheme.granularity.size
        if isinstance(scheme.granularity, PerGroup)
        else columns * 0
    )
    scales = parameters["scales"].T[groups]
    none = torch.zeros_like(scales)
    zeros, mins = (
        parameters[key].T[groups] if key in parameters else none for key in ("zeros", "mins")
    )
    return Points(scales, zeros, mins, code_range(scheme), code_dtype(scheme))


def _block_points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points:
    assert scheme.block is not None
    block, grid = scheme.block, GRIDS[scheme.grid]
    sizes = {"d": block.columns, "dmin": block.columns}
    mine = {
        key: value.T[columns // sizes.get(key, block.group)].T for key, value in parameters.items()
    }
    step, offset = steps(mine, scheme.grid)
    scales = step.T.contiguous()
    none = torch.zeros_like(scales)
    offsets = none if offset is None else offset.T.contiguous()
    found = Points(scales, none, offsets, (grid.low, grid.high), grid.dtype)
    if grid.values is None:
        return found
    middles, codes = table(grid)
    return found._replace(table=(middles, values_of(codes, grid), codes.float()))


def round_strip(
    loops: ModuleType, error: Tensor, pull: Tensor, triangle: Tensor, grid: Points, terms: Tensor
) -> Tensor:
    """Round a strip as `feedback` does: ``error`` and ``terms`` are filled, ``pull`` is used up.

    Returns:
        Codes ``[columns, rows]``.
    """
    codes = torch.empty_like(error)
    arrays = (error, pull, triangle.contiguous(), terms, codes)
    loops.round_columns(*(item.numpy() for item in arrays), *_numpy(grid))
    return codes.to(grid.dtype)


def improve_strip(
    loops: ModuleType,
    gradient: Tensor,
    hessian: Tensor,
    weight: Tensor,
    error: Tensor,
    grid: Points,
) -> tuple[Tensor, Tensor, Tensor]:
    """Move each code of a strip to its best point as `refine` does: ``error`` is updated, ``gradient`` used up.

    Returns:
        Codes and changes of the values, ``[columns, rows]``; by how much the error fell, float64 ``[rows]``.
    """
    codes, change = torch.empty_like(error), torch.empty_like(error)
    gained = torch.zeros(error.shape[1], dtype=torch.float64)
    arrays = (gradient, hessian.contiguous(), weight, error, codes, change, gained)
    loops.improve_columns(*(item.numpy() for item in arrays), *_numpy(grid))
    return codes.to(grid.dtype), change, gained


def _numpy(grid: Points) -> tuple[Any, ...]:
    known = None if grid.table is None else tuple(part.numpy() for part in grid.table)
    parameters = (part.numpy() for part in (grid.scales, grid.zeros, grid.offsets))
    return (*parameters, *(numpy.float32(limit) for limit in grid.limits), known)
