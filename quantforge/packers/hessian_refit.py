"""Parameters fitted again with the codes held, under the whole Hessian: what refinement asks a packer for.

A rounder holds the gradient ``G = H E^T`` of the error of some columns and their part of ``H``. The packer knows which
parameters these columns share and what can be stored in their place. With the codes held, the values of a group are
linear in at most two numbers, so that a few sums give the error after any change of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from quantforge.numerics.products import matmul


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Codes of a run of columns, and the objective around them.

    Attributes:
        codes: ``[columns, rows]``, as stored; of code vectors ``[vectors, rows]``.
        gradient: ``G`` of these columns, ``[columns, rows]``.
        hessian: of these columns, ``[columns, columns]``.
        first: the place of the first of them in the matrix.
    """

    codes: Tensor
    gradient: Tensor
    hessian: Tensor
    first: int

    @property
    def group(self) -> int:
        """Return the index of this run among runs of its size."""
        return self.first // len(self.gradient)


@dataclass(frozen=True, slots=True)
class Refit:
    """A step of fitting again the parameters that some neighbours share.

    Attributes:
        columns: how many neighbours.
        improve: takes float32 copies of all parameters, which it changes in the rows where that lowers the error, and
            the codes that are held. It returns by how much the error of each row falls, float64 ``[rows]``, or of all
            rows, ``[1]``, where they share the parameter.
    """

    columns: int
    improve: Callable[[dict[str, Tensor], Held], Tensor]


class ScaleMoments:
    """Sums that give the error of a group when ``values = scale * (codes - zero)`` and only scale and zero move.

    ``codes`` are ``[columns, rows]``, their zero subtracted; with ``whole`` all rows share the scale.
    """

    def __init__(self, codes: Tensor, held: Held, whole: bool = False) -> None:
        gradient, hessian = held.gradient, held.hessian
        ones = hessian.sum(1, keepdim=True)

        def total(products: Tensor) -> Tensor:
            rows = products.sum(0, dtype=torch.float64)
            # Exact, because one long sum would depend on the number of threads.
            return rows.new_tensor([fsum(rows.tolist())]) if whole else rows

        self.codes_gradient = total(codes * gradient)
        self.codes_codes = total(codes * matmul(hessian, codes))
        self.ones_gradient = total(gradient)
        self.ones_codes = total(ones * codes)
        self.ones_ones = ones.sum(dtype=torch.float64) * (codes.shape[1] if whole else 1)

    def fit(self, scale: Tensor, shift: float = 0) -> Tensor:
        """Return the best scale when the zero moves by ``shift`` from that of ``scale``; both float64 ``[rows]``."""
        gradient = self.codes_gradient - shift * self.ones_gradient
        mixed = self.codes_codes - shift * self.ones_codes
        square = mixed - shift * (self.ones_codes - shift * self.ones_ones)
        return (gradient + scale * mixed) / square

    def gain(self, scale: Tensor, fitted: Tensor, shift: float = 0) -> Tensor:
        """Return by how much the squared error falls from ``scale`` to ``fitted`` with the zero moved by ``shift``."""
        # The values move by step * (codes - zero) + offset.
        step, offset = fitted - scale, -fitted * shift
        linear = step * self.codes_gradient + offset * self.ones_gradient
        square = step * step * self.codes_codes + 2 * step * offset * self.ones_codes
        return 2 * linear - square - offset * offset * self.ones_ones
