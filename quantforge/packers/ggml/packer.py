"""The grids of ggml for rounders: ``fit``, ``encode``, ``decode``; whole rows by `encode_rows`.

`reference` has ggml's own codes, `search` better ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import GGML_BLOCKS
from quantforge.packers import Points
from quantforge.packers.bits import unsigned
from quantforge.packers.ggml.grid import (
    GRIDS,
    CodeRange,
    code_thresholds,
    nearest,
    of_columns,
    power_of_two,
    steps,
    table,
    values_of,
)
from quantforge.packers.ggml.reference import COVERED, quantize
from quantforge.packers.ggml.refit import refits
from quantforge.packers.ggml.search import search as searched
from quantforge.packers.tensor import KernelTerms, QuantizedTensor
from quantforge.scheme import Scheme

__all__ = ["decode", "encode", "encode_rows", "fit", "kernel_terms", "points", "refits"]


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes of ``weight`` ``[out, n]``, the run ``columns`` of the whole matrix."""
    if columns is None and weight.device.type == "cpu":
        return _encode_rows(weight, *steps(parameters, scheme.grid), GRIDS[scheme.grid])
    step, offset = of_columns(parameters, scheme.grid, columns)
    divisor = torch.where(step == 0, 1.0, step)  # then every code stands for the same value
    return nearest((weight if offset is None else weight - offset) / divisor, GRIDS[scheme.grid])


def _encode_rows(weight: Tensor, step: Tensor, offset: Tensor | None, grid: CodeRange) -> Tensor:
    """Return the codes of whole rows on a CPU; step and offset are ``[rows, groups]``."""
    from quantforge.packers.ggml import row_loops

    found = torch.empty(weight.shape, dtype=torch.int8)
    offsets = torch.zeros(0, 0) if offset is None else offset
    arrays = (part.contiguous().numpy() for part in (weight, step, offsets))
    row_loops.encode(*arrays, *code_thresholds(grid), found.numpy())
    return found.view(grid.dtype)


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the float32 values of ``codes`` ``[out, n]``, the run ``columns`` of the whole matrix."""
    step, offset = of_columns(parameters, scheme.grid, columns)
    values = values_of(codes, GRIDS[scheme.grid]) * step
    return values if offset is None else values + offset


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose the parameters of ``weight`` ``[out, in]`` float32; ``in`` is a multiple of the block.

    Without a ``search`` they are ggml's own for the types that ggml covers the range of (`COVERED`). The others need
    one in any case, and ours is the faster one.

    Raises:
        InputError: a scale is beyond the range of float16.
    """
    if search or scheme.grid not in COVERED:
        return _checked(searched(weight, scheme, importance))
    return _checked(quantize(weight, scheme, importance).parameters)


def encode_rows(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, search: str = "search"
) -> QuantizedTensor:
    """Quantize whole rows ``[rows, in]`` float32.

    Args:
        weight: finite; ``in`` is a multiple of the block.
        scheme: one of `GRIDS`.
        importance: ``[in]``, weighs the columns.
        search: "reference" has ggml's codes to the last bit; "search" has a smaller error.

    Raises:
        InputError: a scale is beyond the range of float16.
    """
    if search == "reference":
        tensor = quantize(weight, scheme, importance)
        _checked(tensor.parameters)
        return tensor
    parameters = _checked(searched(weight, scheme, importance))
    return QuantizedTensor(encode(weight, parameters, scheme), parameters, scheme)


def _checked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for value in parameters.values():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise InputError(
                "a scale is beyond 65504, the largest float16, which is all that ggml's blocks hold",
                "keep this tensor with --ignore",
            )
    return dict(parameters)


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points | None:
    """Return the values that ``columns`` can take."""
    block, grid = GGML_BLOCKS[scheme.grid], GRIDS[scheme.grid]
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


def kernel_terms(tensor: QuantizedTensor) -> KernelTerms:
    """Return the terms of the kernels; minima are added where there is one level of scales, subtracted where two."""
    parameters, grid = dict(tensor.parameters), tensor.scheme.grid
    if "exponents" in parameters:
        parameters = {"scales": power_of_two(parameters["exponents"]).bfloat16()}
    if "mins" in parameters and "dmin" not in parameters:
        parameters["mins"] = -parameters["mins"]
    superblock = GGML_BLOCKS[grid].columns if "d" in parameters else 0
    lower = "pairs" if grid == "q2_k" else ""
    values = GRIDS[grid].values
    if values is None:
        return KernelTerms(
            "int", unsigned(tensor.codes, tensor.scheme.bits), parameters, superblock, lower
        )
    parameters["table"] = torch.tensor(values).float()
    return KernelTerms("table", tensor.codes, parameters, superblock)
