"""View of a source in the form that a named engine loads, where it does not load that of its files."""

from __future__ import annotations

from quantforge.checkpoint.reader import Checkpoint
from quantforge.formats.engine_families import converts
from quantforge.planning.drafting import draft_of


def as_loaded(checkpoint: Checkpoint, key: str, engine: str | None) -> Checkpoint:
    """Return the view of a source in the form that an engine loads; itself where its files have that form.

    Args:
        checkpoint: the source.
        key: of the format, as `settled` found it.
        engine: that has to load the result, None where none is named.

    Errors as `running_form`.
    """
    if engine != "transformers" or draft_of(key) is not None or not converts(checkpoint.config):
        return checkpoint
    from quantforge.model.running_form import running_form  # torch, which planning does without

    return running_form(checkpoint)
