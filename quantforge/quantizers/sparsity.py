"""Sparsity: set weights of each row to zero by their cost, and compensate in the remaining weights.

Rows are pruned independently: each output loses the same share of its weights.

- *magnitude* prunes the weights with the smallest magnitude.
- *wanda* prunes those with the smallest magnitude times root mean square of their input (arXiv 2306.11695).
- *sparsegpt* compensates for each zero in the following columns (Frantar and Alistarh, arXiv 2301.00774). It is the
  loop of GPTQ with another grid: a weight is zero, or any number. In the terms of `hessian`, the error of a row is
  ``sum_j (E R)_j^2``, and term ``j`` vanishes if column ``j`` takes its target
  ``w_j + sum_(k<j) E_k R_kj / R_jj``. Setting it to zero costs the square of target times ``R_jj``: the weights with
  the lowest costs are pruned. With a pattern, the choice is made at its first column; without one, for a panel at once.
  Columns are processed in natural order, because the columns of a pattern are neighbors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.events import Event
from quantforge.model.statistics import Statistics
from quantforge.numerics.products import matmul
from quantforge.numerics.values import total
from quantforge.quantizers.gptq.hessian import Factor, factorize, require_finite_hessian
from quantforge.quantizers.matrices import to_finite_float32
from quantforge.scheme import Sparsity

PANEL = 128  # approximate number of columns pruned at once without a pattern


def sparsify(
    method: str,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    sparsity: Sparsity,
    damping: float,
) -> tuple[dict[str, Tensor], tuple[Event, ...]]:
    """Set a share of each matrix ``[out, in]`` that reads one shared input to zero.

    Args:
        method: ``magnitude``, ``wanda`` or ``sparsegpt``.
        weights: the matrices by name.
        statistics: statistics of the input: squares are required for wanda, the Hessian for sparsegpt.
        sparsity: share or pattern, which holds exactly in each row of the results; a pattern must divide the columns.
        damping: damping of the Hessian, as in `gptq`.

    Returns:
        The pruned matrices by the same names, and the event of a fallback, if there was one.

    Raises:
        InputError: a weight or the Hessian is not finite.
    """
    matrices = {name: to_finite_float32(name, weight) for name, weight in weights.items()}
    scale: Tensor | None = None  # column factors of the magnitudes
    events: tuple[Event, ...] = ()
    if method == "wanda":
        assert statistics.importance is not None  # the method requires it
        scale = statistics.importance.sqrt()
    elif method == "sparsegpt":
        assert statistics.hessian is not None
        names = ", ".join(weights)
        hessian = require_finite_hessian(statistics.hessian, names)
        order = torch.arange(len(hessian), device=hessian.device)
        was_observed = bool(hessian.diagonal().any())
        if was_observed and (factor := factorize(hessian, damping, order)) is not None:
            return {
                name: _sparsegpt(weight, factor, sparsity) for name, weight in matrices.items()
            }, ()
        reason = (
            "no damping makes the Hessian positive definite"
            if was_observed
            else "no activation was seen"
        )
        events = (Event("rtn-fallback", names, reason),)
        scale = hessian.diagonal().sqrt()
    sparse_weights = {}
    for name, weight in matrices.items():
        scores = weight.abs() if scale is None else weight.abs() * scale
        zeroed = _lowest_scores(scores, sparsity, sparsity.zeros(weight.shape[1]))
        sparse_weights[name] = weight.masked_fill(zeroed, 0.0)
    return sparse_weights, events


def sparsity_figures(before: Tensor, after: Tensor, statistics: Statistics) -> dict[str, float]:
    """Return the share of zeros and, if statistics allow, the relative squared error of the outputs.

    Independent of the number of threads.
    """
    metrics = {"sparsity": int((after == 0).sum()) / after.numel()}
    change = after - before
    if statistics.hessian is not None:
        lost_energy, total_energy = (
            total(matmul(m, statistics.hessian) * m) for m in (change, before)
        )
    elif statistics.squares is not None:
        lost_energy, total_energy = (
            total(m.square() * statistics.squares) for m in (change, before)
        )
    else:
        return metrics
    return metrics | {"error": lost_energy / total_energy if total_energy else 0.0}


def _lowest_scores(scores: Tensor, sparsity: Sparsity, count: int) -> Tensor:
    """Return a mask of the lowest scores of each row, bool ``[out, in]``; earlier columns win ties.

    Args:
        scores: ``[out, in]``; a pattern must divide ``in``.
        sparsity: with a pattern, the lowest scores of each run of columns are taken.
        count: number of scores taken from each row without a pattern.
    """
    rows, columns = scores.shape
    if sparsity.num_nonzero:
        scores, count = (
            scores.reshape(-1, sparsity.pattern_length),
            sparsity.pattern_length - sparsity.num_nonzero,
        )
    order = scores.argsort(dim=1, stable=True)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter_(1, order[:, :count], True).view(rows, columns)


def _sparsegpt(weight: Tensor, factor: Factor, sparsity: Sparsity) -> Tensor:
    """Return ``weight`` ``[out, in]`` pruned with compensation; ``factor`` has the columns in natural order."""
    columns = weight.shape[1]
    root, diagonal = factor.root, factor.root.diagonal()
    error, zeroed = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.bool)
    step = max(1, PANEL // sparsity.pattern_length) * sparsity.pattern_length
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        panel_targets = weight[:, start:stop]
        if start:
            offsets = matmul(error[:, :start], root[:start, start:stop])
            panel_targets = panel_targets + offsets / diagonal[start:stop]
        if not sparsity.num_nonzero:
            count = sparsity.zeros(stop) - sparsity.zeros(start)
            zeroed[:, start:stop] = _lowest_scores(
                (panel_targets * diagonal[start:stop]).abs(), sparsity, count
            )
        for first in range(start, stop, sparsity.pattern_length):
            last = min(first + sparsity.pattern_length, stop)
            if sparsity.num_nonzero:
                target = _targets(panel_targets, error, root, start, first, last)
                zeroed[:, first:last] = _lowest_scores(
                    (target * diagonal[first:last]).abs(), sparsity, sparsity.zeros(last - first)
                )
            for column in range(first, last):
                target = _targets(panel_targets, error, root, start, column, column + 1)[:, 0]
                value = target.masked_fill(zeroed[:, column], 0.0)
                error[:, column] = weight[:, column] - value
    return (weight - error).masked_fill_(zeroed, 0.0)


def _targets(
    panel_targets: Tensor, error: Tensor, root: Tensor, start: int, first: int, last: int
) -> Tensor:
    """Return targets of columns in the panel at ``start``, given ``panel_targets`` after the preceding panels."""
    offsets = matmul(error[:, start:first], root[start:first, first:last])
    strip_targets = panel_targets[:, first - start : last - start]
    return strip_targets + offsets / root.diagonal()[first:last]
