"""Embedding and head of a plan: their share of the bytes, and the option that makes them smaller.

What lies outside of the blocks stays in 16 bits unless that is asked for, and is most of a small model with a large
vocabulary. With ``--bits 4`` or fewer, and over a third of the bytes outside, the embedding is rounded to 8 bits where
that makes the result smaller and every engine that would load it still does; where not, a note says what it would cost.
Where the head is the embedding and the engine multiplies by its codes, it is rounded as the format's own tool does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quantforge.architectures.match import Matched, Role
from quantforge.errors import QuantForgeError, UsageError
from quantforge.formats import KEEP, Format
from quantforge.formats.format_choice import CHOSEN
from quantforge.plans import Draft, StoredTensor, TensorPlan
from quantforge.recipe import Recipe
from quantforge.results.significant import size

LARGE = 1 / 3  # of the bytes
NARROW = 4  # bits
_ROWS = "int8:row"
TOLD = "embedding and head"  # how the note about them begins
_OUTER = (Role.EMBEDDING, Role.HEAD)


def share(draft: Draft, matched: Matched) -> float:
    """Return the share of the bytes of a result that embedding and head take, 0 to 1."""
    names = {tensor.stored.name for tensor in matched.tensors if tensor.role in _OUTER}
    taken = sum(item.stored_bytes for item in draft.tensors if item.name in names)
    return taken / max(draft.output_bytes, 1)


def tied_rule(form: Format) -> str:
    """Return the rule by which an embedding that is the head too is rounded."""
    return f"tied embedding, as {form.ABOUT.embedding_tool}"


def rounded_words(tensor: TensorPlan) -> str:
    """Return what is said of an embedding that is rounded: its sizes, by which rule, and how to keep it."""
    before = StoredTensor(tensor.name, tensor.dtype, tensor.shape).nbytes
    return (
        f"{tensor.dtype}, {size(before)} -> {tensor.scheme}, {size(tensor.stored_bytes)} ({tensor.rule});"
        " --embedding keep leaves it"
    )


def check_not_quantized(name: str, asked: str) -> None:
    """Raise `UsageError` where another scheme is asked for an embedding that has codes already."""
    if asked not in {"", KEEP}:
        raise UsageError(
            f"--embedding {asked}: {name} is quantized already, and an export keeps its numbers",
            "drop --embedding, or quantize the original model",
        )


def chosen_embedding(
    form: Format,
    wanted: Recipe,
    draft: Draft,
    matched: Matched,
    drafted: Callable[[str], Draft],
) -> tuple[str, tuple[str, ...]]:
    """Return the scheme of the embedding and the note about it: as asked for, or in 8 bits beside few.

    Args:
        form: the format of the result.
        wanted: how tensors are to be stored.
        draft: with the schemes that are wanted.
        matched: the model.
        drafted: returns the draft with another scheme of the embedding.
    """
    part = share(draft, matched)
    told = f"{TOLD}: {part:.0%} of the bytes"
    quantized = any(item.scheme for item in draft.tensors)
    if part <= LARGE or wanted.embedding or matched.draft or not quantized:
        return wanted.embedding, (told,)
    loaded = {verdict.engine for verdict in draft.engines if verdict.loads is not False}
    narrow = wanted.bits is not None and wanted.bits <= NARROW
    lost: tuple[str, str] | None = None
    for scheme, lean in _smaller(form, draft, drafted):
        missing = loaded - {
            verdict.engine for verdict in lean.engines if verdict.loads is not False
        }
        saved = f"{draft.output_bytes - lean.output_bytes:,} bytes less"
        if missing:
            which = ", ".join(sorted(missing))
            lost = lost or (scheme, f"{saved}, but then {which} would not load it")
        elif narrow:
            reason = f"{told} without it, {saved}; --embedding keep leaves it"
            return scheme, (f"{CHOSEN}--embedding {scheme}: {reason}",)
        else:
            return "", (f"{told}; --embedding {scheme} takes {saved}",)
    if lost:
        return "", (f"{told}; --embedding {lost[0]} takes {lost[1]}",)
    unties = matched.tied and not form.ABOUT.embedding_tool
    tied = ": the head is tied to it, and would be stored on its own" if unties else ""
    return "", (f"{told}; no --embedding makes {form.KEY} files smaller{tied}",)


def _smaller(
    form: Format, draft: Draft, drafted: Callable[[str], Draft]
) -> Iterator[tuple[str, Draft]]:
    """Yield schemes of the embedding that make a result smaller, each with its draft."""
    for bits in (0, 8, NARROW):
        try:
            scheme = form.default_scheme(bits) if bits else _ROWS
            lean = drafted(scheme)
        except QuantForgeError:  # the format does not hold it
            continue
        if lean.output_bytes < draft.output_bytes:
            yield scheme, lean
