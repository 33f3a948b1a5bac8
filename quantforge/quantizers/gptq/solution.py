"""Solution of GPTQ for a matrix: codes and parameters, with the error of each row.

The steps of `gptq` compute several solutions and keep the better one of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.packers import get_packer
from quantforge.quantizers.gptq import column_loops
from quantforge.quantizers.gptq.hessian import Factor
from quantforge.quantizers.matrices import slice_parameters
from quantforge.scheme import Scheme


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Codes and parameters of a matrix, with the error of each row.

    Attributes:
        parameters: parameters of the packer, by name.
        codes: codes ``[out, in]``; one per code vector.
        errors: objective of each row, float64 ``[out]``.
        nearest: whether each row is rounded to nearest, bool ``[out]``.
        terms: ``E R`` ``[in, out]`` with columns in processing order, if kept.
    """

    parameters: dict[str, Tensor]
    codes: Tensor
    errors: Tensor
    nearest: Tensor
    terms: Tensor | None = None

    def targets(self, factor: Factor, scheme: Scheme) -> Tensor:
        """Return the targets ``[out, in]`` that were rounded to these codes; requires the terms."""
        assert self.terms is not None
        values = get_packer(scheme).decode(self.codes, self.parameters, scheme)
        width = GRIDS[scheme.grid].weights_per_code
        if width == 1:
            target_offsets = self.terms / factor.root.diagonal().unsqueeze(1)
        else:
            target_offsets = column_loops.vector_target_offsets(self.terms, factor.root, width)
        return values.add_(target_offsets[factor.order.argsort()].T)

    def row_slice(self, rows: slice) -> Solution:
        """Return views of some rows; a parameter of the whole matrix is returned unchanged."""
        parameters = slice_parameters(self.parameters, rows)
        return Solution(parameters, self.codes[rows], self.errors[rows], self.nearest[rows])

    def better_of(self, other: Solution, scheme: Scheme) -> Solution:
        """Return the better of two solutions, row by row unless rows share differing parameters; drops the terms."""
        if scheme.rows_share_parameters and not scheme.has_global_scale:
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
        nearest = torch.where(rows, other.nearest, self.nearest)
        return Solution(parameters, codes, errors, nearest)
