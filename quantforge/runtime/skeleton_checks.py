"""Checks of a skeleton: a checkpoint has a tensor for all of its parameters and no more, and all of them are filled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.errors import InputError
from quantforge.model.names import Names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_names(names: Names, path: Path) -> None:
    """Raise InputError unless the checkpoint and the model hold the same."""
    left = [name for name in names.left_over if name not in set(names.ignored)]
    if left:
        raise InputError(
            f"{path}: {len(left)} tensor(s) have no place in the model, first: {', '.join(left[:5])}",
            "a model of this model_type has no such parameters",
            tensor=left[0],
        )
    if names.missing:
        raise _unfilled(path, names.missing)


def _unfilled(path: Path, missing: tuple[str, ...]) -> InputError:
    return InputError(
        f"{path}: {len(missing)} parameter(s) are in no file, first: {', '.join(missing[:5])}",
        "a complete checkpoint holds every tensor; fetch the model again",
    )


def check_filled(model: PreTrainedModel, path: Path) -> None:
    """Raise InputError unless every parameter and buffer of a model has a value."""
    values = [*model.named_parameters(), *model.named_buffers()]
    missing = tuple(name for name, value in values if value.is_meta)
    if missing:
        raise _unfilled(path, missing)
