"""Refinement: sweeps of coordinate descent over codes and parameters, under the whole Hessian.

GPTQ never returns to a column. Here, with ``G = E (H + diag(ridge))``, the parameters of each group are fitted again
with its codes held, as its packer can store them: a scale in closed form, ``s += (q . G) / (q H q)``, an integer to one
of the two next to it. Then each code in turn goes to the best point of its grid given all the others: the one nearest
to ``q_j + G_j / (H_jj + ridge_j)`` (CDQuant, arXiv 2406.17542). New parameters are accepted only where they lower the
error as stored, and a code cannot raise it, so that the error of a row never rises.

This is for grids whose packer has `refits`.

``G`` is computed for a panel of groups at a time and kept current inside of it. Two sweeps over a panel before the next
cost one product with ``H``, about as much as GPTQ itself, and bring nearly what two of all columns in turn bring.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.numerics.products import addmm_, matmul
from quantforge.packers import packer_of
from quantforge.packers.hessian_refit import Held
from quantforge.quantizers.gptq import column_loops
from quantforge.quantizers.gptq.hessian import Objective
from quantforge.scheme import Scheme

PANEL = 256  # columns, at least, that share one product with the whole Hessian
TOGETHER = 2  # sweeps that share that product: over a panel, its groups' parameters and then its codes, twice
CHUNK = 32  # columns between two updates of the gradient of the panel


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
        self._refits = self.packer.refits(scheme, weight.shape[1])
        self._widest = self._refits[-1].columns  # that share a parameter
        self._width = GRIDS[scheme.grid].weights_per_code
        self._loops = column_loops.loops_for(weight)
        self._types = {key: value.dtype for key, value in parameters.items()}
        self._parameters = column_loops.column_major(parameters)
        # Transposed, so that a column is contiguous.
        self._weight, self._codes = weight.T.contiguous(), codes.T.contiguous()
        self._error = torch.empty_like(self._weight)
        for start in range(0, len(self._weight), self._widest):
            columns = slice(start, start + self._widest)
            torch.sub(self._weight[columns], self._values(columns), out=self._error[columns])

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters in their stored types."""
        return {key: value.to(self._types[key]) for key, value in self._parameters.items()}

    @property
    def codes(self) -> Tensor:
        """Return the codes ``[out, in]``."""
        return self._codes.T.contiguous()

    def sweep(self, times: int = TOGETHER) -> Tensor:
        """Go over all columns, over each panel of them ``times`` times.

        Returns:
            How much the error of each row fell, float64 ``[out]``; what a parameter of all rows gains is split evenly.
        """
        in_features, step = len(self._weight), self._widest * max(1, PANEL // self._widest)
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
            gained += self._improve_parameters(gradient, hessian, start)
            for first in range(0, stop - start, CHUNK):
                columns = slice(first, min(first + CHUNK, stop - start))
                chunk = slice(start + columns.start, start + columns.stop)
                block, slopes = hessian[columns, columns], gradient[columns]
                weight, error = self._weight[chunk], self._error[chunk]
                codes, change, fallen = column_loops.improve_chunk(
                    self._loops,
                    slopes,
                    block,
                    weight,
                    error,
                    chunk.start,
                    self._parameters,
                    self.scheme,
                )
                self._codes[self._of(chunk)] = codes
                gained += fallen
                addmm_(gradient, hessian[:, columns], change, alpha=-1)
        return gained

    def _improve_parameters(self, gradient: Tensor, hessian: Tensor, start: int) -> Tensor:
        gained = self._weight.new_zeros(self._weight.shape[1], dtype=torch.float64)
        for refit in self._refits:
            for first in range(0, len(gradient), refit.columns):
                columns = slice(first, first + refit.columns)
                place = slice(start + columns.start, start + columns.stop)
                block = hessian[columns, columns]
                codes = self._codes[self._of(place)]
                held = Held(codes, gradient[columns], block, place.start)
                gain = refit.improve(self._parameters, held)
                gained += gain / (len(gained) // len(gain))
                addmm_(gradient, hessian[:, columns], self._settle(place), alpha=-1)
        return gained

    def _settle(self, columns: slice) -> Tensor:
        """Bring the error up to date after parameters of ``columns`` have changed; return by how much it fell."""
        error = self._weight[columns] - self._values(columns)
        change = self._error[columns] - error
        self._error[columns] = error
        return change

    def _values(self, columns: slice) -> Tensor:
        codes = self._codes[self._of(columns)].T
        return self.packer.decode(codes, self._parameters, self.scheme, columns).T

    def _of(self, columns: slice) -> slice:
        """Return where the codes of a run of columns are."""
        return slice(columns.start // self._width, columns.stop // self._width)
