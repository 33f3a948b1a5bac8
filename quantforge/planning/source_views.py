"""The model that is planned: three views of it follow one another.

    opened           as its files hold it
    source_as_read   decoded where it is published in low precision, with its adapter merged, in the form that a named
                     engine loads, with experts one by one or stacked as the files of the result hold them
    planned_source   as the recipe changes all of it: without heads or experts that it drops, with transforms of the
                     whole

The last is planned, quantized and compared with. Of a dense model in 16 bits all three are the same, unless an adapter
or ``rotate`` is asked for.
"""

from __future__ import annotations

from pathlib import Path

from quantforge.architectures import architecture_of, text_config
from quantforge.architectures.match import match_tensors
from quantforge.architectures.routers import experts_of, is_stack
from quantforge.architectures.towers import BLOCK
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.files.reader import Checkpoint
from quantforge.files.unstacked_experts import unstacked
from quantforge.files.without_experts import Removed, fewer_experts, fewer_heads, pruning_of
from quantforge.formats import GGUF, KEEP, load_format
from quantforge.formats.engine_rules import TRANSFORMERS, converts
from quantforge.formats.sources.adapter import open_adapter
from quantforge.formats.sources.low_precision import decode_if_low_precision
from quantforge.formats.sources.merged import merge_adapter
from quantforge.planning.choice import Rules
from quantforge.planning.format_choice import base_scheme, chosen_format
from quantforge.quantizers import apply_source_transforms, source_transforms
from quantforge.recipe import NO_DATA, Recipe
from quantforge.settings import Settings


def source_as_read(
    opened: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings
) -> Checkpoint:
    """Return a model as a run reads it, before the recipe changes it; errors as `open_plain_source`."""
    key = chosen_format(recipe, out)[0].format
    source = decode_if_low_precision(opened)
    if settings.adapter is not None:
        source = merge_adapter(source, open_adapter(settings.adapter))
    if recipe.engine == TRANSFORMERS and key != GGUF and converts(source.config):
        from quantforge.model.transformers_layout import (
            running_layout,  # torch, which planning does without
        )

        source = running_layout(source)
    return single_experts(source, key, recipe)


def single_experts(source: Checkpoint, key: str, recipe: Recipe) -> Checkpoint:
    """Return a source with its experts one by one where any of them is rounded or stacked again, else as it is.

    Args:
        source: the model.
        key: of the format, as `chosen_format` found it.
        recipe: what is asked for.

    Raises:
        InputError: the checkpoint does not fit its configuration, or a pattern matches nothing.
    """
    view = one_by_one(source)
    if view is source:
        return source
    if key == GGUF:
        return view  # its files stack them again
    model_layout = match_tensors(
        view.config, [entry.header() for entry in view.entries.values()], view.declared
    )
    rules = Rules(recipe, model_layout.tensors)
    plain = base_scheme(load_format(key), recipe) == KEEP
    for tensor in model_layout.tensors:
        if tensor.expert >= 0:
            choice = rules.choose(tensor)
            if not plain if choice is None else choice.scheme is not None:
                return view
    return source


def one_by_one(checkpoint: Checkpoint) -> Checkpoint:
    """Return the view of a model with experts one by one; itself where its files hold no stacks that are understood.

    Only of a family that is not declared and whose files seem to hold stacks are declarations derived.

    Raises:
        InputError: its configuration states sizes that are not valid.
    """
    if architecture_of(checkpoint.config) is not None or not _seems_stacked(checkpoint):
        return unstacked(checkpoint)
    from quantforge.model.derive.derive import derive_declarations_for

    stored = [entry.header() for entry in checkpoint.entries.values()]
    try:
        return unstacked(checkpoint, derive_declarations_for(checkpoint.config, stored))
    except (InputError, RefusedError):
        return checkpoint


def _seems_stacked(checkpoint: Checkpoint) -> bool:
    """Return whether a tensor inside of a block has three dimensions, of which the first counts experts."""
    counts = experts_of(text_config(checkpoint.config))
    return any(
        is_stack(entry.shape, counts)
        for name, entry in checkpoint.entries.items()
        if BLOCK.match(name)
    )


def planned_source(source: Checkpoint, recipe: Recipe) -> Checkpoint:
    """Return a source (`source_as_read`) as the recipe changes all of it, from headers alone.

    Errors as `fewer_heads` and `transformed_source`.
    """
    return transformed_source(without_dropped_heads(source, recipe), recipe)


def without_dropped_heads(source: Checkpoint, recipe: Recipe) -> Checkpoint:
    """Return the source without its heads for several tokens where the recipe drops them; errors as `fewer_heads`."""
    if recipe.mtp == "drop" and "quantization_config" not in source.config:
        return fewer_heads(source)
    return source


def transformed_source(
    source: Checkpoint, recipe: Recipe, removed: Removed | None = None
) -> Checkpoint:
    """Return the source with experts removed and transforms of the whole applied.

    A quantized source is returned as it is: planning refuses it.

    Args:
        source: with its experts as files are to hold them, and without heads that the recipe drops.
        recipe: what is removed and transformed, and what experts are judged by.
        removed: the experts that go; None where they are not chosen yet, so that nothing they change may be read.

    Raises:
        UsageError: there is nothing to judge experts by; or as `pruning_of`.
        RefusedError: as `pruning_of`.
        InputError: as `SourceTransform.prepare`.
    """
    if "quantization_config" in source.config:
        return source
    if recipe.prune_experts:
        text = recipe.calibration
        if text.importance_file is not None or text.source == NO_DATA:
            raise UsageError(
                "--prune-experts: experts are judged by what they do on a text, and none is given",
                "--calibration builtin, or a text of yours",
            )
        pruning = pruning_of(source, recipe.prune_experts)
        gone = pruning.undecided() if removed is None else removed
        source = fewer_experts(source, gone, decided=removed is not None)
    transforms = source_transforms(recipe.method)
    return apply_source_transforms(source, transforms) if transforms else source
