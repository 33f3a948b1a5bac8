"""A source, and the names of its result, as the loader of a named engine takes them.

The only such loader is that of transformers. It is asked where the engine is named, with torch; what a plan without an
engine cannot tell from declarations is left open, for the publication of the result.
"""

from __future__ import annotations

from dataclasses import replace

from quantforge.architectures.configuration import untied
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import RefusedError
from quantforge.formats import GGUF
from quantforge.formats.decoded import plain_config
from quantforge.formats.engine_families import TRANSFORMERS, converts
from quantforge.plans import Draft


def as_loaded(checkpoint: Checkpoint, key: str, engine: str | None) -> Checkpoint:
    """Return the view of a source in the form that an engine loads; itself where its files have that form.

    Args:
        checkpoint: the source.
        key: of the format, as `settled` found it.
        engine: that has to load the result, None where none is named.

    Errors as `running_form`.
    """
    if engine != TRANSFORMERS or key == GGUF or not converts(checkpoint.config):
        return checkpoint
    from quantforge.model.running_form import running_form  # torch, which planning does without

    return running_form(checkpoint)


def names_settled(engine: str | None, checkpoint: Checkpoint, draft: Draft) -> Draft:
    """Return a draft whose verdict on a named engine is settled by the names of its tensors.

    Args:
        engine: that has to load the result, None where none is named.
        checkpoint: the source.
        draft: with verdicts.

    Raises:
        RefusedError: transformers would not find its tensors.
    """
    if engine != TRANSFORMERS or all(verdict.loads is not None for verdict in draft.engines):
        return draft
    from quantforge.model.transformers_loading import settled  # torch, which planning does without

    config = plain_config(checkpoint)
    config = untied(config) if draft.untie else config
    engines = settled(draft.engines, config, draft.tensors)
    for verdict in engines:
        if verdict.engine == engine and verdict.loads is False:
            raise RefusedError(
                f"{engine} does not load this: {verdict.reason}",
                f"name the tensors as {engine} saves this family, or drop --for {engine}",
            )
    return replace(draft, engines=engines)
