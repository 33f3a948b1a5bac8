"""Objective of GPTQ and of its refinement: ``E (H + diag(ridge)) E^T`` for each row of an error ``E``, and its factor.

``H`` is the mean of ``x x^T`` over calibration tokens. The ridge has two parts. A fraction (the damping) of the mean of
the diagonal keeps the factorization stable. A fraction (the shrinkage) of the diagonal itself weakens all correlations
between columns: magnitudes of activations are similar on other text, correlations are not, and a rounding that relies
on them is worse there. With shrinkage ``S``, correlations are multiplied by ``1 / (1 + S)``.

With the columns in processing order, ``H + diag(ridge) = R R^T`` with ``R`` upper triangular. Then the error of a row
is ``sum_j (E R)_j^2``, and term ``j`` contains no later column: GPTQ rounds the columns in order, each to the value
that minimizes its own term. Computing this factor takes a quarter of the arithmetic of inverting ``H`` and factorizing
the inverse, and is better conditioned (the form of LDLQ: Chee et al., QuIP, arXiv 2307.13304, theorem 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.numerics.products import addmm_, matmul
from quantforge.numerics.threads import one_thread
from quantforge.numerics.values import all_finite

DAMPING_MULTIPLES = (1, 10, 100)  # multiples of the requested damping that are tried, up to 1
COMPENSATED_SHARE = 0.75  # see `Factor.scale_weights`; on a small llama flat from 0.5 to 1
FIRST_COLUMNS = 128  # columns that decide most rows, see `Factor.rows_below`
PANEL_COLUMNS = 512  # columns of a panel of the factorization
UPDATE_COLUMNS = 1024  # columns updated at once after a panel


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """The objective ``E (H + diag(ridge)) E^T``: ``hessian`` float32 ``[in, in]`` and ``ridge`` float32 ``[in]``."""

    hessian: Tensor
    ridge: Tensor

    @property
    def diagonal(self) -> Tensor:
        """Return the diagonal of ``H + diag(ridge)``, ``[in]``."""
        return self.hessian.diagonal() + self.ridge

    def rows(self, start: int, stop: int) -> Tensor:
        """Return a copy of rows ``start:stop`` of ``H + diag(ridge)``."""
        rows = self.hessian[start:stop].clone()
        rows.diagonal(start).add_(self.ridge[start:stop])
        return rows

    def evaluate_float64(self, error: Tensor) -> Tensor:
        """Return the objective of each row of ``error`` (float64) without and with the ridge, float64 ``[2, out]``."""
        values = error.new_zeros(2, len(error))
        for start in range(0, len(self.hessian), PANEL_COLUMNS):
            columns = slice(start, start + PANEL_COLUMNS)
            gradient = matmul(error, self.hessian[:, columns].double())
            values[0] += gradient.mul_(error[:, columns]).sum(1)
        values[1] = values[0] + self.ridge_part(error)
        return values

    def ridge_part(self, error: Tensor) -> Tensor:
        """Return the ridge's part of the objective of each row of ``error``, float64 ``[out]``."""
        return error.square().mul_(self.ridge).sum(1, dtype=torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """Factor of a Hessian: ``H + diag(ridge) = R R^T`` with rows and columns in processing ``order``.

    ``root`` is ``R``, float32 ``[in, in]``.
    """

    root: Tensor
    order: Tensor
    objective: Objective
    damping: float

    @property
    def scale_weights(self) -> Tensor:
        """Return the weight of each column's squared error when choosing scales, ``[in]``.

        It is ``H_jj + ridge_j`` if no later column compensates for the error, and ``R_jj^2`` if all of them do. GPTQ is
        in
        between: a geometric mean with exponent `COMPENSATED_SHARE`.
        """
        uncompensated = self.objective.diagonal
        compensated = torch.empty_like(uncompensated)
        compensated[self.order] = self.root.diagonal().square()
        return uncompensated ** (1 - COMPENSATED_SHARE) * compensated**COMPENSATED_SHARE

    def rows_below(self, error: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of rows of ``error`` ``[out, in]`` with objectives below ``limit`` ``[out]``, and those.

        All terms are positive, and in activation order the first columns have the largest: nearly every row above its
        limit is excluded after a few columns, for a small part of the cost of a product with the Hessian.
        """
        rows = torch.arange(len(error), device=error.device)
        total = torch.zeros_like(limit)
        start, size = 0, error.shape[1]
        ordered = error.index_select(1, self.order[:FIRST_COLUMNS])
        while start < size and len(rows):
            stop = min(start + max(FIRST_COLUMNS, min(start, size // 8)), size)
            terms = matmul(ordered[:, :stop], self.root[:stop, start:stop])
            total += terms.square_().sum(1, dtype=torch.float64)
            is_below = total < limit[rows]
            all_are_below = bool(is_below.all())
            if not all_are_below:
                rows, total = rows[is_below], total[is_below]
            if start == 0:  # few rows remain that need their other columns
                ordered = error[rows].index_select(1, self.order)
            elif not all_are_below:
                ordered = ordered[is_below]
            start = stop
        return rows, total

    def is_total_below(self, error: Tensor, limit: float) -> bool:
        """Return whether the sum of the objectives of all rows of ``error`` ``[out, in]`` is below ``limit``."""
        total = 0.0
        for first in range(0, len(error), FIRST_COLUMNS):
            ordered = error[first : first + FIRST_COLUMNS].index_select(1, self.order)
            for start in range(0, error.shape[1], PANEL_COLUMNS):
                stop = min(start + PANEL_COLUMNS, error.shape[1])
                terms = matmul(ordered[:, :stop], self.root[:stop, start:stop])
                total += fsum(terms.square_().sum(1, dtype=torch.float64).tolist())
                if total >= limit:
                    return False
        return True


def require_finite_hessian(hessian: Tensor, names: str) -> Tensor:
    """Return ``hessian``; raise `InputError` naming the first bad column if a value is not finite."""
    if not all_finite(hessian):
        column = int((~hessian.isfinite()).any(0).nonzero()[0])
        raise InputError(
            f"{names}: the activations of input column {column} are not finite",
            "a weight before this layer is damaged, or overflows in the type the model runs in",
            tensor=names,
        )
    return hessian


def factorize(
    hessian: Tensor, damping: float, order: Tensor, shrinkage: float = 0.0
) -> Factor | None:
    """Factorize ``hessian`` ``[in, in]`` with the first damping of `DAMPING_MULTIPLES` that works; None if none does.

    Computed in float64. Memory in copies of the Hessian: 4 during factorization, 1 for ``R``.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean().item()
    reversed_order = order.flip(0)
    for multiple in DAMPING_MULTIPLES:
        used_damping = min(1.0, damping * multiple)
        # Of the reversed matrix, the lower Cholesky factor is R with rows and columns reversed.
        matrix = hessian[reversed_order.unsqueeze(1), reversed_order].double()
        ridge = shrinkage * diagonal + used_damping * mean
        matrix.diagonal().add_(ridge[reversed_order])
        if _cholesky(matrix):
            root = matrix.float().tril_().flip(0, 1)
            return Factor(root, order, Objective(hessian, ridge), used_damping)
        del matrix  # free it before the next attempt
    return None


def _cholesky(matrix: Tensor) -> bool:
    """Overwrite the lower half of ``matrix`` with its Cholesky factor; return whether it is positive definite.

    LAPACK's results depend on the number of threads, so it only factorizes and inverts small triangles, on one thread;
    everything else is matrix products.
    """
    size = len(matrix)
    for start in range(0, size, PANEL_COLUMNS):
        panel = matrix[start:, start : start + PANEL_COLUMNS]
        width = panel.shape[1]
        with one_thread():
            lower_factor, failed = torch.linalg.cholesky_ex(panel[:width])
            if bool(failed) or not bool(lower_factor.isfinite().all()):
                return False
            inverse = torch.linalg.solve_triangular(
                lower_factor,
                torch.eye(width, dtype=matrix.dtype, device=matrix.device),
                upper=False,
            )
        panel[:width] = lower_factor
        panel[width:] = matmul(panel[width:], inverse.T)
        for first in range(start + width, size, UPDATE_COLUMNS):
            remaining, last = panel[first - start :], min(first + UPDATE_COLUMNS, size)
            addmm_(matrix[first:, first:last], remaining, remaining[: last - first].T, alpha=-1)
    return True
