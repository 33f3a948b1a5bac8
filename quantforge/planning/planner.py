"""Planning: from a recipe and the headers of a checkpoint to every decision of the run.

Nothing here reads a weight or imports torch. Every source tensor is accounted for once: quantized, kept, or dropped
by declaration. The plan that ``quantforge plan`` prints is the object that ``quantize`` executes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.architectures.match import Matched, match, needs_architecture
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.formats import format_of, targets
from quantforge.formats.choice import settled
from quantforge.grids import SUPERBLOCKS
from quantforge.model.statistics import Statistic, measured, of_inputs
from quantforge.planning import coverage, naming
from quantforge.planning import peak_memory as memory
from quantforge.planning.by_module import draft_by_module
from quantforge.planning.drafting import draft_of
from quantforge.planning.omissions import left_behind
from quantforge.plans import (
    Action,
    Draft,
    FilePlan,
    Plan,
)
from quantforge.quantizers import needs, parse_method
from quantforge.recipe import Recipe

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

IMATRIX = "imatrix:"  # then a name: the importance comes from a file
NO_DATA = "none"  # the calibration source of those who want none


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the recipe and the matched checkpoint that it was made from."""

    plan: Plan
    matched: Matched
    files: tuple[FilePlan, ...]
    recipe: Recipe  # with its format


def make_plan(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path | None = None,
    *,
    in_memory: bool = True,
    workers: int = 1,
) -> Planned:
    """Decide everything about a run; the last two are for the forecast of its memory, see `peak_memory.peak_bytes`.

    Args:
        recipe: what is asked for.
        checkpoint: the model.
        out: the name of the result, where one is given: it may decide the format.
        in_memory: whether hidden states are held in memory.
        workers: runs of rows that are rounded side by side.

    Raises:
        UsageError: ``out`` contradicts the format, or options contradict each other.
        InputError: the checkpoint is incomplete, already quantized, or a pattern matches nothing.
        RefusedError: the format cannot hold a scheme and there is no substitution.
    """
    recipe, chosen = settled(recipe, out)
    _refuse_quantized(checkpoint)
    matched = match(checkpoint.config, [entry.stored() for entry in checkpoint.entries.values()])
    words = parse_method(recipe.method)
    wanted = _observed(recipe, matched, words)
    draft = _drafted(recipe, checkpoint, matched, wanted)
    wanted = _needed(recipe, draft, words, wanted) | _ranges(recipe, matched, draft)
    said: tuple[str, ...] = ()
    if recipe.engine is not None:
        parallel = recipe.tensor_parallel
        said = targets.check(recipe.engine, parallel, draft.tensors, draft.engines, recipe.format)
    plan = Plan(
        model=str(checkpoint.path),
        name=naming.derived(checkpoint, recipe.method, recipe.format, draft.tensors, draft.label),
        model_type=matched.model_type,
        method=recipe.method,
        transforms=words[0],
        rounder=words[1],
        format=recipe.format,
        tensors=draft.tensors,
        shards=tuple(tuple(item.name for item, _ in file.places) for file in draft.files),
        output_bytes=sum(file.size for file in draft.files),
        peak_memory_bytes=memory.peak_bytes(
            matched, draft.tensors, recipe, wanted, in_memory=in_memory, workers=workers
        ),
        engines=draft.engines,
        substitutions=(*draft.substitutions, *coverage.events(draft.tensors, matched.config)),
        notes=(
            *chosen,
            matched.rule,
            *draft.notes,
            *(_own_text(recipe, matched) if wanted else ()),
            *said,
        ),
        left_behind=left_behind(checkpoint),
        late=draft.late,
        options={"needs": tuple(sorted(wanted)), "untie": draft.untie},
    )
    _refuse_growth(checkpoint, plan)
    return Planned(plan, matched, draft.files, recipe)


def _observed(
    recipe: Recipe, matched: Matched, words: tuple[tuple[str, ...], str]
) -> frozenset[Statistic]:
    """Return what the method needs to be observed, as far as this model and this recipe let it be."""
    transforms, rounder = words
    wanted = needs(recipe.method, importance=recipe.rounding.weighs)
    if matched.architecture is None:
        if transforms or rounder != "rtn":
            raise needs_architecture(matched, recipe.method)
        wanted = frozenset()  # nothing is known of activations
    known = _known(recipe)
    if not transforms and rounder == "rtn" and (known or recipe.calibration.source == NO_DATA):
        wanted = frozenset()  # importance is from a file, or all columns are alike
    if known:
        _refuse_imatrix(recipe, (*transforms, rounder), wanted)
    return wanted


def _drafted(
    recipe: Recipe, checkpoint: Checkpoint, matched: Matched, wanted: frozenset[Statistic]
) -> Draft:
    """Return tensors and files as the format plans them, if it has a place for what is asked."""
    own = draft_of(recipe.format)
    if own is None and (recipe.type is not None or recipe.pre is not None):
        raise UsageError(
            f"--type and --pre belong to GGUF files, not to {recipe.format}",
            "add --format gguf, or say --bits or --scheme",
        )
    if recipe.kv_cache != "none" and not format_of(recipe.format).ABOUT.holds_kv_scales:
        raise RefusedError(
            f"--kv-cache {recipe.kv_cache}: {recipe.format} files have no place for these scales",
            "add --format compressed-tensors, or drop --kv-cache",
        )
    if own is None:
        return draft_by_module(recipe, checkpoint, matched)
    return own(recipe, checkpoint, matched, observed=_known(recipe) or bool(wanted))


def _needed(
    recipe: Recipe,
    draft: Draft,
    words: tuple[tuple[str, ...], str],
    wanted: frozenset[Statistic],
) -> frozenset[Statistic]:
    """Return what is observed for what is really rounded, and refuse a method that has nothing to do or to see."""
    transforms, rounder = words
    if recipe.scales == "reference":
        _refuse_reference((*transforms, rounder), draft)
    if not any(tensor.action is Action.QUANTIZE for tensor in draft.tensors):
        if (*transforms, rounder) != ("rtn",):
            raise UsageError(
                f"--method {recipe.method}: nothing is rounded in {draft.label or recipe.format}",
                "leave --method out, or ask for fewer bits",
            )
        wanted = frozenset()  # a mere conversion
    if wanted and recipe.calibration.source == NO_DATA:
        raise UsageError(
            f"--method {recipe.method} observes what the layers read, and --calibration is {NO_DATA}",
            "give a text to calibrate on, --calibration builtin for instance, or take --method rtn",
        )
    return wanted


def _known(recipe: Recipe) -> bool:
    return recipe.calibration.source.startswith(IMATRIX)


def _refuse_imatrix(recipe: Recipe, words: Sequence[str], wanted: frozenset[Statistic]) -> None:
    """Refuse an importance matrix, a file of mean squares, for all but the search for scales of plain rounding."""
    if not recipe.rounding.weighs:
        raise UsageError(
            f"--imatrix: --scales {recipe.scales} takes them from the weights alone, importance is for a search",
            "--scales search, or leave --imatrix out",
        )
    if wanted:
        raise UsageError(
            f"--imatrix: {' and '.join(word for word in words if word != 'rtn')} observes more of the inputs than the"
            " mean squares that such a file holds",
            "leave --imatrix out: the calibration text gives the importance too; or --method rtn",
        )


def _refuse_reference(words: Sequence[str], draft: Draft) -> None:
    """Refuse ggml's own quantizer for all but plain rounding into its own types."""
    if words != ("rtn",):
        other = " or ".join(word for word in words if word != "rtn")
        raise UsageError(
            f"--scales reference: llama.cpp rounds plainly, without {other}",
            "--method rtn, or leave --scales out",
        )
    schemes = (tensor.scheme.weight for tensor in draft.tensors if tensor.scheme)
    unknown = next((scheme for scheme in schemes if scheme.grid not in SUPERBLOCKS), None)
    if unknown is not None:
        raise UsageError(
            f"--scales reference: llama.cpp has no quantizer for {unknown}",
            "--format gguf, or leave --scales out",
        )


def _ranges(recipe: Recipe, matched: Matched, draft: Draft) -> frozenset[Statistic]:
    """Return the statistics that static ranges, outlier columns and the KV cache need, whatever the method needs."""
    inputs = [tensor.scheme.input for tensor in draft.tensors if tensor.scheme]
    wanted = of_inputs(inputs) if any(map(measured, inputs)) else frozenset()
    if recipe.kv_cache != "none":
        wanted |= {Statistic.CACHE}
    if not wanted:
        return wanted
    if matched.architecture is None:
        raise needs_architecture(matched, "with measured inputs or a measured KV cache")
    if recipe.calibration.source == NO_DATA:
        raise RefusedError(
            f"static ranges, outlier columns and the KV cache have to be measured, and --calibration is {NO_DATA}",
            "give a text to calibrate on, or take dynamic inputs (int8:row:sym+int8:token:dynamic) and no --kv-cache",
        )
    return wanted


def _own_text(recipe: Recipe, matched: Matched) -> tuple[str, ...]:
    """Say what it costs to let the model write its calibration text."""
    if not memory.writes_own_text(recipe):
        return ()
    tokens = recipe.calibration.samples * recipe.calibration.length
    size = memory.whole_model(matched)
    return (
        f"calibration 'self': the model writes up to {tokens:,} tokens one at a time, with all of its weights"
        f" in memory as float32 ({size:,} bytes)",
    )


def _refuse_growth(checkpoint: Checkpoint, plan: Plan) -> None:
    """Refuse a result that is no smaller than the source, unless nothing is quantized: that is a mere conversion."""
    if not plan.quantized():
        return
    before = sum(entry.stored().nbytes for entry in checkpoint.entries.values())  # as decoded
    after = sum(tensor.stored_bytes for tensor in plan.tensors if tensor.action is not Action.DROP)
    if after >= before:
        raise RefusedError(
            f"the tensors would take {after:,} bytes, those of the source take {before:,}: nothing is gained",
            "larger groups, fewer bits, or a tied head left as it is; `quantforge plan --tensors` says what takes most",
        )


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    found = checkpoint.config.get("quantization_config")
    if isinstance(found, Mapping):
        raise InputError(
            f"{checkpoint.path}: already quantized (quant_method {found.get('quant_method')!r})",
            "quantize the original model, or move this one with `quantforge export`",
        )
