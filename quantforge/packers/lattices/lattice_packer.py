"""The lattice types for rounders: ``fit``, ``encode``, ``decode``, ``nearest``; ggml's own rows by `encode_rows`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.grids import SUPERBLOCKS
from quantforge.packers.lattices import lattice_reference, nearest_points
from quantforge.packers.lattices.lattice_points import values_of
from quantforge.packers.lattices.lattice_refit import refits
from quantforge.packers.lattices.lattice_search import searched
from quantforge.packers.lattices.lattice_types import LATTICES
from quantforge.packers.tensor import QuantizedTensor, Statement
from quantforge.scheme import Scheme

__all__ = [
    "decode",
    "encode",
    "encode_rows",
    "fit",
    "nearest",
    "points",
    "refits",
    "stated",
    "weighed",
]


def steps(parameters: Mapping[str, Tensor], grid: str) -> Tensor:
    """Return the step of each group, float32 ``[rows, groups]``."""
    unit, scales = parameters["d"].float(), parameters["scales"].float()
    spread = (2 * scales + 1).view(*unit.shape, -1) * LATTICES[grid].unit
    return (unit.unsqueeze(-1) * spread).flatten(1)


def of_columns(parameters: Mapping[str, Tensor], grid: str, columns: slice) -> dict[str, Tensor]:
    """Return the parameters of whole blocks around a run of columns, and what of them the run is."""
    block = SUPERBLOCKS[grid]
    groups = block.columns // block.group
    first, last = columns.start // block.columns, -(-columns.stop // block.columns)
    many = {key: 1 if key == "d" else groups for key in parameters}
    return {
        key: value[:, first * many[key] : last * many[key]] for key, value in parameters.items()
    }


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the float32 values of ``codes`` ``[out, n]``, the run ``columns`` of the whole matrix."""
    values, (step, shift) = values_of(codes, scheme.grid), _spread(parameters, scheme, columns)
    return (values if shift is None else values + shift) * step


def _spread(
    parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None, each: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return step and shift of some columns, ``[rows, n / each]``; no shift where codes have it, or there is none."""
    size, whole = SUPERBLOCKS[scheme.grid].group // each, SUPERBLOCKS[scheme.grid].columns // each
    mine = parameters if columns is None else of_columns(parameters, scheme.grid, columns)
    run = slice(None)
    if columns is not None:
        start = columns.start // whole * whole
        run = slice(columns.start - start, columns.stop - start)
    step = steps(mine, scheme.grid).repeat_interleave(size, 1)[:, run]
    if "shifts" not in mine:
        return step, None
    raised = LATTICES[scheme.grid].shift
    shift = torch.where(mine["shifts"].bool(), -raised, raised)
    return step, shift.repeat_interleave(size, 1)[:, run]


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the codes of the points nearest to ``weight`` ``[out, n]``, the run ``columns`` of the whole matrix."""
    step, shift = _spread(parameters, scheme, columns)
    return nearest_points.nearest_diagonal(
        weight, step, shift, scheme.grid, torch.ones_like(weight)
    )


def weighed(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor
) -> Tensor:
    """Return the codes of ``weight`` ``[out, in]`` with the least errors, weighted as in `search`."""
    step, shift = _spread(parameters, scheme, None, 8)
    return nearest_points.nearest_diagonal(
        weight, step, shift, scheme.grid, nearest_points.weights(weight, importance.to(weight))
    )


def nearest(
    targets: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice,
    root: Tensor,
) -> Tensor:
    """Return codes ``[out, 1]`` of vectors near ``targets`` ``[out, v]`` by the distance ``|(t - q) root|``.

    All points are tried with a few choices of signs, so that a nearer vector with other signs may be missed.
    """
    step, shift = _spread(parameters, scheme, columns)
    return nearest_points.nearest_metric(
        targets, step[:, 0], None if shift is None else shift[:, 0], scheme.grid, root
    )


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose the parameters of ``weight`` ``[out, in]`` float32; ``in`` is a multiple of 256.

    Raises:
        InputError: a scale is beyond the range of float16.
    """
    return _checked(searched(weight, scheme, importance, brief=not search))


def encode_rows(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None
) -> QuantizedTensor:
    """Quantize whole rows ``[rows, in]`` float32 to ggml's own codes.

    Raises:
        InputError: a scale is beyond the range of float16, or the type needs an importance.
    """
    tensor = lattice_reference.quantize(weight, scheme, importance)
    _checked(tensor.parameters)
    return tensor


def _checked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not bool(parameters["d"].isfinite().all()):
        raise InputError(
            "a scale is beyond 65504, the largest float16, which is all that ggml's blocks hold",
            "keep this tensor with --ignore",
        )
    return dict(parameters)


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> None:
    """Return None: a column alone has no points."""


def stated(tensor: QuantizedTensor) -> Statement:
    """Refuse: no kernel multiplies these codes, so that models hold them decoded."""
    raise NotImplementedError(f"no kernel multiplies {tensor.scheme}")
