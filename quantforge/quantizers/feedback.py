"""The loop of GPTQ: round the columns in turn, each to make its own term of the error least.

The error of a row is ``sum_j (E R)_j^2`` with ``E = W - Q`` and ``R`` upper triangular (see `hessian`).
Term ``j`` holds the columns up to ``j``, so it is least when column ``j`` rounds not ``w_j`` but its target
``w_j + sum_(k<j) E_k R_kj / R_jj``. Columns are worked off in panels, and the panels in strips, so that nearly all of
the arithmetic is matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.numerics.products import addmm_, matmul
from quantforge.packers import packer_of
from quantforge.quantizers import rtn, strips, vectors
from quantforge.quantizers.hessian import Factor
from quantforge.scheme import Scheme

PANEL = 256  # columns that share one product with all the columns before them
STRIP = 32  # columns of a panel that share one product with those of the panel before them


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Parameters and codes of a matrix with their error."""

    parameters: dict[str, Tensor]
    codes: Tensor  # [out, in], of code vectors one for each
    errors: Tensor  # of each row, float64 [out]
    plain: Tensor  # which rows are rounded plainly, bool [out]
    terms: Tensor | None = None  # E R, [in, out] with the columns in processing order

    def targets(self, factor: Factor, scheme: Scheme) -> Tensor:
        """Return the targets that were rounded to these codes, ``[out, in]``; needs the terms."""
        assert self.terms is not None
        values = packer_of(scheme).decode(self.codes, self.parameters, scheme)
        width = GRIDS[scheme.grid].weights_per_code
        if width == 1:
            moved = self.terms / factor.root.diagonal().unsqueeze(1)
        else:
            moved = vectors.targets_of(self.terms, factor.root, width)
        return values.add_(moved[factor.order.argsort()].T)

    def part(self, rows: slice) -> Solution:
        """Return views of some rows; a parameter that serves the whole matrix stays whole."""
        parameters = rtn.of_rows(self.parameters, rows)
        return Solution(parameters, self.codes[rows], self.errors[rows], self.plain[rows])

    def or_better(self, other: Solution, scheme: Scheme) -> Solution:
        """Return the better of two solutions without terms, of each row where rows share nothing that differs."""
        if scheme.whole and not scheme.divided:
            return min(self, other, key=lambda solution: fsum(solution.errors.tolist()))
        rows = other.errors < self.errors
        choose = rows.unsqueeze(1)
        parameters = {
            key: value
            if torch.equal(value, other.parameters[key])
            else torch.where(choose, other.parameters[key], value)
            for key, value in self.parameters.items()
        }
        codes = torch.where(choose, other.codes, self.codes)
        errors = torch.where(rows, other.errors, self.errors)
        plain = torch.where(rows, other.plain, self.plain)
        return Solution(parameters, codes, errors, plain)


def stacked(pieces: Sequence[Tensor]) -> Tensor:
    """Return the rows of all ``pieces`` as one matrix."""
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces])


def feed_back(
    weight: Tensor,
    factor: Factor,
    scheme: Scheme,
    parameters: Mapping[str, Tensor],
    *,
    keep: bool = False,
) -> Solution:
    """Round ``weight`` ``[out, in]`` with ``parameters``.

    ``keep`` returns the terms as well, which are as large as the weight.
    """
    packer, order, root = packer_of(scheme), factor.order, factor.root
    width = GRIDS[scheme.grid].weights_per_code
    loops = strips.loops_for(weight)
    working = by_column(parameters)
    # A column is a row here, in processing order: of W where it is still to be rounded, then of E.
    error = weight.new_empty(weight.T.shape)
    torch.index_select(weight.T, 0, order, out=error)
    terms = torch.empty_like(error) if keep else None
    errors = weight.new_zeros(len(weight), dtype=torch.float64)
    codes: list[Tensor] = []
    for start in range(0, len(order), PANEL):
        stop = min(start + PANEL, len(order))
        pull = matmul(root[:start, start:stop].T, error[:start])
        for first in range(start, stop, STRIP):
            strip = slice(first, min(first + STRIP, stop))
            mine = pull[strip.start - start : strip.stop - start]
            addmm_(mine, root[start:first, strip].T, error[start:first])
            triangle, columns = root[strip, strip], order[strip]
            term = torch.empty_like(mine) if terms is None else terms[strip]
            grid = packer.points(working, scheme, columns) if loops else None
            if loops is not None and grid is not None:
                found = strips.round_strip(loops, error[strip], mine, triangle, grid, term)
                codes.append(found.T)
            else:
                rounded = _round if width == 1 else vectors.round_panels
                places = columns.tolist()
                codes += rounded(error[strip], mine, triangle, places, term, working, scheme)
            errors += term.square().sum(0, dtype=torch.float64)
    return Solution(
        {key: working[key].to(value.dtype) for key, value in parameters.items()},
        torch.cat(codes, 1)[:, (order[::width] // width).argsort()],
        errors,
        torch.zeros(len(weight), dtype=torch.bool, device=weight.device),
        terms,
    )


def by_column(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a float32 copy in which each column is contiguous: the loops read one at a time."""
    return {
        key: value.to(torch.float32, copy=True).T.contiguous().T
        for key, value in parameters.items()
    }


def _round(
    error: Tensor,
    pull: Tensor,
    triangle: Tensor,
    columns: list[int],
    terms: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
) -> list[Tensor]:
    """Round the ``columns`` of one strip; fill ``error`` and ``terms`` ``[n, out]``; return their codes."""
    packer, codes = packer_of(scheme), []
    for j, (column, pivot) in enumerate(zip(columns, triangle.diagonal().tolist(), strict=True)):
        place = slice(column, column + 1)
        target = error[j].add(pull[j], alpha=1 / pivot)
        codes.append(packer.encode(target.unsqueeze(1), parameters, scheme, place))
        value = packer.decode(codes[-1], parameters, scheme, place)[:, 0]
        torch.mul(target.sub_(value), pivot, out=terms[j])
        error[j] -= value
        pull[j + 1 :].addr_(triangle[j, j + 1 :], error[j])
    return codes
