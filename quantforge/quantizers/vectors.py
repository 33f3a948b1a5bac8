"""Error feedback and refinement of code vectors: the columns that share a code are a panel, rounded at once.

A panel here is one vector wide; those of `feedback` hold many.

With ``H + diag(ridge) = R R^T`` (see `hessian`) the terms of a panel ``B`` are ``E_B R_BB + P``, where ``P`` holds what
the columns before it have left. They are least for the code vector ``q`` that is nearest to the target
``t = w + P R_BB^-1`` where distance is ``|(t - q) R_BB|``: the target of one column, with a triangle in the place of
its pivot (vectors in GPTVQ, van Baalen et al., arXiv 2402.15319; BlockLDLQ in QuIP#, Tseng et al., arXiv 2402.04396).
In a sweep of refinement the target is ``q + G_B H_BB^-1``, and the distance ``|(t - q) L|`` with ``H_BB = L L^T``.

Everything is float32 ``[columns, rows]``, as in `feedback`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.numerics.products import matmul
from quantforge.numerics.threads import one_thread
from quantforge.packers import VectorPacker, packer_of
from quantforge.scheme import Scheme


def round_panels(
    error: Tensor,
    pull: Tensor,
    triangle: Tensor,
    columns: list[int],
    terms: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> list[Tensor]:
    """Round one strip and return the codes of its panels, each ``[rows, 1]``; tensors as of `strips.round_strip`."""
    packer = _packer_of(scheme)
    codes: list[Tensor] = []
    for panel in _panels(len(error), scheme):
        root, place = triangle[panel, panel], _place(columns[panel.start], panel)
        target = error[panel] + matmul(_inverse(root).T, pull[panel])
        codes.append(packer.nearest(target.T, parameters, scheme, place, root))
        value = packer.decode(codes[-1], parameters, scheme, place).T
        terms[panel] = matmul(root.T, target - value)
        error[panel] -= value
        later = slice(panel.stop, None)
        pull[later] += matmul(triangle[panel, later].T, error[panel])
    return codes


def improve_panels(
    slopes: Tensor,
    hessian: Tensor,
    values: Tensor,
    first: int,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> tuple[Tensor, Tensor, Tensor]:
    """Move each code of one strip to its best vector, given all others.

    Args:
        slopes: the gradient of the strip, ``[columns, rows]``.
        hessian: of its columns, with the ridge, ``[columns, columns]``.
        values: of its codes as they are, ``[columns, rows]``.
        first: its first column in the matrix.
        parameters: of the whole matrix.
        scheme: of the matrix.

    Returns:
        Codes ``[panels, rows]``, changes of the values, and by how much the error of each row fell, float64.
    """
    packer, gradient, change = _packer_of(scheme), slopes.clone(), torch.empty_like(slopes)
    codes: list[Tensor] = []
    for panel in _panels(len(slopes), scheme):
        block, place = hessian[panel, panel], _place(first + panel.start, panel)
        with one_thread():
            root = torch.linalg.cholesky(block)
            inverse = torch.cholesky_inverse(root)
        target = values[panel] + matmul(inverse, gradient[panel])
        codes.append(packer.nearest(target.T, parameters, scheme, place, root))
        moved = packer.decode(codes[-1], parameters, scheme, place).T
        torch.sub(moved, values[panel], out=change[panel])
        later = slice(panel.stop, None)
        gradient[later] -= matmul(hessian[later, panel], change[panel])
    fallen = change * (2 * slopes - matmul(hessian, change))
    return torch.cat(codes, 1).T, change, fallen.sum(0, dtype=torch.float64)


def targets_of(terms: Tensor, root: Tensor, width: int) -> Tensor:
    """Return targets less the values chosen, ``[in, out]``, given their terms; rows of both are in processing order."""
    moved = torch.empty_like(terms)
    for start in range(0, len(terms), width):
        panel = slice(start, start + width)
        moved[panel] = matmul(_inverse(root[panel, panel]).T, terms[panel])
    return moved


def _inverse(triangle: Tensor) -> Tensor:
    """Return the inverse of an upper triangle; products with it, unlike solving, are the same for all threads."""
    identity = torch.eye(len(triangle), dtype=triangle.dtype, device=triangle.device)
    with one_thread():
        inverse: Tensor = torch.linalg.solve_triangular(triangle, identity, upper=True)
    return inverse


def _packer_of(scheme: Scheme) -> VectorPacker:
    return cast("VectorPacker", packer_of(scheme))


def _panels(columns: int, scheme: Scheme) -> Iterator[slice]:
    width = GRIDS[scheme.grid].weights_per_code
    yield from (slice(start, start + width) for start in range(0, columns, width))


def _place(column: int, panel: slice) -> slice:
    return slice(column, column + panel.stop - panel.start)
