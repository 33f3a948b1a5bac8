"""A quantized tensor as a problem of the kernels: which grid, which parameters, in their plain terms.

Nothing is rounded on the way. The packer of each grid says what its codes and parameters are in these terms (`stated`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.grids import Tile
from quantforge.packers import packer_of
from quantforge.packers.tensor import OF_INPUT, QuantizedTensor
from quantforge_kernels.problem import Problem


@dataclass(frozen=True, slots=True)
class Stated:
    """A problem, and the weights in the terms of `quantforge_kernels.problem.Kernel.prepare`."""

    problem: Problem
    codes: Tensor
    parameters: dict[str, Tensor]


def state(tensor: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> Stated:
    """State the product of one token with a quantized weight as a problem, and the weight in its terms."""
    scheme, (rows, columns) = tensor.scheme, tensor.shape
    own = {key: part for key, part in tensor.parameters.items() if key not in OF_INPUT}
    said = packer_of(scheme).stated(replace(tensor, parameters=own))
    parameters = said.parameters
    tile_rows = scheme.granularity.rows if isinstance(scheme.granularity, Tile) else 1
    problem = Problem(
        out_features=rows,
        in_features=columns,
        bits=scheme.bits,
        group_size=scheme.group_size(columns),
        symmetric=not {"zeros", "mins"} & parameters.keys(),
        dtype=dtype,
        device=str(device),
        grid=said.grid,
        tile_rows=tile_rows,
        activation=_activation(tensor),
        minima="mins" in parameters,
        superblock=said.superblock,
        lower=said.lower,
    )
    if tile_rows == 1:  # one row of parameters for every row, also where one serves the matrix
        for name in {"scales", "zeros", "mins"} & parameters.keys():
            parameters[name] = parameters[name].expand(rows, -1)
    moved = {name: value.to(device) for name, value in parameters.items()}
    return Stated(problem, said.codes.to(device), moved)


def _activation(tensor: QuantizedTensor) -> str:
    """Name the input that a kernel can quantize on the way: whole rows, to a range that it finds itself; "" if none."""
    taken = tensor.input
    if taken is None or not taken.dynamic or taken.granularity != "token" or taken.threshold:
        return ""
    return {"int8": "int8", "fp8_e4m3": "fp8"}.get(taken.grid, "")
