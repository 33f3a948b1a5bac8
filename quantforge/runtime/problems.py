"""A quantized tensor as a problem of the kernels: which grid, which parameters, in their plain terms.

Nothing is rounded on the way. A double-quantized scale of NF4 is spelled out in float32, which costs
0.37 bits per weight; exponents of MXFP4 and MXFP8 become bfloat16 powers of two; the scales of NVFP4
lie under the upper level of a whole row, one over the divisor; everything else is passed on as it is
stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.grids import ScaleType, Tile
from quantforge.packers import fp4, nf4
from quantforge.packers.ggml.grid import GRIDS, power_of_two
from quantforge.packers.tensor import OF_INPUT, QuantizedTensor
from quantforge_kernels.problem import Problem

TWO_LEVELS = 256  # columns of a superblock of the K-quants
FLOAT8 = {"fp8_e4m3": "fp8", "fp8_e5m2": "e5m2"}
LOWER = {"q2_k": "pairs", "nvfp4": "e4m3"}  # see `Problem.lower`


@dataclass(frozen=True, slots=True)
class Stated:
    """A problem, and the weights in the terms of `quantforge_kernels.problem.Kernel.prepare`."""

    problem: Problem
    codes: Tensor
    parameters: dict[str, Tensor]


def state(tensor: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> Stated:
    """State the product of one token with a quantized weight."""
    scheme, (rows, columns) = tensor.scheme, tensor.shape
    grid, codes, parameters = _form(tensor)
    tile_rows = scheme.granularity.rows if isinstance(scheme.granularity, Tile) else 1
    problem = Problem(
        rows=1,
        out_features=rows,
        in_features=columns,
        bits=scheme.bits,
        group_size=scheme.group_size(columns),
        symmetric=not {"zeros", "mins"} & parameters.keys(),
        dtype=dtype,
        device=device.type,
        grid=grid,
        tile_rows=tile_rows,
        activation=_activation(tensor),
        minima="mins" in parameters,
        superblock=(columns if scheme.grid == "nvfp4" else TWO_LEVELS) if "d" in parameters else 0,
        lower=LOWER.get(scheme.grid, ""),
    )
    if tile_rows == 1:  # one row of parameters for every row, also where one serves the matrix
        for name in {"scales", "zeros", "mins"} & parameters.keys():
            parameters[name] = parameters[name].expand(rows, -1)
    moved = {name: value.to(device) for name, value in parameters.items()}
    return Stated(problem, codes.to(device), moved)


def _form(tensor: QuantizedTensor) -> tuple[str, Tensor, dict[str, Tensor]]:
    """Return the grid, codes and parameters in the form of the kernels."""
    scheme = tensor.scheme
    parameters = {key: part for key, part in tensor.parameters.items() if key not in OF_INPUT}
    if scheme.integer:
        if "mins" in parameters:  # kernels subtract them
            parameters["mins"] = -parameters["mins"]
        return "int", _unsigned(tensor), parameters
    if scheme.grid in nf4.BOOKS:
        double = scheme.scale is ScaleType.DOUBLE
        scales = nf4.unnest(parameters) if double else parameters["scales"]
        return "table", tensor.codes, {"scales": scales, "table": nf4.book(scheme.grid)}
    if scheme.grid in FLOAT8:
        return FLOAT8[scheme.grid], tensor.codes.view(torch.uint8), parameters
    if scheme.grid == "mxfp8":
        scales = fp4.power_of_two(parameters["exponents"]).bfloat16()
        return "fp8", tensor.codes.view(torch.uint8), {"scales": scales}
    if scheme.grid == "nvfp4":
        d = parameters["divisor"].float().reciprocal().expand(len(tensor.codes), 1)
        table = fp4.values_e2m1(torch.arange(16, dtype=torch.uint8))
        return "table", tensor.codes, {"scales": parameters["scales"], "d": d, "table": table}
    return _block_form(tensor, parameters)


def _block_form(
    tensor: QuantizedTensor, parameters: dict[str, Tensor]
) -> tuple[str, Tensor, dict[str, Tensor]]:
    """Return the form of ggml's types; minima are added where there is one level of scales, subtracted where two."""
    if "exponents" in parameters:
        parameters = {"scales": power_of_two(parameters["exponents"]).bfloat16()}
    if "mins" in parameters and "dmin" not in parameters:
        parameters["mins"] = -parameters["mins"]
    values = GRIDS[tensor.scheme.grid].values
    if tensor.scheme.grid == "tq1_0":
        return "ternary", (tensor.codes + 1).to(torch.uint8), parameters
    if values is None:
        return "int", _unsigned(tensor), parameters
    return "table", tensor.codes, parameters | {"table": torch.tensor(values).float()}


def _unsigned(tensor: QuantizedTensor) -> Tensor:
    """Return the codes as uint8 from 0: kernels know no signed codes."""
    if tensor.codes.dtype != torch.int8:
        return tensor.codes
    return (tensor.codes.short() + (1 << (tensor.scheme.bits - 1))).to(torch.uint8)


def _activation(tensor: QuantizedTensor) -> str:
    """Name the input that a kernel can quantize on the way: whole rows, to a range that it finds itself; "" if none."""
    taken = tensor.input
    if taken is None or not taken.dynamic or taken.granularity != "token" or taken.threshold:
        return ""
    return {"int8": "int8", "fp8_e4m3": "fp8"}.get(taken.grid, "")
