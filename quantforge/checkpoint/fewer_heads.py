"""A checkpoint without the heads that predict further tokens: an ordinary one, whose configuration counts none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantforge.architectures.draft_heads import without_heads
from quantforge.architectures.match import match
from quantforge.checkpoint.prepared import prepared_checkpoint
from quantforge.errors import UsageError

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

FACT = "dropped heads"  # of `Checkpoint.facts`: how many tensors of how many bytes


def fewer_heads(source: Checkpoint) -> Checkpoint:
    """Return a source without its heads for several tokens.

    Raises:
        UsageError: it has none.
    """
    stored = [entry.stored() for entry in source.entries.values()]
    heads = match(source.config, stored, source.declared).heads
    if not heads:
        raise UsageError("--mtp drop: no tensor here predicts further tokens", "leave --mtp out")
    size = sum(tensor.stored.nbytes for tensor in heads)
    return prepared_checkpoint(
        source, {}, config=without_heads(source.config), left_out={tensor.stored.name for tensor in heads},
        facts={FACT: f"{len(heads)} tensors that predict further tokens, {size:,} bytes"},
    )  # fmt: skip
