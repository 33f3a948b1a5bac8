"""Notes of a plan: what there is to say of the source, of heads that predict further tokens, of what is left behind.

Code, pickles and stray files of a model directory are not carried, keys that make a loader run code are not acted on,
and a licence that the source does not state is not made up. None of it makes the result worse, so none of it is an
event.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.architectures.match import ModelLayout
from quantforge.artifacts.card import carried_fields
from quantforge.artifacts.manifest import NAME as MANIFEST
from quantforge.errors import RefusedError, UsageError
from quantforge.files.computed_tensors import ADAPTER, KEPT_EXPERTS, ROTATION
from quantforge.files.opener import FILES
from quantforge.files.reader import CARD, CONFIG, INDEX, QUANTIZATION, Checkpoint, is_licence
from quantforge.files.without_experts import DROPPED_HEADS
from quantforge.formats import GGUF
from quantforge.plans import Action, Note, NoteKind
from quantforge.recipe import Recipe
from quantforge_calibration.chat_templates import FOLDER

if TYPE_CHECKING:
    from quantforge.planning.draft import Draft

# Changes of a whole source, by the subject of what is said of them.
CHANGES = (ADAPTER, KEPT_EXPERTS, DROPPED_HEADS, ROTATION)
# Keys by which loaders find code: transformers, Hydra, diffusers.
CODE_KEYS = (
    "auto_map",
    "trust_remote_code",
    "_attn_implementation_internal",
    "_target_",
    "custom_pipelines",
)
_NAMED = 8


def notes(
    sparsity: str | None, checkpoint: Checkpoint, model_layout: ModelLayout, draft: Draft
) -> tuple[str, ...]:
    """Return the notes of a plan, those of its draft included."""
    return (
        *facts(checkpoint),
        model_layout.rule,
        *draft.notes,
        *_zeros(sparsity),
        *_heads(model_layout, draft),
    )


def check_heads(recipe: Recipe, model_layout: ModelLayout) -> None:
    """Refuse to round heads that predict further tokens where there are none, or no place for them.

    Raises:
        UsageError: there are none.
        RefusedError: the format has no place for them.
    """
    if recipe.mtp != "quantize":
        return
    if recipe.format == GGUF:
        raise RefusedError(
            f"--mtp quantize: {GGUF} files have no place for heads that predict further tokens",
            "leave --mtp out, or take --format compressed-tensors",
        )
    if not model_layout.draft_heads:
        raise UsageError(
            "--mtp quantize: no tensor here predicts further tokens", "leave --mtp out"
        )


def facts(checkpoint: Checkpoint) -> tuple[Note, ...]:
    """Return the notes about the source itself; those on how it is read with changes have a kind of their own."""
    return tuple(
        Note(
            f"source {subject}: {message}",
            NoteKind.SOURCE if subject in (*CHANGES, QUANTIZATION) else NoteKind.FACT,
        )
        for subject, message in checkpoint.facts.items()
    )


def _heads(model_layout: ModelLayout, draft: Draft) -> tuple[str, ...]:
    """Say what becomes of heads that predict further tokens."""
    names = {tensor.header.name for tensor in model_layout.draft_heads}
    heads = [tensor for tensor in draft.tensors if tensor.name in names]
    if not heads:
        return ()
    before = sum(tensor.header.nbytes for tensor in model_layout.draft_heads)
    after = sum(tensor.output_bytes for tensor in heads if tensor.action is not Action.DROP)
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


def left_behind(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a note for everything of a directory that the result leaves out; none for a GGUF file."""
    if not checkpoint.path.is_dir():
        return ()
    names = [name for name in FILES.listing(checkpoint.path, None) if not name.startswith(".")]
    known = {CONFIG, CARD, INDEX, FOLDER, MANIFEST, *(path.name for path in checkpoint.shards)}
    known |= {path.name for path in checkpoint.side_files}
    said = []
    if keys := sorted(_code_keys(checkpoint.config)):
        said.append(f"{CONFIG} names code, which is never run: {', '.join(keys)}")
    if left := [_shown(checkpoint.path / name) for name in names if name not in known]:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        said.append(f"not carried over: {', '.join(left[:_NAMED])}{more}")
    stated = any(key.startswith("license") for key in carried_fields(checkpoint.card))
    if not stated and not any(is_licence(path.name) for path in checkpoint.side_files):
        said.append(
            "the source states no licence, so the result states none: ask whoever made the model"
        )
    return tuple(said)


def _code_keys(config: Mapping[str, Any]) -> set[str]:
    nested = [value for value in config.values() if isinstance(value, Mapping)]
    return {key for part in (config, *nested) for key in CODE_KEYS if part.get(key)}


def _shown(path: Path) -> str:
    name = path.name if path.name.isprintable() else ascii(path.name)
    return f"{name}/" if path.is_dir() and not path.is_symlink() else name
