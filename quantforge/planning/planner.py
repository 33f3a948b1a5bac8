"""Planning: from a recipe and the headers of a checkpoint to every decision of the run.

Nothing here reads a weight, and torch is imported only where declarations have to be derived (`undeclared`). Every
source tensor is accounted for once: quantized, kept, or dropped by declaration. The plan that ``quantforge plan``
prints is the object that ``quantize`` executes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.architectures.expert_sets import check_experts
from quantforge.architectures.match import Matched, match
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.formats import GGUF, format_of, kv_scales, targets
from quantforge.formats.format_choice import settled
from quantforge.model.statistics import Statistic
from quantforge.planning import coverage, naming, undeclared
from quantforge.planning.by_module import draft_by_module
from quantforge.planning.calibration_rows import check_length, own_text, row_notes
from quantforge.planning.effort import Asked, apply_effort
from quantforge.planning.embedding_choice import chosen_embedding
from quantforge.planning.guidance import disk_bytes, guide_notes
from quantforge.planning.heads_alone import check_alone
from quantforge.planning.loader_form import names_settled
from quantforge.planning.method_choice import chosen_method, schemes_of
from quantforge.planning.needed_statistics import Observation
from quantforge.planning.notes import check_heads, notes
from quantforge.planning.omissions import left_behind
from quantforge.planning.peak_memory import RunSizes, peak_bytes
from quantforge.planning.run_work import run_work
from quantforge.planning.sparse_layers import check_zeros, with_zeros
from quantforge.planning.tunable import tune_notes
from quantforge.plans import Action, Draft, FilePlan, Plan, RunWork, Serving
from quantforge.quantizers import source_transforms
from quantforge.recipe import Recipe, Rounding
from quantforge.scheme import Sparsity

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the recipe and the matched checkpoint that it was made from."""

    plan: Plan
    matched: Matched
    files: tuple[FilePlan, ...]
    recipe: Recipe  # with its format and method


def make_plan(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path | None = None,
    *,
    in_memory: bool = True,
    workers: int = 1,
    serving: Serving | None = None,
) -> Planned:
    """Decide everything about a run.

    Args:
        recipe: what is asked for.
        checkpoint: the model.
        out: the name of the result, where one is given: it may decide the format.
        in_memory: whether hidden states are held in memory, for the forecast of `peak_bytes`.
        workers: strips of rows that are rounded side by side, for the same.
        serving: what is asked of the command that serves the result, beside the recipe's devices.

    Raises:
        UsageError: ``out`` contradicts the format, or options contradict each other.
        InputError: the checkpoint is incomplete, already quantized, or a pattern matches nothing.
        RefusedError: the format cannot hold a scheme and there is no substitution.
    """
    recipe, chosen = settled(recipe, out)
    served = replace(serving or Serving(), devices=recipe.tensor_parallel)
    matched = _matched(checkpoint, recipe.format, recipe.engine)
    form = format_of(recipe.format)
    if not recipe.method:
        grids = schemes_of(recipe, form)
        method, named = chosen_method(grids, recipe, checkpoint, matched)
        recipe, chosen = replace(recipe, method=method), (*chosen, *named)
    weighs, cache = recipe.rounding.weighs, recipe.kv_cache
    asked = Observation(recipe.method, recipe.scales, weighs, cache, recipe.calibration)
    guide, tune = recipe.guide, recipe.tune
    recipe = replace(recipe, guide=guide or 0, tune=tune or 0)  # until effort says more
    check_zeros(recipe.method, recipe.zeros, recipe.format)
    if asked.needs_declarations:
        matched = undeclared.with_declarations(checkpoint, matched, asked.declaring)
    drafted = partial(_drafted, checkpoint=checkpoint, matched=matched, asked=asked)
    draft, wanted = drafted(recipe)
    embedding, outside = chosen_embedding(
        form, recipe, draft, matched, lambda scheme: drafted(replace(recipe, embedding=scheme))[0]
    )  # fmt: skip
    if embedding != recipe.embedding:
        recipe = replace(recipe, embedding=embedding)
        draft, wanted = drafted(recipe)
    needs = wanted or frozenset({Statistic.SQUARES} if recipe.prune_experts else ())
    before = recipe
    recipe, effort = apply_effort(
        replace(recipe, guide=guide, tune=tune),
        Asked(asked.words, recipe.format, draft.tensors, matched, needs),
    )
    if recipe != before and recipe.format == GGUF:  # its files state the recipe
        draft, _ = drafted(recipe)
    sizes = (recipe.awq.rows, needs, in_memory, workers, recipe.guide or 0, recipe.tune or 0)
    run = RunSizes(recipe.calibration, asked.words, *sizes, source_transforms(recipe.method))
    name = str(checkpoint.path)
    draft = names_settled(recipe.engine, checkpoint, draft)
    told = targets.check(recipe.engine, served, draft.tensors, draft.engines, recipe.format, name)
    own = (*chosen, *effort, *notes(recipe.sparsity, checkpoint, matched, draft), *outside)
    plan = _plan_of(checkpoint, matched, draft, run, recipe.method, recipe.format, recipe.zeros)
    plan = replace(plan, notes=(*own, *plan.notes, *told), needs=tuple(sorted(wanted)))
    plan = replace(plan, work=_work_of(checkpoint, matched, plan, run, recipe.rounding))
    return Planned(plan, matched, draft.files, recipe)


def _plan_of(
    checkpoint: Checkpoint, matched: Matched, draft: Draft, run: RunSizes, method: str, key: str,
    zeros: Sparsity | None,
) -> Plan:  # fmt: skip
    """Return the plan that a draft in the format ``key`` makes, with notes on the run; errors as `make_plan`."""
    plan = Plan(
        model=str(checkpoint.path),
        name=naming.derived(checkpoint, method, key, draft.tensors, draft.label, zeros),
        model_type=matched.model_type,
        method=method,
        transforms=run.words[:-1],
        rounder=run.words[-1],
        format=key,
        tensors=draft.tensors,
        shards=draft.shards,
        output_bytes=draft.output_bytes,
        peak_memory_bytes=peak_bytes(matched, draft.tensors, run),
        engines=draft.engines,
        substitutions=_degradations(draft, matched, checkpoint),
        notes=(
            *own_text(run, matched),
            *(row_notes(run.calibration, checkpoint.path) if run.needs else ()),
            *(check_length(run.calibration, matched.config) if run.needs else ()),
            *guide_notes(run.guide, draft.tensors, matched, run.calibration),
            *tune_notes(run.tune, run.calibration, matched),
        ),
        guide=run.guide,
        tune=run.tune,
        left_behind=left_behind(checkpoint),
        late=draft.late,
        untie=draft.untie,
    )
    _refuse_growth(checkpoint, plan)
    return plan


def _work_of(
    checkpoint: Checkpoint, matched: Matched, plan: Plan, run: RunSizes, rounding: Rounding
) -> RunWork:
    """Return the work of the run of a plan."""
    guide_bytes = disk_bytes(plan.guide, plan.tensors, matched, run.calibration)
    files = (sum(file.stat().st_size for file in checkpoint.opened.shards), plan.output_bytes)
    return run_work(matched, plan.tensors, run, rounding, files, guide_bytes)


def _drafted(
    recipe: Recipe, checkpoint: Checkpoint, matched: Matched, asked: Observation
) -> tuple[Draft, frozenset[Statistic]]:
    """Return the draft of the format, and the statistics that have to be observed for it."""
    check_heads(recipe.mtp, recipe.format, matched)
    wanted = asked.of_method(matched)
    _check_places(recipe.format, recipe.type or recipe.pre, recipe.kv_cache)
    if recipe.format != GGUF:
        draft = draft_by_module(checkpoint, matched, recipe)
    else:
        from quantforge.planning import gguf  # with all that its files hold

        observed = asked.is_known or bool(wanted)
        draft = gguf.draft(recipe, checkpoint, matched, observed=observed)
    draft = with_zeros(draft, matched, recipe.method, recipe.zeros)
    wanted = asked.of_draft(draft, wanted) | asked.of_ranges(matched, draft)
    asked.refuse_experts(matched, wanted, pruned=recipe.prune_experts is not None)
    return draft, wanted


def _matched(checkpoint: Checkpoint, key: str, engine: str | None) -> Matched:
    """Account for every tensor of a model that is not quantized yet; errors as `match` and `check_alone`."""
    found = checkpoint.config.get("quantization_config")
    if isinstance(found, Mapping):
        place = shlex.quote(str(checkpoint.path))
        raise InputError(
            f"{checkpoint.path}: already quantized (quant_method {found.get('quant_method')!r})",
            f"`quantforge quantize {place} --requantize --dry-run` plans a second quantization,"
            f" `quantforge export {place} --format plain` makes a source for other commands;"
            " `quantforge plan` with --context N looks at it as it is",
        )
    stored = [entry.stored() for entry in checkpoint.entries.values()]
    matched = match(checkpoint.config, stored, checkpoint.declared)
    own = [item.stored for item in matched.tensors if item.block >= 0 or item.further]
    check_experts(matched.config, own)
    check_alone(matched.draft, key, engine)
    return matched


def _degradations(draft: Draft, matched: Matched, checkpoint: Checkpoint) -> tuple[Event, ...]:
    """Return the events of a plan: substitutions, a family that is not declared, little coverage."""
    return (
        *draft.substitutions,
        *undeclared.events(matched, checkpoint.config),
        *coverage.events(draft.tensors, matched.config),
    )


def _check_places(key: str, of_gguf: str | None, kv_cache: str) -> None:
    """Refuse what the files of a format have no place for.

    Args:
        key: the format.
        of_gguf: a type or a pre-tokenizer, which GGUF files alone have.
        kv_cache: the scales that are wanted of it.
    """
    if key != GGUF and of_gguf is not None:
        raise UsageError(
            f"--type and --pre belong to GGUF files, not to {key}",
            "add --format gguf, or say --bits or --scheme; `export --format plain --type F16` sets the type of numbers",
        )
    if kv_cache != kv_scales.NONE and not format_of(key).ABOUT.holds_kv_scales:
        raise RefusedError(
            f"--kv-cache {kv_cache}: {key} files have no place for these scales",
            "add --format compressed-tensors, or drop --kv-cache",
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
