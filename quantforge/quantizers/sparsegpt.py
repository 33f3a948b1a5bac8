"""SparseGPT: what is made zero is made up for by the columns after it (Frantar and Alistarh, arXiv 2301.00774).

The loop of GPTQ with another grid: a weight is zero, or any number. In the terms of `hessian` and `feedback` the error
of a row is ``sum_j (E R)_j^2``, and term ``j`` vanishes where column ``j`` takes its target
``w_j + sum_(k<j) E_k R_kj / R_jj``. Made zero, it costs the square of target times ``R_jj``: the weights with the
least costs go. With a pattern the choice is made when its first column comes up; without one, for a panel at once.
Columns are worked off as they lie, because the columns of a pattern are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.events import Event
from quantforge.model.statistics import Statistics
from quantforge.numerics.products import matmul
from quantforge.quantizers import rtn
from quantforge.quantizers.hessian import Factor, checked_hessian, factorise
from quantforge.quantizers.masks import by_score, figures, least
from quantforge.quantizers.methods import Sparse
from quantforge.recipe import Rounding
from quantforge.scheme import Sparsity

PANEL = 128  # columns whose share is decided at once, about


def sparsify(
    weights: Mapping[str, Tensor], statistics: Statistics, sparsity: Sparsity, rounding: Rounding
) -> dict[str, Sparse]:
    """Make weights zero and change those of later columns; see `Sparsifier`.

    Raises:
        InputError: a weight or the Hessian is not finite.
    """
    names = ", ".join(weights)
    if statistics.hessian is None:
        raise ValueError(f"{names}: sparsegpt needs the Hessian")
    hessian = checked_hessian(statistics.hessian, names)
    order = torch.arange(len(hessian), device=hessian.device)
    seen = bool(hessian.diagonal().any())
    factor = factorise(hessian, rounding.gptq.damping, order) if seen else None
    if factor is None:
        found = by_score(weights, hessian.diagonal().sqrt(), statistics, sparsity)
        why = "no damping makes the Hessian positive definite" if seen else "no activation was seen"
        first = next(iter(found))
        return found | {
            first: found[first]._replace(events=(Event("rounding-fallback", names, why),))
        }
    found = {}
    for name, weight in weights.items():
        value = solved(rtn.checked(name, weight), factor, sparsity)
        found[name] = Sparse(value, figures=figures(weight, value, statistics))
    return found


def solved(weight: Tensor, factor: Factor, sparsity: Sparsity) -> Tensor:
    """Return ``weight`` ``[out, in]`` with zeros; ``factor`` has the columns in their natural order."""
    columns = weight.shape[1]
    root, diagonal = factor.root, factor.root.diagonal()
    error, gone = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.bool)
    step = max(1, PANEL // sparsity.run) * sparsity.run
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        behind = weight[:, start:stop]
        if start:
            moved = matmul(error[:, :start], root[:start, start:stop])
            behind = behind + moved / diagonal[start:stop]
        if not sparsity.stay:
            count = sparsity.zeros(stop) - sparsity.zeros(start)
            gone[:, start:stop] = least((behind * diagonal[start:stop]).abs(), sparsity, count)
        for first in range(start, stop, sparsity.run):
            last = min(first + sparsity.run, stop)
            if sparsity.stay:
                target = _targets(behind, error, root, start, first, last)
                gone[:, first:last] = least(
                    (target * diagonal[first:last]).abs(), sparsity, sparsity.zeros(last - first)
                )
            for column in range(first, last):
                target = _targets(behind, error, root, start, column, column + 1)[:, 0]
                value = target.masked_fill(gone[:, column], 0.0)
                error[:, column] = weight[:, column] - value
    return (weight - error).masked_fill_(gone, 0.0)


def _targets(
    behind: Tensor, error: Tensor, root: Tensor, start: int, first: int, last: int
) -> Tensor:
    """Return targets of columns of the panel at ``start``; ``behind``: its targets after the panels before it."""
    moved = matmul(error[:, start:first], root[start:first, first:last])
    own = behind[:, first - start : last - start]
    return own + moved / root.diagonal()[first:last]
