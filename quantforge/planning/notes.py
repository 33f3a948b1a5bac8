"""Notes of a plan: facts about the source, about draft heads (multi-token prediction), and files that are not copied.

Code, pickles and stray files of a model directory are not copied, configuration keys that make a loader run code are
ignored, and if the source states no licence, neither does the result. None of this makes the result worse, so none of
it is an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.architectures.match import ModelLayout
from quantforge.artifacts.card import source_card_fields
from quantforge.artifacts.manifest import NAME as MANIFEST
from quantforge.errors import RefusedError, UsageError
from quantforge.files.computed_tensors import ADAPTER, KEPT_EXPERTS, ROTATION
from quantforge.files.opener import FILES
from quantforge.files.reader import (
    CARD_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    QUANTIZATION,
    Checkpoint,
    is_license,
)
from quantforge.files.without_experts import DROPPED_HEADS
from quantforge.formats import GGUF
from quantforge.plans import Action, Note, NoteKind
from quantforge.recipe import Recipe
from quantforge_calibration.chat_templates import TEMPLATE_FOLDER

if TYPE_CHECKING:
    from quantforge.planning.partial_plan import PartialPlan

# Facts about changes of the whole source, by key.
CHANGE_FACTS = (ADAPTER, KEPT_EXPERTS, DROPPED_HEADS, ROTATION)
# Configuration keys that name code to run: transformers, Hydra, diffusers.
CODE_KEYS = (
    "auto_map",
    "trust_remote_code",
    "_attn_implementation_internal",
    "_target_",
    "custom_pipelines",
)
_MAX_NAMES = 8


def notes(
    sparsity: str | None,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    partial_plan: PartialPlan,
) -> tuple[str, ...]:
    """Return the notes on a plan's source, tensors, sparsity and draft heads."""
    return (
        *facts(checkpoint),
        model_layout.linear_rule,
        *partial_plan.notes,
        *_sparsity_notes(sparsity),
        *_draft_head_notes(model_layout, partial_plan),
    )


def check_draft_heads(recipe: Recipe, model_layout: ModelLayout) -> None:
    """Refuse to quantize draft heads (MTP) if there are none, or if the format cannot hold them.

    Raises:
        UsageError: there are none.
        RefusedError: the format cannot hold them.
    """
    if recipe.mtp != "quantize":
        return
    if recipe.format == GGUF:
        raise RefusedError(
            f"--mtp quantize: {GGUF} files have no place for heads that predict further tokens",
            "leave --mtp out, or take --format compressed-tensors",
        )
    if not model_layout.draft_head_tensors:
        raise UsageError(
            "--mtp quantize: no tensor here predicts further tokens", "leave --mtp out"
        )


def facts(checkpoint: Checkpoint) -> tuple[Note, ...]:
    """Return the facts about the source itself as notes."""
    return tuple(
        Note(
            f"source {subject.replace('_', ' ')}: {message}",
            NoteKind.SOURCE if subject in (*CHANGE_FACTS, QUANTIZATION) else NoteKind.FACT,
        )
        for subject, message in checkpoint.source_notes.items()
    )


def _draft_head_notes(model_layout: ModelLayout, partial_plan: PartialPlan) -> tuple[str, ...]:
    """Return a note on what becomes of draft heads, which predict further tokens."""
    names = {tensor.header.name for tensor in model_layout.draft_head_tensors}
    heads = [tensor for tensor in partial_plan.tensors if tensor.name in names]
    if not heads:
        return ()
    source_bytes = sum(tensor.header.nbytes for tensor in model_layout.draft_head_tensors)
    result_bytes = sum(tensor.output_bytes for tensor in heads if tensor.action is not Action.DROP)
    num_quantized = sum(tensor.action is Action.QUANTIZE for tensor in heads)
    outcome = (
        f"{num_quantized} of them rounded plainly, {result_bytes:,} bytes in the result"
        if num_quantized
        else "kept as they are"
    )
    if all(tensor.action is Action.DROP for tensor in heads):
        outcome = "the format has no place for them"
    return (
        f"{len(heads)} tensors of {source_bytes:,} bytes predict further tokens: {outcome} (--mtp)",
    )


def _sparsity_notes(sparsity: str | None) -> tuple[str, ...]:
    """Return a note on what sparsity is for."""
    if sparsity is None:
        return ()
    return (
        f"sparsity {sparsity}: files are no smaller, and no engine is faster by zeros; `eval` measures what they"
        " cost",
    )


def not_copied(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return notes on everything in a model directory that is not copied to the result; none for a GGUF file."""
    if not checkpoint.path.is_dir():
        return ()
    names = [name for name in FILES.list_names(checkpoint.path, None) if not name.startswith(".")]
    copied_names = {
        CONFIG_FILE,
        CARD_FILE,
        INDEX_FILE,
        TEMPLATE_FOLDER,
        MANIFEST,
        *(path.name for path in checkpoint.shards),
    }
    copied_names |= {path.name for path in checkpoint.side_files}
    messages = []
    if keys := sorted(_code_keys(checkpoint.config)):
        messages.append(f"{CONFIG_FILE} names code, which is never run: {', '.join(keys)}")
    if left_out := [
        _printable_name(checkpoint.path / name) for name in names if name not in copied_names
    ]:
        count_note = f" and {len(left_out) - _MAX_NAMES} more" if len(left_out) > _MAX_NAMES else ""
        messages.append(f"not carried over: {', '.join(left_out[:_MAX_NAMES])}{count_note}")
    has_licence = any(key.startswith("license") for key in source_card_fields(checkpoint.card))
    if not has_licence and not any(is_license(path.name) for path in checkpoint.side_files):
        messages.append(
            "the source states no licence, so the result states none: ask whoever made the model"
        )
    return tuple(messages)


def _code_keys(config: Mapping[str, Any]) -> set[str]:
    nested_configs = [value for value in config.values() if isinstance(value, Mapping)]
    return {
        key
        for config_part in (config, *nested_configs)
        for key in CODE_KEYS
        if config_part.get(key)
    }


def _printable_name(path: Path) -> str:
    name = path.name if path.name.isprintable() else ascii(path.name)
    return f"{name}/" if path.is_dir() and not path.is_symlink() else name
