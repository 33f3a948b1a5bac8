"""Interfaces of methods: the arguments of each kind, and its results.

A rounder turns the matrices that read one activation into codes. A transform rewrites one block, keeping its function,
so that it rounds better. Both get the options of a `Rounding`, never the whole recipe. A transform of the whole source
changes the model before anything else looks at it. What makes weights zero is one function (`sparsity.sparsify`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quantforge.events import Event
from quantforge.recipe import Rounding
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.checkpoint.reader import Checkpoint
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


class SourceTransform(Protocol):
    """Interface of the module of a transform of the whole source: rotations, permutations, folded norms."""

    def prepare(self, source: Checkpoint) -> Checkpoint:
        """Return the source as the model is from now on: it computes what it did, with other tensors.

        Only headers are read here, and nothing imports torch, since `plan` calls it; tensors are computed when they are
        read, see `quantforge.checkpoint.prepared`. Planning, the run and `verify --source` see the result alone.

        Raises:
            InputError: the family has no declarations, or not those that are needed.
        """
