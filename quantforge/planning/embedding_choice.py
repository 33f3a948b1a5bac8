"""Quantization of embedding and head: their share of the bytes, and when the embedding is quantized by default.

Tensors outside the blocks stay in 16 bits unless requested otherwise, and are most of a small model with a large
vocabulary. With ``--bits 4`` or fewer, and if they take over a third of the bytes, the embedding is quantized to 8 bits
if that makes the result smaller and every engine that would load it still does; else a note tells what it would cost.
If the head is tied to the embedding and the engine multiplies by its codes, it is quantized as the format's own tool
does.
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
    from quantforge.planning.partial_plan import PartialPlan

LARGE_SHARE = 1 / 3  # of the result's bytes
FEW_BITS = 4  # bits
_INT8_PER_ROW = "int8:row"
_OUTER_ROLES = (Role.EMBEDDING, Role.HEAD)


def tied_rule(file_format: Format) -> str:
    """Return the rule text of an embedding that is quantized because the head is tied to it."""
    return f"tied embedding, as {file_format.INFO.tied_embedding_reference}"


def embedding_note(tensor: TensorPlan) -> str:
    """Return a note on a quantized embedding: sizes before and after, the rule, and how to keep it."""
    source_bytes = StoredTensor(tensor.name, tensor.dtype, tensor.shape).nbytes
    return (
        f"{tensor.dtype}, {size(source_bytes)} -> {tensor.scheme}, {size(tensor.output_bytes)} ({tensor.rule});"
        " --embedding keep leaves it"
    )


def check_not_quantized(name: str, requested: str) -> None:
    """Raise `UsageError` if a scheme is requested for an embedding that is already quantized."""
    if requested not in {"", KEEP}:
        raise UsageError(
            f"--embedding {requested}: {name} is quantized already, and an export keeps its numbers",
            "drop --embedding, or quantize the original model",
        )


def choose_embedding(
    file_format: Format,
    recipe: Recipe,
    partial_plan: PartialPlan,
    nbytes: int,
    model_layout: ModelLayout,
    plan_tensors: Callable[[Recipe], PartialPlan],
) -> tuple[Recipe, PartialPlan, Note]:
    """Choose the scheme of the embedding: the requested one, or 8 bits in a model of few bits.

    Args:
        file_format: the format of the result.
        recipe: the requested recipe.
        partial_plan: plan by that recipe.
        nbytes: bytes of its files.
        model_layout: the model.
        plan_tensors: returns the plan by a recipe with another scheme of the embedding.

    Returns:
        The recipe with that scheme, or ``recipe`` itself; its plan; and a note.
    """
    outer_share = _outer_bytes(partial_plan, model_layout) / max(nbytes, 1)
    share_text = f"embedding and head: {outer_share:.0%} of the bytes"
    quantized = any(item.scheme for item in partial_plan.tensors)
    if outer_share <= LARGE_SHARE or recipe.embedding or model_layout.draft_kind or not quantized:
        return recipe, partial_plan, Note(share_text, NoteKind.EMBEDDING)
    loading_engines = {
        verdict.engine for verdict in partial_plan.engines if verdict.loads is not False
    }
    few_bits = recipe.bits is not None and recipe.bits <= FEW_BITS
    alternative: tuple[str, str] | None = None
    for smaller_recipe, smaller_plan, saved_bytes in _smaller_recipes(
        file_format, recipe, nbytes, plan_tensors
    ):
        scheme = smaller_recipe.embedding
        lost_engines = loading_engines - {
            verdict.engine for verdict in smaller_plan.engines if verdict.loads is not False
        }
        saved = f"{saved_bytes:,} bytes less"
        if lost_engines:
            engines = ", ".join(sorted(lost_engines))
            alternative = alternative or (scheme, f"{saved}, but then {engines} would not load it")
        elif few_bits:
            reason = f"{share_text} without it, {saved}; --embedding keep leaves it"
            return smaller_recipe, smaller_plan, choice(f"--embedding {scheme}: {reason}")
        else:
            return (
                recipe,
                partial_plan,
                Note(f"{share_text}; --embedding {scheme} takes {saved}", NoteKind.EMBEDDING),
            )
    if alternative:
        return (
            recipe,
            partial_plan,
            Note(
                f"{share_text}; --embedding {alternative[0]} takes {alternative[1]}",
                NoteKind.EMBEDDING,
            ),
        )
    unties = model_layout.tied and not file_format.INFO.quantizes_tied_embedding
    tied_note = ": the head is tied to it, and would be stored on its own" if unties else ""
    return (
        recipe,
        partial_plan,
        Note(
            f"{share_text}; no --embedding makes {file_format.KEY} files smaller{tied_note}",
            NoteKind.EMBEDDING,
        ),
    )


def _smaller_recipes(
    file_format: Format, recipe: Recipe, nbytes: int, plan_tensors: Callable[[Recipe], PartialPlan]
) -> Iterator[tuple[Recipe, PartialPlan, int]]:
    """Yield recipes with a scheme of the embedding that makes the result smaller, their plans and the bytes saved."""
    for bits in (0, 8, FEW_BITS):
        try:
            smaller_recipe = replace(
                recipe, embedding=file_format.default_scheme(bits) if bits else _INT8_PER_ROW
            )
            smaller_plan = plan_tensors(smaller_recipe)
        except QuantForgeError:  # the format cannot hold it
            continue
        saved = nbytes - total_file_bytes(smaller_plan.files(smaller_recipe))
        if saved > 0:
            yield smaller_recipe, smaller_plan, saved


def _outer_bytes(partial_plan: PartialPlan, model_layout: ModelLayout) -> int:
    """Return the bytes that embedding and head take in the result."""
    names = {tensor.header.name for tensor in model_layout.tensors if tensor.role in _OUTER_ROLES}
    return sum(item.output_bytes for item in partial_plan.tensors if item.name in names)


def total_file_bytes(files: Sequence[FilePlan]) -> int:
    """Return the total size of planned files in bytes."""
    return sum(file.size for file in files)
