"""Refinement: sweeps of coordinate descent over codes and parameters, under the whole Hessian.

GPTQ never returns to a column. Here, with ``G = E (H + ridge I)``, the scale of each group is fitted in closed form
with its codes held, ``s += (q . G) / (q H q)``; for a grid with zero points the zeros beside the present one are tried
too, each with the scale fitted to it. Then each code in turn goes to the best point of its grid given all the others:
the one nearest to ``q_j + G_j / (H_jj + ridge)`` (CDQuant, arXiv 2406.17542). A new scale or zero is accepted only
where it lowers the error as stored, and a code cannot raise it, so that the error of a row never rises.

This is for grids whose values are ``scale * (code - zero)``.

``G`` is computed for a run of groups at a time and kept current inside of it. Two sweeps over a run before the next
cost one product with ``H``, about as much as GPTQ itself, and bring nearly what two of all columns in turn bring.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum

import torch
from torch import Tensor

from quantforge.grids import PerTensor
from quantforge.numerics.products import addmm_, matmul
from quantforge.packers import packer_of
from quantforge.packers.integer import LEAST_ZERO
from quantforge.quantizers import strips
from quantforge.quantizers.feedback import by_column
from quantforge.quantizers.hessian import Objective
from quantforge.scheme import Scheme

RUN = 256  # columns, at least, that share one product with the whole Hessian
TOGETHER = 2  # sweeps that share that product: over a run, its groups' parameters and then its codes, twice
STRIP = 32  # columns between two updates of the gradient of the run


class Refinement:
    """Codes and parameters of ``weight`` ``[out, in]``, getting better with every `sweep`."""

    def __init__(
        self,
        weight: Tensor,
        objective: Objective,
        scheme: Scheme,
        parameters: Mapping[str, Tensor],
        codes: Tensor,
    ) -> None:
        self.objective, self.scheme, self.packer = objective, scheme, packer_of(scheme)
        self._loops = strips.loops_for(weight, scheme)
        self._types = {key: value.dtype for key, value in parameters.items()}
        self._parameters = by_column(parameters)
        # Transposed, so that a column is contiguous.
        self._weight, self._codes = weight.T.contiguous(), codes.T.contiguous()
        self._error = torch.empty_like(self._weight)
        step = scheme.group_size(len(self._weight))
        for start in range(0, len(self._weight), step):
            columns = slice(start, start + step)
            values = self.packer.decode(codes[:, columns], self._parameters, scheme, columns)
            torch.sub(self._weight[columns], values.T, out=self._error[columns])

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters in their stored types."""
        return {key: value.to(self._types[key]) for key, value in self._parameters.items()}

    @property
    def codes(self) -> Tensor:
        """Return the codes ``[out, in]``."""
        return self._codes.T.contiguous()

    def sweep(self, times: int = TOGETHER) -> Tensor:
        """Go over all columns, over each run of them ``times`` times; return by how much the error of each row fell.

        float64 ``[out]``.
        With one scale for the whole matrix the rows share what its changes bring.
        """
        in_features, size = len(self._weight), self.scheme.group_size(len(self._weight))
        step = size * max(1, RUN // size)
        gained = self._weight.new_zeros(self._weight.shape[1], dtype=torch.float64)
        for start in range(0, in_features, step):
            gained += self._improve(start, min(start + step, in_features), times)
        return gained

    def _improve(self, start: int, stop: int, times: int) -> Tensor:
        hessian = self.objective.rows(start, stop)
        gradient = matmul(hessian, self._error)
        hessian = hessian[:, start:stop].contiguous()
        gained = self._weight.new_zeros(self._weight.shape[1], dtype=torch.float64)
        for _ in range(times):
            gained += self._improve_groups(gradient, hessian, start)
            for first in range(0, stop - start, STRIP):
                columns = slice(first, min(first + STRIP, stop - start))
                block = hessian[columns, columns]
                change, fallen = self._improve_codes(gradient[columns], block, start + first)
                gained += fallen
                addmm_(gradient, hessian[:, columns], change, alpha=-1)
        return gained

    def _improve_groups(self, gradient: Tensor, hessian: Tensor, start: int) -> Tensor:
        size = self.scheme.group_size(len(self._weight))
        gained = self._weight.new_zeros(self._weight.shape[1], dtype=torch.float64)
        for first in range(0, len(gradient), size):
            columns = slice(first, first + size)
            block = hessian[columns, columns]
            change, gain = self._improve_parameters(gradient[columns], block, start + first)
            gained += gain / (len(gained) // len(gain))
            addmm_(gradient, hessian[:, columns], change, alpha=-1)
        return gained

    def _improve_codes(self, slopes: Tensor, hessian: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Move each code of a strip of columns in turn; return the change of the values, and what it gains."""
        gradient = slopes.clone()
        if self._loops is not None:
            strip = slice(first, first + len(gradient))
            columns = torch.arange(strip.start, strip.stop)
            grid = strips.points(self._parameters, self.scheme, columns)
            self._codes[strip], change, gained = strips.improve_strip(
                self._loops, gradient, hessian, self._weight[strip], self._error[strip], grid
            )
            return change, gained
        change = torch.empty_like(gradient)
        pivots = hessian.diagonal().tolist()
        for j, pivot in enumerate(pivots):
            column = slice(first + j, first + j + 1)
            value = self._weight[column] - self._error[column]
            target = value.add(gradient[j], alpha=1 / pivot).T
            code = self.packer.encode(target, self._parameters, self.scheme, column)
            moved = self.packer.decode(code, self._parameters, self.scheme, column).T
            torch.sub(moved, value, out=change[j : j + 1])
            self._codes[column] = code.T
            self._error[column] = self._weight[column] - moved
            gradient[j + 1 :].addr_(hessian[j, j + 1 :], change[j], alpha=-1)
        fallen = change * (2 * slopes - matmul(hessian, change))
        return change, fallen.sum(0, dtype=torch.float64)

    def _improve_parameters(
        self, gradient: Tensor, hessian: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """Fit scale (and zero) of one group again; return the change of its values, and what it gains."""
        columns = slice(first, first + len(gradient))
        group = first // len(gradient)
        scales, zeros = self._parameters["scales"], self._parameters.get("zeros")
        zero = torch.zeros_like(scales[:, group]) if zeros is None else zeros[:, group].clone()
        whole = isinstance(self.scheme.granularity, PerTensor)
        moments = _Moments(self._codes[columns] - zero, gradient, hessian, whole)
        scale, chosen = scales[:, group].double(), scales[:, group].clone()
        best, moved = torch.zeros_like(scale), torch.zeros_like(chosen)
        for shift in (0,) if zeros is None else (0, -1, 1):
            fitted = moments.fit(scale, shift).to(self._types["scales"])
            gain = moments.gain(scale, fitted.double(), shift)
            better = (gain > best) & fitted.isfinite() & (fitted != 0)
            if shift:
                better &= (zero + shift >= LEAST_ZERO) & (zero + shift < 1 << self.scheme.bits)
            best, chosen = torch.where(better, gain, best), torch.where(better, fitted, chosen)
            moved = torch.where(better, shift, moved)
        scales[:, group] = chosen
        if zeros is not None:
            zeros[:, group] += moved
        codes = self._codes[columns].T
        value = self.packer.decode(codes, self._parameters, self.scheme, columns).T
        error = self._weight[columns] - value
        change = self._error[columns] - error
        self._error[columns] = error
        return change, best


class _Moments:
    """Sums that give the error of a group when ``values = scale * (codes - zero)`` and only scale and zero move."""

    def __init__(self, codes: Tensor, gradient: Tensor, hessian: Tensor, whole: bool) -> None:
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

    def fit(self, scale: Tensor, shift: float) -> Tensor:
        """Return the best scale when the zero moves by ``shift`` and the codes stay."""
        gradient = self.codes_gradient - shift * self.ones_gradient
        mixed = self.codes_codes - shift * self.ones_codes
        square = mixed - shift * (self.ones_codes - shift * self.ones_ones)
        return (gradient + scale * mixed) / square

    def gain(self, scale: Tensor, fitted: Tensor, shift: float) -> Tensor:
        """Return the amount by which the squared error falls."""
        # The values move by step * (codes - zero) + offset.
        step, offset = fitted - scale, -fitted * shift
        linear = step * self.codes_gradient + offset * self.ones_gradient
        square = step * step * self.codes_codes + 2 * step * offset * self.ones_codes
        return 2 * linear - square - offset * offset * self.ones_ones
