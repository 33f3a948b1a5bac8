"""Experts that files hold stacked: read one by one where any of them is rounded, and as they are where all stay."""

from __future__ import annotations

from quantforge.architectures import architecture_of, text_config
from quantforge.architectures.match import match
from quantforge.architectures.routers import experts_of, is_stack
from quantforge.architectures.towers import BLOCK
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.unstacked import unstacked
from quantforge.errors import InputError, RefusedError
from quantforge.formats import GGUF, KEEP, format_of
from quantforge.formats.format_choice import base_scheme
from quantforge.planning.rules import Rules
from quantforge.recipe import Recipe


def one_by_one(checkpoint: Checkpoint) -> Checkpoint:
    """Return the view of a model with experts one by one; itself where its files hold no stacks that are understood.

    Only of a family that is not declared and whose files seem to hold stacks are declarations derived.

    Raises:
        InputError: its configuration states sizes that are not valid.
    """
    if architecture_of(checkpoint.config) is not None or not _seems_stacked(checkpoint):
        return unstacked(checkpoint)
    from quantforge.model.derive_checkpoint import derive_for

    stored = [entry.stored() for entry in checkpoint.entries.values()]
    try:
        return unstacked(checkpoint, derive_for(checkpoint.config, stored))
    except (InputError, RefusedError):
        return checkpoint


def _seems_stacked(checkpoint: Checkpoint) -> bool:
    """Return whether a tensor inside of a block has three dimensions, of which the first counts experts."""
    counts = experts_of(text_config(checkpoint.config))
    return any(
        is_stack(entry.shape, counts)
        for name, entry in checkpoint.entries.items()
        if BLOCK.match(name)
    )


def single_experts(checkpoint: Checkpoint, key: str, layers: Recipe) -> Checkpoint:
    """Return a source with its experts one by one where any of them is rounded or stacked again, else as it is.

    Args:
        checkpoint: the source.
        key: of the format, as `settled` found it.
        layers: what is asked for.

    Raises:
        InputError: the checkpoint does not fit its configuration, or a pattern matches nothing.
    """
    view = one_by_one(checkpoint)
    if view is checkpoint:
        return checkpoint
    if key == GGUF:
        return view  # its files stack them again
    stored = [entry.stored() for entry in view.entries.values()]
    matched = match(view.config, stored, view.declared)
    rules = Rules(layers, matched.tensors)
    plain = base_scheme(format_of(key), layers) == KEEP
    for tensor in matched.tensors:
        if tensor.expert >= 0:
            choice = rules.choose(tensor)
            if not plain if choice is None else choice.scheme is not None:
                return view
    return checkpoint
