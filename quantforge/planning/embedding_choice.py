"""Embedding and head of a plan: their share of the bytes, and the option that makes them smaller.

What lies outside of the blocks stays in 16 bits unless that is asked for, and is most of a small model with a large
vocabulary. With ``--bits 4`` or fewer, and over a third of the bytes outside, the embedding is rounded to 8 bits where
that makes the result smaller and every engine that would load it still does; where not, a note says what it would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from quantforge.architectures.match import Matched, Role
from quantforge.errors import QuantForgeError
from quantforge.formats import KEEP, format_of
from quantforge.formats.format_choice import CHOSEN
from quantforge.plans import Draft
from quantforge.recipe import Recipe

LARGE = 1 / 3  # of the bytes
NARROW = 4  # bits
_ROWS = "int8:row"
TOLD = "embedding and head"  # how the note about them begins
_OUTER = (Role.EMBEDDING, Role.HEAD)


def share(draft: Draft, matched: Matched) -> float:
    """Return how much of the bytes of a result embedding and head are."""
    names = {tensor.stored.name for tensor in matched.tensors if tensor.role in _OUTER}
    taken = sum(item.stored_bytes for item in draft.tensors if item.name in names)
    return taken / max(draft.output_bytes, 1)


def with_embedding(
    recipe: Recipe, draft: Draft, matched: Matched, drafted: Callable[[Recipe], Draft]
) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe with the embedding in fewer bits where that is chosen, and what there is to say.

    Args:
        recipe: with its format.
        draft: of it.
        matched: the model.
        drafted: drafts a recipe.
    """
    part = share(draft, matched)
    told = f"{TOLD}: {part:.0%} of the bytes"
    if part <= LARGE or recipe.embedding != KEEP or not any(item.scheme for item in draft.tensors):
        return recipe, (told,)
    loaded = {verdict.engine for verdict in draft.engines if verdict.loads}
    narrow = recipe.bits is not None and recipe.bits <= NARROW
    lost: tuple[str, str] | None = None
    for scheme, lean in _smaller(recipe, draft, drafted):
        missing = loaded - {verdict.engine for verdict in lean.engines if verdict.loads}
        saved = f"{draft.output_bytes - lean.output_bytes:,} bytes less"
        if missing:
            which = ", ".join(sorted(missing))
            lost = lost or (scheme, f"{saved}, but then {which} would not load it")
        elif narrow:
            reason = f"{told} without it, {saved}; --ignore with its name keeps it"
            return replace(recipe, embedding=scheme), (f"{CHOSEN}--embedding {scheme}: {reason}",)
        else:
            return recipe, (f"{told}; --embedding {scheme} takes {saved}",)
    if lost:
        return recipe, (f"{told}; --embedding {lost[0]} takes {lost[1]}",)
    tied = ": the head is tied to it, and would be stored on its own" if matched.tied else ""
    return recipe, (f"{told}; no --embedding makes {recipe.format} files smaller{tied}",)


def _smaller(
    recipe: Recipe, draft: Draft, drafted: Callable[[Recipe], Draft]
) -> Iterator[tuple[str, Draft]]:
    """Yield schemes of the embedding that make a result smaller, each with its draft."""
    form = format_of(recipe.format)
    for bits in (0, 8, NARROW):
        try:
            scheme = form.default_scheme(bits) if bits else _ROWS
            lean = drafted(replace(recipe, embedding=scheme))
        except QuantForgeError:  # the format does not hold it
            continue
        if lean.output_bytes < draft.output_bytes:
            yield scheme, lean
