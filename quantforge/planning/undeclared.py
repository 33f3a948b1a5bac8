"""Declarations for families that have none, where a recipe needs them: derived from the code of transformers.

Only then is torch imported while planning: what reads activations has to know which linears read the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantforge.architectures.match import Matched, match, needs_architecture
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint


def with_declarations(checkpoint: Checkpoint, matched: Matched, what: str) -> Matched:
    """Return a match with declarations: the same, or one by derived ones.

    Args:
        checkpoint: the model.
        matched: of it.
        what: needs them, as in ``--method WHAT``.

    Raises:
        InputError: none can be derived; the message says why.
    """
    if matched.architecture is not None:
        return matched
    if matched.draft:
        raise needs_architecture(matched, what)
    try:
        return derived_match(checkpoint)
    except (InputError, RefusedError) as error:
        raise needs_architecture(matched, what, error.message) from error


def derived_match(checkpoint: Checkpoint, *, whole: bool = False) -> Matched:
    """Match a checkpoint by derived declarations.

    Raises:
        InputError: as `derive_for` and `match`.
        RefusedError: as `derive_for`, or files hold stacks of experts in the other orientation.
    """
    from quantforge.model.derive_checkpoint import derive_for

    entries = [entry.stored() for entry in checkpoint.entries.values()]
    found = derive_for(checkpoint.config, entries, whole=whole)
    if found.turned:
        raise RefusedError(
            f"its files hold {min(found.turned)} the other way around", "--method rtn"
        )
    return match(checkpoint.config, entries, found)


def events(matched: Matched, config: Mapping[str, Any]) -> tuple[Event, ...]:
    """Return the event of a model that was derived as one of another ``model_type``, if it was."""
    if matched.architecture is None or matched.architecture.derived is None:
        return ()
    from quantforge.model.model_class import known_type

    _, event = known_type(config)
    return (event,) if event is not None else ()
