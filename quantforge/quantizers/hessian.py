"""The objective of GPTQ and of the refinement: ``E (H + ridge I) E^T`` for each output row of an error ``E``.

``H`` is the mean of ``x x^T`` over calibration tokens. The ridge is a fraction (the damping) of the mean of its
diagonal: it keeps the factorisation stable, and stands for the directions that calibration has not seen. Where even
the raised ridges of the ladder leave ``H`` indefinite, there is no factor, and the caller rounds plainly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.errors import InputError

LADDER = (1, 10, 100)  # times the damping asked for, but never more than the mean itself


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """``E (H + ridge I) E^T`` with ``hessian`` float32 ``[in, in]``."""

    hessian: Tensor
    ridge: float

    @property
    def diagonal(self) -> Tensor:
        """``[in]``: the weight of each column on its own."""
        return self.hessian.diagonal() + self.ridge

    def gradient(self, error: Tensor, columns: slice | None = None) -> Tensor:
        """Return the ``columns`` of ``E (H + ridge I)`` for ``error`` ``[out, in]``."""
        columns = columns or slice(0, len(self.hessian))
        return (error @ self.hessian[:, columns]).add_(error[:, columns], alpha=self.ridge)

    def of_rows(self, error: Tensor) -> Tensor:
        """Return the error of each row, float64 ``[out]``."""
        return (self.gradient(error) * error).sum(1, dtype=torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """``(H + ridge I)^-1 = U^T U`` with rows and columns in processing ``order``; ``inverse`` is ``U``, float32."""

    inverse: Tensor
    order: Tensor
    objective: Objective
    damping: float


def checked_hessian(hessian: Tensor, names: str) -> Tensor:
    """Return ``hessian``; raise `InputError` with the first bad column when a value is not finite."""
    if not bool(hessian.isfinite().all()):
        column = int((~hessian.isfinite()).any(0).nonzero()[0])
        raise InputError(
            f"{names}: the activations of input column {column} are not finite",
            "a weight before this layer is damaged, or overflows in the type the model runs in",
            tensor=names,
        )
    return hessian


def factorise(hessian: Tensor, damping: float, order: Tensor) -> Factor | None:
    """Factorise under the first damping of the ladder that works; None when none does.

    Runs in float64 on one thread: LAPACK's results depend on the number of threads.
    """
    mean = hessian.diagonal().mean().item()
    backwards = order.flip(0)
    for factor in LADDER:
        used = min(1.0, damping * factor)
        # With rows and columns reversed, H = L L^T; turned around again, L^-1 is the upper triangular U.
        matrix = hessian[backwards][:, backwards].double()
        matrix.diagonal().add_(used * mean)
        lower = _one_thread_inverse(matrix)
        if lower is not None:
            inverse = lower.flip(0, 1).float()
            return Factor(inverse, order, Objective(hessian, used * mean), used)
    return None


def _one_thread_inverse(matrix: Tensor) -> Tensor | None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed) or not bool(lower.isfinite().all()):
            return None
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.solve_triangular(lower, identity, upper=False)
    finally:
        torch.set_num_threads(threads)
