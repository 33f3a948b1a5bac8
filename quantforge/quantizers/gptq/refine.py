"""Refinement: sweeps of coordinate descent over codes and parameters, under the whole Hessian.

GPTQ visits each column once. Here, with ``G = E (H + diag(ridge))``, the parameters of each group are fitted again with
its codes fixed, in the precision that its packer stores: a scale in closed form, ``s += (q . G) / (q H q)``, an integer
to one of its two neighbors. Then each code in order moves to the best point of its grid given all the others: the one
nearest to ``q_j + G_j / (H_jj + ridge_j)`` (CDQuant, arXiv 2406.17542). New parameters are accepted only if they lower
the error as stored, and a code cannot raise it, so the error of a row never increases.

Only for grids whose packer has `refit_steps`.

``G`` is computed for one panel of groups at a time and kept current within it. Two sweeps over a panel before the next
cost one product with ``H``, about as much as GPTQ itself, and gain nearly as much as two sweeps over all columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.grids import GRIDS
from quantforge.numerics.products import addmm_, matmul
from quantforge.packers import get_packer
from quantforge.packers.hessian_refit import FixedCodes
from quantforge.quantizers.gptq import column_loops
from quantforge.quantizers.gptq.hessian import Objective
from quantforge.scheme import Scheme

PANEL = 256  # minimum number of columns that share one product with the whole Hessian
# Sweeps over a panel (parameters of groups, then codes) that share that product
SWEEPS_PER_PANEL = 2
CHUNK = 32  # columns between updates of the panel's gradient


class Refinement:
    """Codes and parameters of ``weight`` ``[out, in]`` that each `sweep` improves."""

    def __init__(
        self,
        weight: Tensor,
        objective: Objective,
        scheme: Scheme,
        parameters: Mapping[str, Tensor],
        codes: Tensor,
    ) -> None:
        self.objective, self.scheme, self.packer = objective, scheme, get_packer(scheme)
        self._refit_steps = self.packer.refit_steps(scheme, weight.shape[1])
        self._widest = self._refit_steps[-1].num_columns  # columns that share a parameter
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

    def sweep(self, num_sweeps: int = SWEEPS_PER_PANEL) -> Tensor:
        """Update all columns, panel by panel, with ``num_sweeps`` sweeps over each panel.

        Returns:
            The decrease of each row's error, float64 ``[out]``; the gain of a parameter shared by rows is split evenly.
        """
        in_features, step = len(self._weight), self._widest * max(1, PANEL // self._widest)
        error_decrease = self._weight.new_zeros(self._weight.shape[1], dtype=torch.float64)
        for start in range(0, in_features, step):
            error_decrease += self._sweep_panel(start, min(start + step, in_features), num_sweeps)
        return error_decrease

    def _sweep_panel(self, start: int, stop: int, num_sweeps: int) -> Tensor:
        hessian = self.objective.rows(start, stop)
        gradient = matmul(hessian, self._error)
        hessian = hessian[:, start:stop].contiguous()
        error_decrease = self._weight.new_zeros(self._weight.shape[1], dtype=torch.float64)
        for _ in range(num_sweeps):
            error_decrease += self._refit_parameters(gradient, hessian, start)
            for first in range(0, stop - start, CHUNK):
                columns = slice(first, min(first + CHUNK, stop - start))
                chunk = slice(start + columns.start, start + columns.stop)
                block, gradient_rows = hessian[columns, columns], gradient[columns]
                weight, error = self._weight[chunk], self._error[chunk]
                codes, change, chunk_decrease = column_loops.improve_chunk(
                    self._loops,
                    gradient_rows,
                    block,
                    weight,
                    error,
                    chunk.start,
                    self._parameters,
                    self.scheme,
                )
                self._codes[self._code_slice(chunk)] = codes
                error_decrease += chunk_decrease
                addmm_(gradient, hessian[:, columns], change, alpha=-1)
        return error_decrease

    def _refit_parameters(self, gradient: Tensor, hessian: Tensor, start: int) -> Tensor:
        error_decrease = self._weight.new_zeros(self._weight.shape[1], dtype=torch.float64)
        for refit in self._refit_steps:
            for first in range(0, len(gradient), refit.num_columns):
                columns = slice(first, first + refit.num_columns)
                block_columns = slice(start + columns.start, start + columns.stop)
                block = hessian[columns, columns]
                codes = self._codes[self._code_slice(block_columns)]
                fixed_codes = FixedCodes(codes, gradient[columns], block, block_columns.start)
                gain = refit.refit(self._parameters, fixed_codes)
                error_decrease += gain / (len(error_decrease) // len(gain))
                addmm_(gradient, hessian[:, columns], self._update_error(block_columns), alpha=-1)
        return error_decrease

    def _update_error(self, columns: slice) -> Tensor:
        """Recompute the error after parameters of ``columns`` have changed; return its decrease."""
        error = self._weight[columns] - self._values(columns)
        change = self._error[columns] - error
        self._error[columns] = error
        return change

    def _values(self, columns: slice) -> Tensor:
        codes = self._codes[self._code_slice(columns)].T
        return self.packer.decode(codes, self._parameters, self.scheme, columns).T

    def _code_slice(self, columns: slice) -> slice:
        """Return the slice of codes of a run of columns."""
        return slice(columns.start // self._width, columns.stop // self._width)
