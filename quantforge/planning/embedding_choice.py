"""Embedding and head of a plan: their share of the bytes, and the option that makes them smaller.

What lies outside of the blocks stays in 16 bits unless that is asked for, and is most of a small model with a large
vocabulary. With ``--bits 4`` or fewer, and over a third of the bytes outside, the embedding is rounded to 8 bits where
that makes the result smaller and every engine that would load it still does; where not, a note says what it would cost.
Where the head is the embedding and the engine multiplies by its codes, it is rounded as the format's own tool does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.architectures.match import ModelLayout, Role
from quantforge.artifacts.number_text import size
from quantforge.errors import QuantForgeError, UsageError
from quantforge.formats import KEEP, Format
from quantforge.plans import FilePlan, Note, NoteKind, StoredTensor, TensorPlan, choice
from quantforge.recipe import Recipe

if TYPE_CHECKING:
    from quantforge.planning.draft import Draft

LARGE = 1 / 3  # of the bytes
NARROW = 4  # bits
_ROWS = "int8:row"
_OUTER = (Role.EMBEDDING, Role.HEAD)


def tied_rule(form: Format) -> str:
    """Return the rule by which an embedding that is the head too is rounded."""
    return f"tied embedding, as {form.INFO.tied_embedding_reference}"


def rounded_words(tensor: TensorPlan) -> str:
    """Return what is said of an embedding that is rounded: its sizes, by which rule, and how to keep it."""
    before = StoredTensor(tensor.name, tensor.dtype, tensor.shape).nbytes
    return (
        f"{tensor.dtype}, {size(before)} -> {tensor.scheme}, {size(tensor.output_bytes)} ({tensor.rule});"
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
    recipe: Recipe,
    draft: Draft,
    nbytes: int,
    model_layout: ModelLayout,
    drafted: Callable[[Recipe], Draft],
) -> tuple[Recipe, Draft, Note]:
    """Choose the scheme of the embedding: as asked for, or in 8 bits beside few.

    Args:
        form: the format of the result.
        recipe: how tensors are to be stored.
        draft: by that recipe.
        nbytes: of its files.
        model_layout: the model.
        drafted: returns the draft by a recipe with another scheme of the embedding.

    Returns:
        The recipe with that scheme, or ``recipe`` itself; its draft; and a note.
    """
    part = _outer_bytes(draft, model_layout) / max(nbytes, 1)
    share = f"embedding and head: {part:.0%} of the bytes"
    quantized = any(item.scheme for item in draft.tensors)
    if part <= LARGE or recipe.embedding or model_layout.draft or not quantized:
        return recipe, draft, Note(share, NoteKind.EMBEDDING)
    loaded = {verdict.engine for verdict in draft.engines if verdict.loads is not False}
    narrow = recipe.bits is not None and recipe.bits <= NARROW
    lost: tuple[str, str] | None = None
    for lean_recipe, lean, saved_bytes in _smaller(form, recipe, nbytes, drafted):
        scheme = lean_recipe.embedding
        missing = loaded - {
            verdict.engine for verdict in lean.engines if verdict.loads is not False
        }
        saved = f"{saved_bytes:,} bytes less"
        if missing:
            which = ", ".join(sorted(missing))
            lost = lost or (scheme, f"{saved}, but then {which} would not load it")
        elif narrow:
            reason = f"{share} without it, {saved}; --embedding keep leaves it"
            return lean_recipe, lean, choice(f"--embedding {scheme}: {reason}")
        else:
            return (
                recipe,
                draft,
                Note(f"{share}; --embedding {scheme} takes {saved}", NoteKind.EMBEDDING),
            )
    if lost:
        return (
            recipe,
            draft,
            Note(f"{share}; --embedding {lost[0]} takes {lost[1]}", NoteKind.EMBEDDING),
        )
    unties = model_layout.tied and not form.INFO.quantizes_tied_embedding
    tied = ": the head is tied to it, and would be stored on its own" if unties else ""
    return (
        recipe,
        draft,
        Note(f"{share}; no --embedding makes {form.KEY} files smaller{tied}", NoteKind.EMBEDDING),
    )


def _smaller(
    form: Format, recipe: Recipe, nbytes: int, drafted: Callable[[Recipe], Draft]
) -> Iterator[tuple[Recipe, Draft, int]]:
    """Yield recipes whose scheme of the embedding makes a result smaller than ``nbytes``, their draft and the gain."""
    for bits in (0, 8, NARROW):
        try:
            lean_recipe = replace(recipe, embedding=form.default_scheme(bits) if bits else _ROWS)
            lean = drafted(lean_recipe)
        except QuantForgeError:  # the format does not hold it
            continue
        saved = nbytes - bytes_of(lean.files(lean_recipe))
        if saved > 0:
            yield lean_recipe, lean, saved


def _outer_bytes(draft: Draft, model_layout: ModelLayout) -> int:
    """Return the bytes of a result that embedding and head take."""
    names = {tensor.header.name for tensor in model_layout.tensors if tensor.role in _OUTER}
    return sum(item.output_bytes for item in draft.tensors if item.name in names)


def bytes_of(files: Sequence[FilePlan]) -> int:
    """Return the bytes of files."""
    return sum(file.size for file in files)
