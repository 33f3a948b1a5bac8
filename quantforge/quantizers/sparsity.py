"""Zeros in weights: which of each row go, by the cost of each, and what those that stay do about it.

Rows are judged alone: every output loses the same share of its weights.

- *magnitude* makes the weights zero that are least in size, whatever they multiply.
- *wanda* makes those zero that are least in size times the root mean square of their input (arXiv 2306.11695).
- *sparsegpt* makes up for every zero by the columns after it (Frantar and Alistarh, arXiv 2301.00774). It is the loop
  of GPTQ with another grid: a weight is zero, or any number. In the terms of `hessian` and `feedback`, the error of a
  row is ``sum_j (E R)_j^2``, and term ``j`` vanishes where column ``j`` takes its target
  ``w_j + sum_(k<j) E_k R_kj / R_jj``. Made zero, it costs the square of target times ``R_jj``: the weights with the
  least costs go. With a pattern the choice is made when its first column comes up; without one, for a panel at once.
  Columns are taken as they lie, because the columns of a pattern are neighbors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.events import Event
from quantforge.model.statistics import Statistics
from quantforge.numerics.products import matmul
from quantforge.numerics.values import total
from quantforge.quantizers.gptq.hessian import Factor, checked_hessian, factorize
from quantforge.quantizers.matrices import checked
from quantforge.scheme import Sparsity

PANEL = 128  # columns whose share is decided at once, about


def sparsify(
    method: str,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    sparsity: Sparsity,
    damping: float,
) -> tuple[dict[str, Tensor], tuple[Event, ...]]:
    """Make part of every matrix ``[out, in]`` that reads one shared input zero.

    Args:
        method: ``magnitude``, ``wanda`` or ``sparsegpt``.
        weights: the matrices by name.
        statistics: of the input: with the squares for wanda, with the Hessian for sparsegpt.
        sparsity: fits the columns, and holds exactly in every row of the results.
        damping: of the Hessian, as in `gptq`.

    Returns:
        The matrices with zeros, by the same names, and the event of a fallback, if there was one.

    Raises:
        InputError: a weight or the Hessian is not finite.
    """
    matrices = {name: checked(name, weight) for name, weight in weights.items()}
    scale: Tensor | None = None  # of the columns, by which magnitudes are multiplied
    events: tuple[Event, ...] = ()
    if method == "wanda":
        assert statistics.importance is not None  # it is among the statistics that the method needs
        scale = statistics.importance.sqrt()
    elif method == "sparsegpt":
        assert statistics.hessian is not None
        names = ", ".join(weights)
        hessian = checked_hessian(statistics.hessian, names)
        order = torch.arange(len(hessian), device=hessian.device)
        seen = bool(hessian.diagonal().any())
        if seen and (factor := factorize(hessian, damping, order)) is not None:
            return {
                name: _solved(weight, factor, sparsity) for name, weight in matrices.items()
            }, ()
        why = "no damping makes the Hessian positive definite" if seen else "no activation was seen"
        events = (Event("rounding-fallback", names, why),)
        scale = hessian.diagonal().sqrt()
    found = {}
    for name, weight in matrices.items():
        scores = weight.abs() if scale is None else weight.abs() * scale
        gone = _least(scores, sparsity, sparsity.zeros(weight.shape[1]))
        found[name] = weight.masked_fill(gone, 0.0)
    return found, events


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


def _least(scores: Tensor, sparsity: Sparsity, count: int) -> Tensor:
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


def _solved(weight: Tensor, factor: Factor, sparsity: Sparsity) -> Tensor:
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
            gone[:, start:stop] = _least((behind * diagonal[start:stop]).abs(), sparsity, count)
        for first in range(start, stop, sparsity.run):
            last = min(first + sparsity.run, stop)
            if sparsity.stay:
                target = _targets(behind, error, root, start, first, last)
                gone[:, first:last] = _least(
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
