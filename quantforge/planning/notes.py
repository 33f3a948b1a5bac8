"""Notes of a plan: what there is to say of the source, of heads that predict further tokens, and of zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantforge.architectures.match import Matched
from quantforge.checkpoint.fewer_heads import FACT as HEADS
from quantforge.checkpoint.prepared import ADAPTER, KEPT_EXPERTS, ROTATION
from quantforge.checkpoint.reader import QUANTIZATION
from quantforge.errors import RefusedError, UsageError
from quantforge.formats import GGUF
from quantforge.plans import Action, Draft

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

CHANGES = (
    ADAPTER,
    KEPT_EXPERTS,
    HEADS,
    ROTATION,
)  # of a whole source, by the subject of what is said of them


def notes(
    sparsity: str | None, checkpoint: Checkpoint, matched: Matched, draft: Draft
) -> tuple[str, ...]:
    """Return the notes of a plan, those of its draft included."""
    return (
        *facts(checkpoint),
        matched.rule,
        *draft.notes,
        *_zeros(sparsity),
        *_heads(matched, draft),
    )


def check_heads(mtp: str, form: str, matched: Matched) -> None:
    """Refuse to round heads that predict further tokens where there are none, or no place for them.

    Raises:
        UsageError: there are none.
        RefusedError: the format has no place for them.
    """
    if mtp != "quantize":
        return
    if form == GGUF:
        raise RefusedError(
            f"--mtp quantize: {form} files have no place for heads that predict further tokens",
            "leave --mtp out, or take --format compressed-tensors",
        )
    if not matched.heads:
        raise UsageError(
            "--mtp quantize: no tensor here predicts further tokens", "leave --mtp out"
        )


def is_change(note: str) -> bool:
    """Return whether a note says how the whole source is read: with adapters, fewer experts, another declaration."""
    return note.startswith(tuple(f"source {subject}: " for subject in (*CHANGES, QUANTIZATION)))


def facts(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what there is to say of the source itself."""
    return tuple(f"source {subject}: {said}" for subject, said in checkpoint.facts.items())


def _heads(matched: Matched, draft: Draft) -> tuple[str, ...]:
    """Say what becomes of heads that predict further tokens."""
    names = {tensor.stored.name for tensor in matched.heads}
    heads = [tensor for tensor in draft.tensors if tensor.name in names]
    if not heads:
        return ()
    before = sum(tensor.stored.nbytes for tensor in matched.heads)
    after = sum(tensor.stored_bytes for tensor in heads if tensor.action is not Action.DROP)
    rounded = sum(tensor.action is Action.QUANTIZE for tensor in heads)
    done = (
        f"{rounded} of them rounded plainly, {after:,} bytes in the result"
        if rounded
        else "kept as they are"
    )
    if all(tensor.action is Action.DROP for tensor in heads):
        done = "the format has no place for them"
    return (f"{len(heads)} tensors of {before:,} bytes predict further tokens: {done} (--mtp)",)


def _zeros(sparsity: str | None) -> tuple[str, ...]:
    """Say what zeros are for."""
    if sparsity is None:
        return ()
    return (
        f"sparsity {sparsity}: files are no smaller, and no engine is faster by zeros; `eval` measures what they"
        " cost",
    )
