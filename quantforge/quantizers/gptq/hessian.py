"""The objective of GPTQ and of its refinement: ``E (H + diag(ridge)) E^T`` for each row of an error ``E``.

``H`` is the mean of ``x x^T`` over calibration tokens. The ridge has two parts. A fraction (the damping) of the mean of
the diagonal keeps the factorization stable. A fraction (the shrinkage) of the diagonal itself makes every correlation
of two columns that much weaker: sizes of activations are much the same on other text, correlations are not, and a
rounding that relies on them is worse there. With ``S`` the shrinkage, correlations count ``1 / (1 + S)``.

With the columns in processing order, ``H + diag(ridge) = R R^T`` and ``R`` upper triangular. Then the error of a row is
``sum_j (E R)_j^2``, and term ``j`` holds no later column: rounding the columns in turn, each to the value that makes
its own term least, is GPTQ. This one factor is a quarter of the arithmetic of inverting ``H`` and factorizing the
inverse, and better conditioned (the form of LDLQ: Chee et al., QuIP, arXiv 2307.13304, theorem 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.numerics.products import addmm_, matmul
from quantforge.numerics.threads import one_thread
from quantforge.numerics.values import finite

LADDER = (1, 10, 100)  # times the damping asked for, but never more than the mean itself
CONDITIONAL = 0.75  # see `Factor.scale_weights`; on a small llama flat from 0.5 to 1
FIRST = 128  # columns that most rows are judged by, see `Factor.below`
TRIANGLE = 512  # columns of a panel of the factorization
COLUMNS = 1024  # that are updated at once after a panel


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """``E (H + diag(ridge)) E^T`` with ``hessian`` float32 ``[in, in]`` and ``ridge`` float32 ``[in]``."""

    hessian: Tensor
    ridge: Tensor

    @property
    def diagonal(self) -> Tensor:
        """Return ``[in]``, the weight of each column on its own."""
        return self.hessian.diagonal() + self.ridge

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows ``start:stop`` of ``H + diag(ridge)``, a copy."""
        rows = self.hessian[start:stop].clone()
        rows.diagonal(start).add_(self.ridge[start:stop])
        return rows

    def exactly(self, error: Tensor) -> Tensor:
        """Return the objective of each row of ``error`` (float64) without and with the ridge, float64 ``[2, out]``."""
        found = error.new_zeros(2, len(error))
        for start in range(0, len(self.hessian), TRIANGLE):
            columns = slice(start, start + TRIANGLE)
            gradient = matmul(error, self.hessian[:, columns].double())
            found[0] += gradient.mul_(error[:, columns]).sum(1)
        found[1] = found[0] + self.of_ridge(error)
        return found

    def of_ridge(self, error: Tensor) -> Tensor:
        """Return the part of the ridge in the objective of each row of ``error``, float64 ``[out]``."""
        return error.square().mul_(self.ridge).sum(1, dtype=torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """``root`` is ``R``, float32 ``[in, in]``: ``H + diag(ridge) = R R^T`` with both sides in processing ``order``."""

    root: Tensor
    order: Tensor
    objective: Objective
    damping: float

    @property
    def scale_weights(self) -> Tensor:
        """Return ``[in]``, the weight of a squared error of each column in the choice of scales.

        That is ``H_jj + ridge_j`` when no later column makes up for it, ``R_jj^2`` when all of them do. GPTQ is in
        between: their geometric mean, `CONDITIONAL` of the way.
        """
        alone = self.objective.diagonal
        compensated = torch.empty_like(alone)
        compensated[self.order] = self.root.diagonal().square()
        return alone ** (1 - CONDITIONAL) * compensated**CONDITIONAL

    def below(self, error: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of rows of ``error`` ``[out, in]`` with an objective below ``limit`` ``[out]``, and that.

        Terms only add up, and in activation order the first columns have the largest: nearly every row that is not
        better is out after a few of them, for a small part of the price of a product with the Hessian.
        """
        rows = torch.arange(len(error), device=error.device)
        total = torch.zeros_like(limit)
        start, size = 0, error.shape[1]
        ordered = error.index_select(1, self.order[:FIRST])
        while start < size and len(rows):
            stop = min(start + max(FIRST, min(start, size // 8)), size)
            terms = matmul(ordered[:, :stop], self.root[:stop, start:stop])
            total += terms.square_().sum(1, dtype=torch.float64)
            stays = total < limit[rows]
            all_stay = bool(stays.all())
            if not all_stay:
                rows, total = rows[stays], total[stays]
            if start == 0:  # few rows come so far that their other columns are looked at
                ordered = error[rows].index_select(1, self.order)
            elif not all_stay:
                ordered = ordered[stays]
            start = stop
        return rows, total

    def all_below(self, error: Tensor, limit: float) -> bool:
        """Return whether the sum of the objectives of all rows of ``error`` ``[out, in]`` is below ``limit``."""
        total = 0.0
        for first in range(0, len(error), FIRST):
            ordered = error[first : first + FIRST].index_select(1, self.order)
            for start in range(0, error.shape[1], TRIANGLE):
                stop = min(start + TRIANGLE, error.shape[1])
                terms = matmul(ordered[:, :stop], self.root[:stop, start:stop])
                total += fsum(terms.square_().sum(1, dtype=torch.float64).tolist())
                if total >= limit:
                    return False
        return True


def checked_hessian(hessian: Tensor, names: str) -> Tensor:
    """Return ``hessian``; raise `InputError` with the first bad column when a value is not finite."""
    if not finite(hessian):
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
    """Factorize ``hessian`` ``[in, in]`` under the first damping of `LADDER` that works; None when none does.

    In float64. Memory beside the Hessian, in its size: 4 while it runs, 1 for ``R``.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean().item()
    backwards = order.flip(0)
    for times in LADDER:
        used = min(1.0, damping * times)
        # Of the reversed matrix, the lower Cholesky factor is R with rows and columns reversed.
        matrix = hessian[backwards.unsqueeze(1), backwards].double()
        ridge = shrinkage * diagonal + used * mean
        matrix.diagonal().add_(ridge[backwards])
        if _cholesky(matrix):
            root = matrix.float().tril_().flip(0, 1)
            return Factor(root, order, Objective(hessian, ridge), used)
        del matrix  # before the next one is made
    return None


def _cholesky(matrix: Tensor) -> bool:
    """Overwrite the lower half of ``matrix`` with its Cholesky factor; return whether it is positive definite.

    LAPACK's results depend on the number of threads, so that it factorizes and inverts small triangles on one thread
    only; all the rest is products.
    """
    size = len(matrix)
    for start in range(0, size, TRIANGLE):
        panel = matrix[start:, start : start + TRIANGLE]
        width = panel.shape[1]
        with one_thread():
            lower, failed = torch.linalg.cholesky_ex(panel[:width])
            if bool(failed) or not bool(lower.isfinite().all()):
                return False
            inverse = torch.linalg.solve_triangular(
                lower, torch.eye(width, dtype=matrix.dtype, device=matrix.device), upper=False
            )
        panel[:width] = lower
        panel[width:] = matmul(panel[width:], inverse.T)
        for first in range(start + width, size, COLUMNS):
            below, last = panel[first - start :], min(first + COLUMNS, size)
            addmm_(matrix[first:, first:last], below, below[: last - first].T, alpha=-1)
    return True
