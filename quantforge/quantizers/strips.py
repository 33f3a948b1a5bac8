"""The innermost loops of GPTQ and of its refinement on a CPU, for grids whose packer gives `Points`.

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

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from quantforge.packers import Points
from quantforge.quantizers import COMPILED_FROM


def loops_for(weight: Tensor) -> ModuleType | None:
    """Return the module whose loops are for a matrix; None where it is not on a CPU."""
    if weight.device.type != "cpu":
        return None
    # Imported when first needed: numba takes a moment.
    loops = "strip_kernels" if weight.numel() >= COMPILED_FROM else "strip_arrays"
    return import_module(f"quantforge.quantizers.{loops}")


def round_strip(
    loops: ModuleType, error: Tensor, pull: Tensor, triangle: Tensor, grid: Points, terms: Tensor
) -> Tensor:
    """Round a strip as `feedback` does.

    ``error`` holds the weights and gets their errors, ``terms`` is filled, ``pull`` is used up.

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
