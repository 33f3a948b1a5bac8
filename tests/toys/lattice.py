"""A toy grid of code vectors: four weights share a code of 8 bits, under a float32 scale per group.

The vectors are the 256 points of ``D4 + 1/2`` (coordinates that are odd halves, with an even sum) of squared length 9
or less: 8, 32, 48, 64 and 104 of squared length 1, 3, 5, 7 and 9. It is held in memory alone: no format knows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantforge.grids import Grid, PerGroup, ScaleType
from quantforge.packers.hessian_refit import FixedCodes, RefitStep
from quantforge.scheme import Scheme
from tests.toys.refit import refit_scale

WIDTH = 4
RECORD = Grid(
    8,
    "tests.toys.lattice",
    weights_per_code=WIDTH,
    default_granularity=PerGroup(32),
    scale=ScaleType.F32,
)
BOOK = torch.tensor(
    [
        point
        for point in itertools.product((-2.5, -1.5, -0.5, 0.5, 1.5, 2.5), repeat=WIDTH)
        if sum(point) % 2 == 0 and sum(x * x for x in point) <= 9
    ]
)


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    groups = weight.reshape(len(weight), -1, scheme.group_size(weight.shape[1]))
    return {"scales": groups.square().mean(-1).sqrt().clamp(min=1e-20)}


def encode(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None = None
) -> Tensor:
    vectors = (weight / _scales(parameters, scheme, columns)).reshape(-1, WIDTH)
    return torch.cdist(vectors, BOOK).argmin(1).to(torch.uint8).view(len(weight), -1)


def encode_weighted(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor
) -> Tensor:
    vectors = (weight / _scales(parameters, scheme, None)).view(len(weight), -1, 1, WIDTH)
    errors = (vectors - BOOK).square() * importance.view(-1, 1, WIDTH)
    return errors.sum(-1).argmin(-1).to(torch.uint8)


def nearest_vectors(
    targets: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice, root: Tensor
) -> Tensor:
    vectors = targets / _scales(parameters, scheme, columns)
    return torch.cdist(vectors @ root, BOOK @ root).argmin(1, keepdim=True).to(torch.uint8)


def decode(
    codes: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None = None
) -> Tensor:
    return BOOK[codes.long()].flatten(1) * _scales(parameters, scheme, columns)


def column_grid(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> None:
    """Return None: a column alone has no points."""


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:
    def improve(parameters: dict[str, Tensor], held: FixedCodes) -> Tensor:
        values = BOOK[held.codes.long()].transpose(1, 2).flatten(0, 1)
        return refit_scale(parameters["scales"], values, held, torch.float32)

    return (RefitStep(scheme.group_size(in_features), improve),)


def _scales(parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None) -> Tensor:
    spread = parameters["scales"].repeat_interleave(scheme.group_size(0), 1)
    return spread if columns is None else spread[:, columns]
