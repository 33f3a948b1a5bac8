"""Magnitude: zero the weights that are least in size, whatever they multiply."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantforge.model.statistics import Statistics
from quantforge.quantizers.masks import by_score
from quantforge.quantizers.methods import Sparse
from quantforge.recipe import Rounding
from quantforge.scheme import Sparsity


def sparsify(
    weights: Mapping[str, Tensor], statistics: Statistics, sparsity: Sparsity, rounding: Rounding
) -> dict[str, Sparse]:
    """Make weights zero and leave the others as they are; see `Sparsifier`."""
    del rounding
    return by_score(weights, None, statistics, sparsity)
