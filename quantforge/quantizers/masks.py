"""Masks: which weights of a row are made zero, by a score of each; all others keep their values.

Rows are judged alone: every output loses the same share of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.model.statistics import Statistics
from quantforge.numerics.products import matmul
from quantforge.numerics.threads import total
from quantforge.quantizers import rtn
from quantforge.quantizers.methods import Sparse
from quantforge.scheme import Sparsity


def least(scores: Tensor, sparsity: Sparsity, count: int) -> Tensor:
    """Return the mask of the lowest scores of each row, bool ``[out, in]``; of equal ones the first.

    Args:
        scores: ``[out, in]``; a pattern divides ``in``.
        sparsity: with a pattern, the lowest of each of its runs of columns are taken.
        count: how many of each row are taken without a pattern.
    """
    rows, columns = scores.shape
    if sparsity.stay:
        scores, count = scores.reshape(-1, sparsity.run), sparsity.run - sparsity.stay
    order = scores.argsort(dim=1, stable=True)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter_(1, order[:, :count], True).view(rows, columns)


def by_score(
    weights: Mapping[str, Tensor],
    columns: Tensor | None,
    statistics: Statistics,
    sparsity: Sparsity,
) -> dict[str, Sparse]:
    """Make the weights zero whose magnitude times ``columns`` ``[in]`` is least; None: whose magnitude is least.

    Raises:
        InputError: a weight is not finite.
    """
    found = {}
    for name, weight in weights.items():
        scores = rtn.checked(name, weight).abs()
        if columns is not None:
            scores = scores * columns
        gone = least(scores, sparsity, sparsity.zeros(weight.shape[1]))
        value = weight.masked_fill(gone, 0.0)
        found[name] = Sparse(value, figures=figures(weight, value, statistics))
    return found


def figures(before: Tensor, after: Tensor, statistics: Statistics) -> dict[str, float]:
    """Return the share of zeros, and the relative squared error of the outputs where statistics give it.

    The same for any number of threads.
    """
    found = {"zeros": int((after == 0).sum()) / after.numel()}
    change = after - before
    if statistics.hessian is not None:
        lost, whole = (total(matmul(m, statistics.hessian) * m) for m in (change, before))
    elif statistics.squares is not None:
        lost, whole = (total(m.square() * statistics.squares) for m in (change, before))
    else:
        return found
    return found | {"error": lost / whole if whole else 0.0}
