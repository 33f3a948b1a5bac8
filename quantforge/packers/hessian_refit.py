"""Fit parameters again for fixed codes, minimizing the error under the whole Hessian.

The quantizer knows the gradient ``G = H E^T`` of the error for some columns, and their part of the Hessian ``H``. The
packer knows which parameters these columns share and which values can be stored. With fixed codes the weights of a
group are linear in at most two numbers, so that a few sums give the error after any change of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from quantforge.numerics.products import matmul


@dataclass(frozen=True, slots=True, eq=False)
class FixedCodes:
    """The codes of a run of columns, and the quadratic objective for them.

    Attributes:
        codes: ``[columns, rows]``, as stored; ``[vectors, rows]`` if a code stands for a vector.
        gradient: gradient ``G`` for these columns, ``[columns, rows]``.
        hessian: Hessian of these columns, ``[columns, columns]``.
        first_column: index of the first column in the matrix.
    """

    codes: Tensor
    gradient: Tensor
    hessian: Tensor
    first_column: int

    @property
    def group(self) -> int:
        """Return the index of this run among the runs of equal size."""
        return self.first_column // len(self.gradient)


@dataclass(frozen=True, slots=True)
class RefitStep:
    """A step that fits the parameters shared by a run of columns again.

    Attributes:
        num_columns: columns that share the parameters.
        refit: takes float32 copies of all parameters, changes them in the rows where that lowers the error, and returns
            by how much it lowers the error of each row, float64 ``[rows]``, or of all rows, ``[1]``, if they share the
            parameter. Its second argument holds the fixed codes.
    """

    num_columns: int
    refit: Callable[[dict[str, Tensor], FixedCodes], Tensor]


class ScaleMoments:
    """Sums that give the error of a group as a function of its scale and zero, for ``values = scale * (codes - zero)``.

    ``codes`` are ``[columns, rows]``, with the zero subtracted. With ``shared_by_rows`` all rows have the same scale.
    """

    def __init__(self, codes: Tensor, fixed: FixedCodes, shared_by_rows: bool = False) -> None:
        gradient, hessian = fixed.gradient, fixed.hessian
        ones = hessian.sum(1, keepdim=True)

        def total(products: Tensor) -> Tensor:
            row_sums = products.sum(0, dtype=torch.float64)
            # Exact, because one long sum would depend on the number of threads.
            return row_sums.new_tensor([fsum(row_sums.tolist())]) if shared_by_rows else row_sums

        self.codes_gradient = total(codes * gradient)
        self.codes_codes = total(codes * matmul(hessian, codes))
        self.ones_gradient = total(gradient)
        self.ones_codes = total(ones * codes)
        self.ones_ones = ones.sum(dtype=torch.float64) * (codes.shape[1] if shared_by_rows else 1)

    def fit(self, scale: Tensor, shift: float = 0) -> Tensor:
        """Return the best scale if ``shift`` is added to the zero of ``scale``; both are float64 ``[rows]``."""
        gradient = self.codes_gradient - shift * self.ones_gradient
        cross_term = self.codes_codes - shift * self.ones_codes
        curvature = cross_term - shift * (self.ones_codes - shift * self.ones_ones)
        return (gradient + scale * cross_term) / curvature

    def gain(self, scale: Tensor, fitted: Tensor, shift: float = 0) -> Tensor:
        """Return how much the squared error falls if ``scale`` becomes ``fitted`` and the zero moves by ``shift``."""
        # The values move by step * (codes - zero) + offset.
        scale_change, offset_change = fitted - scale, -fitted * shift
        linear = scale_change * self.codes_gradient + offset_change * self.ones_gradient
        quadratic = (
            scale_change * scale_change * self.codes_codes
            + 2 * scale_change * offset_change * self.ones_codes
        )
        return 2 * linear - quadratic - offset_change * offset_change * self.ones_ones
