"""Planners of formats that plan whole models instead of module by module."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from quantforge.formats import format_of
from quantforge.plans import Draft
from quantforge.recipe import Recipe

if TYPE_CHECKING:
    from quantforge.architectures.match import Matched
    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.scheme import Scheme


class Drafting(Protocol):
    """Interface of a planner of whole models."""

    def __call__(
        self,
        recipe: Recipe,
        checkpoint: Checkpoint,
        matched: Matched,
        *,
        observed: bool,
        given: Mapping[str, Scheme] | None = None,
    ) -> Draft:
        """Plan one.

        Args:
            recipe: what to do.
            checkpoint: the model.
            matched: its tensors.
            observed: whether statistics of activations will be known.
            given: schemes of modules that are quantized already; everything else keeps its type.
        """


def draft_of(key: str) -> Drafting | None:
    """Return how a format plans a whole model; None for one that is planned module by module."""
    planner = format_of(key).ABOUT.planner
    if not planner:
        return None
    draft: Drafting = import_module(planner).draft
    return draft
