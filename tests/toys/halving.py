"""A toy method: rounds plainly what it has halved and doubled again, and records the peaks of its inputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantforge.model.statistics import Statistics
from quantforge.quantizers import Rounded, rtn
from quantforge.recipe import Rounding
from quantforge.scheme import Scheme

SEEN: list[int] = []


def round_matrices(
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    schemes: Mapping[str, Scheme],
    rounding: Rounding,
) -> dict[str, Rounded]:
    """Round the matrices of one shared input."""
    SEEN.append(0 if statistics.peaks is None else len(statistics.peaks))
    halved = {name: weight / 2 * 2 for name, weight in weights.items()}
    return dict(rtn.round_matrices(halved, Statistics(), schemes, rounding))
