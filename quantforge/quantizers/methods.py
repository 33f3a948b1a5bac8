"""Interfaces of methods: the arguments of each kind, and its results.

A rounder turns the matrices that read one activation into codes. A transform rewrites one block, keeping its function,
so that it rounds better. Both are told what they may decide by a `Rounding`, never by the whole recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quantforge.events import Event
from quantforge.recipe import Rounding
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.model.block import BlockPart
    from quantforge.model.statistics import Statistics
    from quantforge.quantizers import Rounded


class Rounder(Protocol):
    """Interface of the module of a rounder."""

    def round_shared(
        self,
        weights: Mapping[str, Tensor],
        statistics: Statistics,
        schemes: Mapping[str, Scheme],
        rounding: Rounding,
    ) -> dict[str, Rounded]:
        """Round every matrix ``[out, in]`` that reads one shared input; keys are those of ``weights``.

        ``statistics`` of that input hold at least what the method's record needs.
        """


class Transformed(NamedTuple):
    """Report of a transform on the block that it has changed.

    Attributes:
        statistics: of the inputs as they are now, by `SharedInput.key`.
        events: what could not be done.
        figures: plain numbers and words for the journal and the manifest, by `SharedInput.key`.
    """

    statistics: dict[str, Statistics]
    events: tuple[Event, ...]
    figures: dict[str, dict[str, Any]]


class Transform(Protocol):
    """Interface of the module of a transform."""

    def apply(
        self,
        part: BlockPart,
        statistics: Mapping[str, Statistics],
        schemes: Mapping[str, Scheme],
        rounding: Rounding,
        layers: Mapping[str, LayerScheme] | None = None,
    ) -> Transformed:
        """Change one block in place, so that it computes what it did and rounds better.

        Args:
            part: the block.
            statistics: by `SharedInput.key`.
            schemes: of the linears that will be quantized.
            rounding: how they will be.
            layers: the same linears with the schemes of their inputs; None where inputs are taken as they are.
        """
