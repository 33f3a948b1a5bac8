"""Diff: how two models of any formats differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.checkpoint.hub import resolve
from quantforge.verbs.caller_state import torch_defaults

if TYPE_CHECKING:
    from quantforge.verification.difference import Difference


@torch_defaults()
def diff(first: str | Path, second: str | Path, *, offline: bool = False) -> Difference:
    """Compare what was done, tensors, decoded values and files of two models.

    Raises:
        InputError: a model is missing or cannot be read.
    """
    from quantforge.verification.difference import difference

    return difference(*(resolve(str(model), offline) for model in (first, second)))
