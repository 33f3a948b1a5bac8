"""Observation of a block or the head: which statistics of its inputs a run needs, and those observed so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.model.accumulator import Accumulator
from quantforge.model.statistics import Statistic, Statistics, statistics_for_inputs
from quantforge.plans import Action, Plan
from quantforge.quantizers import needs
from quantforge.runtime.cache_scales import CachePeaks

if TYPE_CHECKING:
    from quantforge.model.stream import ModelStream
    from quantforge.planning.planner import Planned


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Which statistics of a block a run needs, and those observed so far.

    Attributes:
        inputs: keys of the shared inputs to observe.
        before_transforms: statistics of the inputs, observed on the unmodified block.
        after_transforms: statistics of the inputs, observed after the transforms.
        cache_peaks: largest magnitudes of keys and values in the KV cache; None if its scales are not measured.
        observe_again: whether the block is observed again after the transforms.
        statistics: observed statistics by key of the shared input.
    """

    inputs: Sequence[str]
    before_transforms: frozenset[Statistic]
    after_transforms: frozenset[Statistic]
    cache_peaks: CachePeaks | None
    observe_again: bool
    statistics: dict[str, Statistics]


def observes_after_transforms(plan: Plan) -> bool:
    """Return whether blocks have to be observed again after the transforms."""
    ranges = statistics_for_inputs(tensor.scheme.input for tensor in plan.tensors if tensor.scheme)
    scales = any(tensor.action is Action.MEASURE for tensor in plan.tensors)
    return bool(plan.transforms) and (bool(ranges) or scales)


def observe_head(planned: Planned, stream: ModelStream) -> Statistics:
    """Collect statistics of the input of a quantized head, the output of the final norm, after all blocks have run."""
    total = Accumulator(needs(planned.plan.rounder, importance=planned.recipe.rounding.weighs))
    for states in stream.final_hidden():
        total.add(states.reshape(-1, states.shape[-1]))
    return total.result()
