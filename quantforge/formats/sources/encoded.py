"""One weight of a source in low precision: its name and shape, the tensors that hold it, and who decodes rows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantforge.checkpoint.prepared import PreparedCheckpoint, Rows, prepared_checkpoint
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError
from quantforge.formats.decoded import plain_config

PRECISION = "precision"  # the subject of what is said of it, see `Checkpoint.facts`


@dataclass(frozen=True, slots=True)
class Encoded:
    """One weight in low precision.

    Attributes:
        name: of the weight that the codes stand for.
        shape: of that weight.
        stored: names of the tensors that hold it.
        rows: decodes rows of it, see `quantforge.checkpoint.prepared`.
        precision: how it is held, for people: ``mxfp4``.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    rows: Rows
    precision: str


def decoding(
    checkpoint: Checkpoint, weights: Iterable[Encoded], left_out: Iterable[str] = ()
) -> PreparedCheckpoint:
    """Return the view of a source in which its weights are plain, of the type of the model.

    Args:
        checkpoint: the source.
        weights: what is decoded.
        left_out: tensors that only matter beside the codes: ranges of inputs.

    Raises:
        InputError: a weight is stored plainly as well.
    """
    weights = list(weights)
    used = {name for weight in weights for name in weight.stored}
    for weight in weights:
        if weight.name in checkpoint.entries and weight.name not in used:
            raise InputError(
                f"{weight.name}: stored as it is, and as {' and '.join(weight.stored)}",
                "every tensor has to be there once: fetch the checkpoint again",
                tensor=weight.name,
            )
    held: Counter[str] = Counter()
    added, dtype = {}, checkpoint.dtype
    for weight in weights:
        held[weight.precision] += sum(checkpoint.entries[name].nbytes for name in weight.stored)
        first = checkpoint.entries[weight.stored[0]]
        added[weight.name] = replace(first, name=weight.name, dtype=dtype, shape=weight.shape)
    return prepared_checkpoint(
        checkpoint,
        {weight.name: weight.rows for weight in weights},
        config=plain_config(checkpoint),
        added=added,
        left_out=used.union(left_out),
        facts={PRECISION: ", ".join(words for words, _ in held.most_common())},
    )
