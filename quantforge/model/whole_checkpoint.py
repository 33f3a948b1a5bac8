"""Check that a checkpoint of a family without declarations is whole: holds every parameter that transformers builds.

Declarations account for every tensor while a run is planned. Without them linears are found by their names, and what is
not there is not missed; a loader would fill it with random numbers. So the model is built without memory, and asked.
"""

from __future__ import annotations

from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError
from quantforge.model.names import Names
from quantforge.model.skeleton import build


def check_whole(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is not whole; one that transformers does not build is left alone.

    Raises:
        InputError: parameters are missing, or have another shape than the configuration asks for.
    """
    try:
        model = build(checkpoint.config)
    except InputError:
        return
    names = Names(model, [entry.stored() for entry in checkpoint.entries.values()])
    missing = names.missing
    if len(missing) > len(names.sources):
        return  # the checkpoint is of another class of the family, whose names are not these
    if missing:
        raise InputError(
            f"{checkpoint.path}: {len(missing)} parameter(s) are in no file, first: {', '.join(missing[:5])}",
            "a complete checkpoint holds every tensor; fetch the model again",
            file=str(checkpoint.path),
        )
