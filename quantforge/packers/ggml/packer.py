"""Fit, encode and decode ggml's block types: the `Packer` functions, and whole rows by `encode_rows`.

`reference` chooses the same codes as ggml, `search_parameters` better ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import GGML_BLOCKS
from quantforge.packers import ColumnGrid
from quantforge.packers.bits import to_unsigned_codes
from quantforge.packers.ggml.grid import (
    CODE_RANGES,
    CodeRange,
    code_table,
    code_thresholds,
    column_steps,
    decode_half_e8m0,
    decode_values,
    group_steps,
    nearest_codes,
)
from quantforge.packers.ggml.reference import TYPES_COVERING_RANGE, quantize
from quantforge.packers.ggml.refit import refit_steps
from quantforge.packers.ggml.search import search_parameters
from quantforge.packers.tensor import KernelInputs, QuantizedTensor
from quantforge.scheme import Scheme

__all__ = ["column_grid", "decode", "encode", "encode_rows", "fit", "kernel_inputs", "refit_steps"]


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes of ``weight`` ``[out, n]``, the given columns of the whole matrix."""
    if columns is None and weight.device.type == "cpu":
        return _encode_rows(weight, *group_steps(parameters, scheme.grid), CODE_RANGES[scheme.grid])
    step, offset = column_steps(parameters, scheme.grid, columns)
    safe_step = torch.where(step == 0, 1.0, step)  # then every code stands for the same value
    return nearest_codes(
        (weight if offset is None else weight - offset) / safe_step, CODE_RANGES[scheme.grid]
    )


def _encode_rows(weight: Tensor, step: Tensor, offset: Tensor | None, grid: CodeRange) -> Tensor:
    """Return the codes of whole rows on a CPU; step and offset are ``[rows, groups]``."""
    from quantforge.packers.ggml import row_loops

    codes = torch.empty(weight.shape, dtype=torch.int8)
    offsets = torch.zeros(0, 0) if offset is None else offset
    arrays = (array.contiguous().numpy() for array in (weight, step, offsets))
    row_loops.encode(*arrays, *code_thresholds(grid), codes.numpy())
    return codes.view(grid.dtype)


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the float32 values of ``codes`` ``[out, n]``, the given columns of the whole matrix."""
    step, offset = column_steps(parameters, scheme.grid, columns)
    values = decode_values(codes, CODE_RANGES[scheme.grid]) * step
    return values if offset is None else values + offset


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose the parameters of ``weight`` ``[out, in]`` float32; ``in`` is a multiple of the block.

    Without ``search`` they are the same as ggml's for the types in `TYPES_COVERING_RANGE`. The other types need a
    search in any case, and the one here is faster.

    Raises:
        InputError: a scale is beyond the range of float16.
    """
    if search or scheme.grid not in TYPES_COVERING_RANGE:
        return _require_finite(search_parameters(weight, scheme, importance))
    return _require_finite(quantize(weight, scheme, importance).parameters)


def encode_rows(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, search: str = "search"
) -> QuantizedTensor:
    """Quantize whole rows ``[rows, in]`` float32.

    Args:
        weight: finite; ``in`` is a multiple of the block.
        scheme: one of `CODE_RANGES`.
        importance: weights of the columns in the error, ``[in]``.
        search: "reference" gives ggml's codes to the last bit; "search" a smaller error.

    Raises:
        InputError: a scale is beyond the range of float16.
    """
    if search == "reference":
        tensor = quantize(weight, scheme, importance)
        _require_finite(tensor.parameters)
        return tensor
    parameters = _require_finite(search_parameters(weight, scheme, importance))
    return QuantizedTensor(encode(weight, parameters, scheme), parameters, scheme)


def _require_finite(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for value in parameters.values():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise InputError(
                "a scale is beyond 65504, the largest float16, which is all that ggml's blocks hold",
                "keep this tensor with --ignore",
            )
    return dict(parameters)


def column_grid(
    parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor
) -> ColumnGrid | None:
    """Return the values that ``columns`` can take."""
    block, grid = GGML_BLOCKS[scheme.grid], CODE_RANGES[scheme.grid]
    columns_per_value = {"d": block.columns, "dmin": block.columns}
    selected = {
        key: value.T[columns // columns_per_value.get(key, block.group_size)].T
        for key, value in parameters.items()
    }
    step, offset = group_steps(selected, scheme.grid)
    scales = step.T.contiguous()
    zeros = torch.zeros_like(scales)
    offsets = zeros if offset is None else offset.T.contiguous()
    column_values = ColumnGrid(scales, zeros, offsets, (grid.low, grid.high), grid.dtype)
    if grid.values is None:
        return column_values
    thresholds, codes = code_table(grid)
    return column_values._replace(table=(thresholds, decode_values(codes, grid), codes.float()))


def kernel_inputs(tensor: QuantizedTensor) -> KernelInputs:
    """Return the tensor as the kernels take it.

    Kernels subtract minima. Types with one level of scales store minima that are added, so these are negated.
    """
    parameters, grid = dict(tensor.parameters), tensor.scheme.grid
    if "exponents" in parameters:
        parameters = {"scales": decode_half_e8m0(parameters["exponents"]).bfloat16()}
    if "mins" in parameters and "dmin" not in parameters:
        parameters["mins"] = -parameters["mins"]
    superblock_size = GGML_BLOCKS[grid].columns if "d" in parameters else 0
    lower_encoding = "pairs" if grid == "q2_k" else ""
    values = CODE_RANGES[grid].values
    if values is None:
        return KernelInputs(
            "int",
            to_unsigned_codes(tensor.codes, tensor.scheme.bits),
            parameters,
            superblock_size,
            lower_encoding,
        )
    parameters["table"] = torch.tensor(values).float()
    return KernelInputs("table", tensor.codes, parameters, superblock_size)
