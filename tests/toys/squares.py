"""A toy grid: 16 values that are squares with a sign, under a float32 scale per group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantforge.grids import Grid, PerGroup, ScaleType
from quantforge.packers import ColumnGrid
from quantforge.packers.hessian_refit import FixedCodes, RefitStep
from quantforge.packers.tensor import KernelInputs, QuantizedTensor
from quantforge.scheme import Scheme
from tests.toys.refit import refit_scale

RECORD = Grid(4, "tests.toys.squares", default_granularity=PerGroup(32), scale=ScaleType.F32)
TABLE = (
    torch.tensor([sign * (step / 8) ** 2 for sign in (-1, 1) for step in range(1, 9)]).sort().values
)


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    groups = weight.view(len(weight), -1, scheme.group_size(weight.shape[1]))
    return {"scales": groups.abs().amax(-1).clamp(min=1e-20)}


def encode(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None = None
) -> Tensor:
    shares = weight / _scales(parameters, scheme, columns)
    return (shares[..., None] - TABLE).abs().argmin(-1).to(torch.uint8)


def decode(
    codes: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None = None
) -> Tensor:
    return TABLE[codes.long()] * _scales(parameters, scheme, columns)


def column_grid(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> ColumnGrid:
    scales = parameters["scales"].T[columns // scheme.group_size(0)]
    none = torch.zeros_like(scales)
    table = ((TABLE[1:] + TABLE[:-1]) / 2, TABLE, torch.arange(16).float())
    return ColumnGrid(scales, none, none, (0, 15), torch.uint8, table)


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:
    def improve(parameters: dict[str, Tensor], held: FixedCodes) -> Tensor:
        values = TABLE[held.codes.long()]
        return refit_scale(parameters["scales"], values, held, torch.float32)

    return (RefitStep(scheme.group_size(in_features), improve),)


def kernel_inputs(tensor: QuantizedTensor) -> KernelInputs:
    return KernelInputs("table", tensor.codes, {**tensor.parameters, "table": TABLE})


def _scales(parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None) -> Tensor:
    size = scheme.group_size(0) if isinstance(scheme.granularity, PerGroup) else 1
    spread = parameters["scales"].repeat_interleave(size, 1)
    return spread if columns is None else spread[:, columns]
