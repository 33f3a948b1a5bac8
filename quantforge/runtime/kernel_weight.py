"""A quantized weight as the kernels take it: codes, parameters and a description of the product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.grids import Tile
from quantforge.packers import get_packer
from quantforge.packers.tensor import INPUT_PARAMS, QuantizedTensor
from quantforge_kernels.matmul_spec import MatmulSpec


@dataclass(frozen=True, slots=True)
class KernelWeight:
    """A quantized weight in the terms of the kernels: description, codes and parameters, before `Kernel.prepare`."""

    problem: MatmulSpec
    codes: Tensor
    parameters: dict[str, Tensor]


def to_kernel_weight(
    tensor: QuantizedTensor, dtype: torch.dtype, device: torch.device
) -> KernelWeight:
    """Convert a quantized tensor to the codes and parameters that kernels expect, using the packer of its grid.

    Args:
        tensor: the quantized weight.
        dtype: type of the activations.
        device: device of the weight.
    """
    scheme, (rows, columns) = tensor.scheme, tensor.shape
    weight_parameters = {
        key: parameter for key, parameter in tensor.parameters.items() if key not in INPUT_PARAMS
    }
    terms = get_packer(scheme).kernel_inputs(replace(tensor, parameters=weight_parameters))
    parameters = terms.parameters
    tile_rows = scheme.granularity.rows if isinstance(scheme.granularity, Tile) else 1
    problem = MatmulSpec(
        out_features=rows,
        in_features=columns,
        bits=scheme.bits,
        group_size=scheme.group_size(columns),
        symmetric=not {"zeros", "mins"} & parameters.keys(),
        dtype=dtype,
        device=str(device),
        grid=terms.grid,
        tile_rows=tile_rows,
        activation_kind=_activation(tensor),
        has_minima="mins" in parameters,
        superblock_size=terms.superblock_size,
        lower_encoding=terms.lower_encoding,
    )
    if tile_rows == 1:  # expand parameters that are shared by all rows
        for name in {"scales", "zeros", "mins"} & parameters.keys():
            parameters[name] = parameters[name].expand(rows, -1)
    device_parameters = {name: value.to(device) for name, value in parameters.items()}
    return KernelWeight(problem, terms.codes.to(device), device_parameters)


def _activation(tensor: QuantizedTensor) -> str:
    """Return the activation type that a kernel quantizes dynamically per row ("int8" or "fp8"); "" if there is none."""
    input_scheme = tensor.input
    if (
        input_scheme is None
        or not input_scheme.dynamic
        or input_scheme.granularity != "token"
        or input_scheme.threshold
    ):
        return ""
    return {"int8": "int8", "fp8_e4m3": "fp8"}.get(input_scheme.grid, "")
