"""Sums of a quadratic form, ``sum_i e_i H e_i^T``, of many matrices under one symmetric ``H``.

Products with what is left of the diagonal equal those with what is right of it: half of ``H``, kept as panels of its
columns, does all of the work.
"""

from __future__ import annotations

from torch import Tensor

from quantforge.numerics.products import matmul
from quantforge.numerics.threads import total

PANEL = 256  # columns


class QuadraticForm:
    """The form of ``hessian`` ``[in, in]``, which is symmetric; half as large a copy of it is kept."""

    def __init__(self, hessian: Tensor) -> None:
        self._panels: list[Tensor] = []
        for start in range(0, len(hessian), PANEL):
            panel = hessian[start:, start : start + PANEL].clone()
            panel[: panel.shape[1]] *= 0.5  # both halves of the square on the diagonal are there
            self._panels.append(panel)

    def __call__(self, error: Tensor) -> float:
        """Return the sum over the rows of ``error`` ``[out, in]``."""
        found, start = 0.0, 0
        for panel in self._panels:
            left = error[:, start:].contiguous()
            width = panel.shape[1]
            found += total(matmul(left, panel).mul_(left[:, :width]))
            start += width
        return 2 * found
