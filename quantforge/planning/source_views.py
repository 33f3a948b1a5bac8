"""The model that is planned, in three consecutive views.

    opened           as its files hold it
    source_as_read   decoded if it is stored in low precision, with its adapter merged, in the layout that a named
                     engine loads, with experts one by one or stacked as the result's files hold them
    planned_source   changed as the recipe asks: without pruned experts and dropped heads, with whole-model transforms

The last view is planned, quantized and compared with the result. For a dense 16-bit model all three are the same,
unless an adapter or ``rotate`` is requested.
"""

from __future__ import annotations

from pathlib import Path

from quantforge.architectures import architecture_of, text_config
from quantforge.architectures.match import match_tensors
from quantforge.architectures.routers import expert_counts, is_expert_stack
from quantforge.architectures.towers import NUMBERED_NAME
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.files.reader import Checkpoint
from quantforge.files.unstacked_experts import unstack_experts
from quantforge.files.without_experts import (
    RemovedExperts,
    plan_pruning,
    remove_draft_heads,
    remove_experts,
)
from quantforge.formats import GGUF, KEEP, load_format
from quantforge.formats.engine_verdicts import TRANSFORMERS, needs_conversion
from quantforge.formats.sources.adapter import open_adapter
from quantforge.formats.sources.low_precision import decode_if_low_precision
from quantforge.formats.sources.merged import merge_adapter
from quantforge.planning.format_choice import base_scheme, choose_format
from quantforge.planning.scheme_rules import RecipeRules
from quantforge.quantizers import apply_source_transforms, source_transforms
from quantforge.recipe import NO_DATA, Recipe
from quantforge.settings import Settings


def source_as_read(
    opened: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Checkpoint:
    """Return a model as a run reads it, before the recipe changes it; errors as `open_plain_source`."""
    key = choose_format(recipe, out)[0].format
    source = decode_if_low_precision(opened)
    if settings.adapter is not None:
        source = merge_adapter(source, open_adapter(settings.adapter))
    if recipe.engine == TRANSFORMERS and key != GGUF and needs_conversion(source.config):
        # Imported late: it imports torch, which planning does without
        from quantforge.model.transformers_layout import running_layout

        source = running_layout(source)
    return single_experts(source, key, recipe)


def single_experts(source: Checkpoint, key: str, recipe: Recipe) -> Checkpoint:
    """Return a view with experts as single tensors if any is quantized or stacked again, else the source.

    Args:
        source: the model.
        key: key of the format, as `choose_format` returned it.
        recipe: the requested recipe.

    Raises:
        InputError: the checkpoint does not match its configuration, or a pattern matches nothing.
    """
    view = one_by_one(source)
    if view is source:
        return source
    if key == GGUF:
        return view  # GGUF files stack them again
    model_layout = match_tensors(
        view.config,
        [entry.to_stored_tensor() for entry in view.entries.values()],
        view.derived_declarations,
    )
    rules = RecipeRules(recipe, model_layout.tensors)
    keeps_by_default = base_scheme(load_format(key), recipe) == KEEP
    for tensor in model_layout.tensors:
        if tensor.expert >= 0:
            request = rules.first_match(tensor)
            if not keeps_by_default if request is None else request.scheme is not None:
                return view
    return source


def one_by_one(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view with experts as single tensors; the checkpoint itself if it has no stacks that are understood.

    Declarations are derived only for an undeclared family whose files seem to hold stacks.

    Raises:
        InputError: the configuration has invalid sizes.
    """
    if architecture_of(checkpoint.config) is not None or not _seems_stacked(checkpoint):
        return unstack_experts(checkpoint)
    from quantforge.model.derive.derive import derive_declarations_for

    stored = [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    try:
        return unstack_experts(checkpoint, derive_declarations_for(checkpoint.config, stored))
    except (InputError, RefusedError):
        return checkpoint


def _seems_stacked(checkpoint: Checkpoint) -> bool:
    """Return whether a tensor inside a block has three dimensions, the first of which is the number of experts."""
    counts = expert_counts(text_config(checkpoint.config))
    return any(
        is_expert_stack(entry.shape, counts)
        for name, entry in checkpoint.entries.items()
        if NUMBERED_NAME.match(name)
    )


def planned_source(source: Checkpoint, recipe: Recipe) -> Checkpoint:
    """Return a source (see `source_as_read`) as the recipe changes it, from headers alone.

    Errors are those of `remove_draft_heads` and `transformed_source`.
    """
    return transformed_source(without_dropped_heads(source, recipe), recipe)


def without_dropped_heads(source: Checkpoint, recipe: Recipe) -> Checkpoint:
    """Return the source without its draft heads (MTP) if the recipe drops them; errors as `remove_draft_heads`."""
    if recipe.mtp == "drop" and "quantization_config" not in source.config:
        return remove_draft_heads(source)
    return source


def transformed_source(
    source: Checkpoint, recipe: Recipe, removed: RemovedExperts | None = None
) -> Checkpoint:
    """Return the source without pruned experts and with whole-model transforms applied.

    A quantized source is returned unchanged: planning refuses it.

    Args:
        source: the source, without heads that the recipe drops and with experts laid out as in the result.
        recipe: the recipe that says what is pruned and transformed.
        removed: the experts to remove; None before they are chosen, when nothing that depends on them may be read.

    Raises:
        UsageError: there is no calibration text to rank experts by; or as `plan_pruning`.
        RefusedError: as `plan_pruning`.
        InputError: as `prepare` of the transform.
    """
    if "quantization_config" in source.config:
        return source
    if recipe.prune_experts:
        calibration = recipe.calibration
        if calibration.importance_file is not None or calibration.source == NO_DATA:
            raise UsageError(
                "--prune-experts: experts are judged by what they do on a text, and none is given",
                "--calibration builtin, or a text of yours",
            )
        pruning = plan_pruning(source, recipe.prune_experts)
        experts = pruning.placeholder() if removed is None else removed
        source = remove_experts(source, experts, is_decided=removed is not None)
    transforms = source_transforms(recipe.method)
    return apply_source_transforms(source, transforms) if transforms else source
