"""Observers of a block: each says what it wants to see while the calibration rows pass, and when.

Most of what is observed belongs to the model as the source has it; ranges of inputs and of the KV cache belong to the
model that is rounded, so that they are observed once more where transforms have changed the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from torch import Tensor, nn

from quantforge.model.block import BlockPart
from quantforge.model.statistics import Statistic, Statistics, of_inputs
from quantforge.plans import Action, Plan, TensorPlan
from quantforge.quantizers import METHODS, needs
from quantforge.runtime.kv_cache import CachePeaks, listening


class Moment(StrEnum):
    """When an observer looks at a block."""

    BEFORE = "before the transforms"
    AFTER = "after the transforms"


class Observer(Protocol):
    """Interface of an observer.

    Attributes:
        moment: when it looks.
        statistics: what it wants of every shared input that is read quantized.
        whole: whether the block has to run to its end for it.
    """

    moment: Moment
    statistics: frozenset[Statistic]
    whole: bool

    def listening(self, block: nn.Module) -> AbstractContextManager[object]:
        """Listen on the module of the block until the context ends."""

    def found(self) -> Iterable[tuple[str, Tensor]]:
        """Return what it has to write, by the name of the stored tensor."""


class InputObserver:
    """Observer of the inputs of linears alone: statistics for a method, or ranges of quantized inputs."""

    whole = False

    def __init__(self, moment: Moment, statistics: frozenset[Statistic]) -> None:
        self.moment, self.statistics = moment, statistics

    def listening(self, block: nn.Module) -> AbstractContextManager[object]:
        """Listen to nothing: the inputs of linears are observed for all observers at once."""
        del block
        return nullcontext()

    def found(self) -> Iterable[tuple[str, Tensor]]:
        """Return nothing: the statistics go to the rounder."""
        return ()


class CacheObserver:
    """Observer of keys and values, which writes the scales of an fp8 cache.

    Args:
        moment: when it looks.
        scales: planned for keys and values, in this order.
        kind: of the recipe, see `CachePeaks.scales`.
    """

    statistics: frozenset[Statistic] = frozenset()
    whole = True

    def __init__(self, moment: Moment, scales: Sequence[TensorPlan], kind: str) -> None:
        self.moment = moment
        self._scales, self._kind = scales, kind
        self._peaks = CachePeaks()

    def listening(self, block: nn.Module) -> AbstractContextManager[object]:
        """Listen to the keys and values that the attention of the block hands to its cache."""
        return listening(block, self._peaks)

    def found(self) -> Iterable[tuple[str, Tensor]]:
        """Return the scales."""
        values = self._peaks.scales(self._kind)
        return ((tensor.name, value) for tensor, value in zip(self._scales, values, strict=True))


def observers_of(
    plan: Plan, block: int, targets: Iterable[TensorPlan], *, importance: bool, cache: str
) -> list[Observer]:
    """Return the observers of a block.

    Args:
        plan: with the method, and the scales of a cache that are measured.
        block: its index.
        targets: linears of it that are quantized.
        importance: whether scales are searched by the mean squares of the columns.
        cache: the kind of the KV cache.

    Guided statistics are observed strip by strip (`quantforge.execution.guided_rounding`), and by none of these, who
    then look for the transforms alone.
    """
    moment = Moment.AFTER if plan.transforms else Moment.BEFORE
    found: list[Observer] = []
    if not plan.guide:
        wanted = needs(plan.method, importance=importance)
    else:
        wanted = frozenset[Statistic]().union(*(METHODS[word].needs for word in plan.transforms))
    if wanted or not plan.guide:
        found.append(InputObserver(Moment.BEFORE, wanted))
    if ranges := of_inputs(tensor.scheme.input for tensor in targets if tensor.scheme):
        found.append(InputObserver(moment, ranges))
    scales = [
        tensor
        for tensor in plan.tensors
        if tensor.part == block and tensor.action is Action.MEASURE
    ]
    if scales:
        found.append(CacheObserver(moment, scales, cache))
    return found


def observes_twice(plan: Plan) -> bool:
    """Return whether blocks are observed once more behind the transforms."""
    ranges = of_inputs(tensor.scheme.input for tensor in plan.tensors if tensor.scheme)
    scales = any(tensor.action is Action.MEASURE for tensor in plan.tensors)
    return bool(plan.transforms) and (bool(ranges) or scales)


def wanted_of(observers: Iterable[Observer]) -> frozenset[Statistic]:
    """Return what any of the observers wants of shared inputs."""
    return frozenset[Statistic]().union(*(observer.statistics for observer in observers))


def observe(
    part: BlockPart,
    observers: Iterable[Observer],
    inputs: Iterable[str],
    *,
    advance: bool,
    keep: int = 0,
) -> dict[str, Statistics]:
    """Run the calibration rows through a block, and let observers see what they want.

    Args:
        part: the block.
        observers: those that look now.
        inputs: keys of the shared inputs that are read quantized.
        advance: replace the hidden states by the outputs of the block in the same pass.
        keep: then keep the states of so many rows as they were.

    Returns:
        The statistics that any of the observers wants, by the key of the shared input.
    """
    observers = list(observers)
    wanted = wanted_of(observers)
    with ExitStack() as hooks:
        for observer in observers:
            hooks.enter_context(observer.listening(part.module))
        return part.observe(
            dict.fromkeys(inputs, wanted),
            advance=advance,
            keep=keep,
            whole=any(observer.whole for observer in observers),
        )


def with_ranges(
    first: Mapping[str, Statistics], second: Mapping[str, Statistics]
) -> dict[str, Statistics]:
    """Return the first statistics of inputs, with the ranges of the second where these were observed."""
    return {
        key: replace(found, peaks=second[key].peaks, histogram=second[key].histogram)
        if key in second
        else found
        for key, found in first.items()
    }
