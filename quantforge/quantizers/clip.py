"""Clipping: give up a little of the largest weights of a group, so that all others get a smaller step.

For each group a fraction ``f`` of its range is chosen that minimises ``sum_j h_j (w_j - q_j)^2``, ``q`` being the
rounding of the weights clamped to ``f`` times their range and ``h_j`` the mean of ``x_j^2``. The result is the clamped
weights: a rounder that covers their range has clipped (Lin et al., arXiv 2306.00978, appendix on weight clipping).

A scale search in the packer minimises the same error over clipping ranges too, finer and with a fit of the scale, and
leaves the weights whole for GPTQ's compensation. So this is for scales that cover the range (``--scales absmax``).
Queries and keys are never clipped: their errors multiply each other inside the softmax, which this objective
does not see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantforge.architectures.architecture import Rows
from quantforge.grids import PerTensor
from quantforge.packers import packer_of
from quantforge.scheme import Scheme

STEPS = 10
NARROWEST = 0.5  # of the range


def clip(
    weight: Tensor, scheme: Scheme, importance: Tensor, unclipped: Sequence[Rows] = ()
) -> Tensor:
    """Return ``weight`` ``[out, in]`` clamped group by group.

    Args:
        weight: float32.
        scheme: with its scale type.
        importance: ``[in]``, non-negative.
        unclipped: rows to leave as they are.
    """
    groups = _grouped(weight, scheme)
    low, high = (
        groups.amin(-1, keepdim=True).clamp(max=0),
        groups.amax(-1, keepdim=True).clamp(min=0),
    )
    if scheme.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    fractions = torch.ones_like(high)
    least = _errors(groups, weight, scheme, importance)
    for step in range(1, STEPS + 1):
        fraction = 1 - (1 - NARROWEST) * step / STEPS
        clamped = groups.clamp(low * fraction, high * fraction).view_as(weight)
        error = _errors(groups, clamped, scheme, importance)
        better = error < least
        least = torch.where(better, error, least)
        fractions[better] = fraction
    clamped = groups.clamp(low * fractions, high * fractions).view_as(weight)
    for rows in unclipped:
        clamped[rows] = weight[rows]
    return clamped


def _errors(groups: Tensor, clamped: Tensor, scheme: Scheme, importance: Tensor) -> Tensor:
    """Return the error of each of the ``groups``, ``[rows, groups, 1]``, when ``clamped`` ``[out, in]`` is rounded."""
    packer = packer_of(scheme)
    parameters = packer.fit(clamped, scheme)
    rounded = packer.decode(packer.encode(clamped, parameters, scheme), parameters, scheme)
    weighted = (rounded - groups.reshape_as(rounded)).square_().mul_(importance)
    return _grouped(weighted, scheme).sum(-1, keepdim=True)


def _grouped(matrix: Tensor, scheme: Scheme) -> Tensor:
    if isinstance(scheme.granularity, PerTensor):
        return matrix.reshape(1, 1, -1)
    return matrix.reshape(len(matrix), scheme.groups(matrix.shape[1]), -1)
