"""Planning: turn a recipe and the headers of a checkpoint into every decision of a run.

`make_plan` decides once, from top to bottom: format, method, what becomes of every tensor, effort settings, files, the
statistics to collect, memory and time. It reads no weights, and imports torch only if declarations of a family have to
be derived, because calibration needs to know which linears read the same activation. Every source tensor is accounted
for exactly once: quantized, kept, or dropped with a reason. The plan that ``quantforge plan`` prints is the object that
``quantize`` executes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.architectures.configuration import untie_config, vocabulary_size
from quantforge.architectures.draft_heads import EAGLE3
from quantforge.architectures.expert_sets import check_experts
from quantforge.architectures.match import ModelLayout, match_tensors, needs_architecture
from quantforge.engines import check_engine
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.formats import DEFAULT_FORMAT, GGUF, PLAIN, Format, kv_scales, load_format
from quantforge.formats.decoded import unquantized_config
from quantforge.formats.engine_verdicts import TRANSFORMERS
from quantforge.formats.gguf.projector_file import OPTION, ProjectorFile, projector_file
from quantforge.model.statistics import Statistic
from quantforge.planning import coverage, naming
from quantforge.planning.calibration_rows import (
    add_image_memory,
    check_calibration_text,
    check_image_support,
    check_length,
    first_image_reference,
    random_row_share,
    row_notes,
    self_generated_note,
)
from quantforge.planning.effort import EffortContext, apply_effort, choose_method
from quantforge.planning.embedding_choice import choose_embedding, total_file_bytes
from quantforge.planning.format_choice import choose_format
from quantforge.planning.gradient_options import guide_disk_bytes, guide_note, tune_note
from quantforge.planning.importance_check import compare_importance
from quantforge.planning.module_formats import check_sparsity, plan_module_tensors
from quantforge.planning.needed_statistics import NeededStatistics
from quantforge.planning.notes import check_draft_heads, not_copied, notes
from quantforge.planning.partial_plan import PartialPlan
from quantforge.planning.peak_memory import RunSizes, peak_bytes
from quantforge.planning.run_work import run_work, with_measuring
from quantforge.plans import Action, FilePlan, Plan, TensorPlan
from quantforge.quantizers import source_transforms
from quantforge.recipe import Recipe
from quantforge.settings import Settings, rounding_workers

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with the model layout and the recipe that it was made from.

    Attributes:
        plan: the plan.
        model_layout: tensors of the source, matched to its architecture.
        files: files of the result.
        recipe: the recipe with its format, method and effort settings filled in.
    """

    plan: Plan
    model_layout: ModelLayout
    files: tuple[FilePlan, ...]
    recipe: Recipe


def make_plan(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path | None = None,
    settings: Settings | None = None,
    *,
    name: str = "",
    events: Sequence[Event] = (),
    notes_before: Sequence[str] = (),
    measured: int = 0,
) -> Planned:
    """Make every decision of a run.

    Args:
        recipe: the requested recipe.
        checkpoint: the model, as `quantforge.planning.source_views.planned_source` returns it.
        out: path of the result, if given; its suffix may decide the format.
        settings: settings of the run (local paths, threads, where hidden states are held, what is written along with
            the result, how it is served); one thread by default.
        name: name of the result if ``out`` is None; by `naming` if empty.
        events: events that are already known.
        notes_before: notes that precede all others.
        measured: number of candidates that are measured before the run, for the forecast of its time.

    Raises:
        UsageError: ``out`` contradicts the format, or options contradict each other.
        InputError: the checkpoint is incomplete or already quantized, a pattern matches nothing, or the run would
            refuse the calibration text.
        RefusedError: the format cannot hold the scheme, and there is no substitute.
    """
    settings = settings or Settings(threads=1)
    recipe, choice_notes = choose_format(recipe, out)
    model_layout = _match_unquantized(checkpoint, recipe)
    file_format = load_format(recipe.format)
    tower = vision_tower_file(checkpoint, file_format) if settings.mmproj else None
    if not recipe.method:
        method, method_notes = choose_method(recipe, file_format, checkpoint, model_layout)
        recipe = replace(recipe, method=method)
        choice_notes = (*choice_notes, *method_notes)
    statistics = NeededStatistics(recipe)
    check_sparsity(recipe)
    if statistics.needs_declarations:
        model_layout = _match_with_declarations(
            checkpoint, model_layout, statistics.declarations_needed_by
        )

    # The scheme of every tensor.
    def plan_tensors(recipe: Recipe) -> tuple[PartialPlan, frozenset[Statistic]]:
        return _plan_tensors(recipe, checkpoint, model_layout, statistics, tower)

    partial_plan, statistics_needed = plan_tensors(recipe)
    needs = statistics_needed or frozenset({Statistic.SQUARES} if recipe.prune_experts else ())
    effort_context = EffortContext(
        statistics.method_words, partial_plan.tensors, model_layout, needs
    )
    # The default level tunes after gptq at few bits
    recipe, effort_notes = apply_effort(recipe, effort_context)
    random_share = random_row_share(recipe, statistics.method_words, partial_plan.tensors)
    recipe = replace(recipe, calibration=replace(recipe.calibration, random_share=random_share))
    files = partial_plan.files(recipe)
    chosen_recipe, partial_plan, embedding_note = choose_embedding(
        file_format,
        recipe,
        partial_plan,
        total_file_bytes(files),
        model_layout,
        lambda variant: plan_tensors(variant)[0],
    )
    if chosen_recipe is not recipe:
        recipe, files = chosen_recipe, partial_plan.files(chosen_recipe)
    if recipe.engine == TRANSFORMERS:
        partial_plan = with_transformers_verdict(checkpoint, partial_plan)
    serving = replace(settings.serving, devices=recipe.tensor_parallel)
    model_path, tensors = str(checkpoint.path), partial_plan.tensors
    engine_notes = check_engine(
        recipe.engine, serving, tensors, partial_plan.engines, recipe.format, model_path
    )
    source_notes = notes(recipe.sparsity, checkpoint, model_layout, partial_plan)
    if not name:
        name = naming.default_name(
            checkpoint, recipe.method, recipe.format, tensors, partial_plan.label, recipe.zeros
        )

    # Memory, time and disk space of the run.
    run = RunSizes(
        recipe.calibration,
        method_words=statistics.method_words,
        search_rows=recipe.awq.search_samples,
        needs=needs,
        in_memory=settings.activations == "memory",
        workers=rounding_workers(settings),
        guided_strips=recipe.guided_hessians or 0,
        tune=recipe.tune or 0,
        source_transforms=source_transforms(recipe.method),
    )
    substitutions = (
        *partial_plan.substitutions,
        *_family_events(model_layout, checkpoint),
        *coverage.events(tensors, model_layout.config),
    )
    guide_bytes = (
        guide_disk_bytes(run.guided_strips, tensors, model_layout, run.calibration)
        if run.guided_strips
        else 0
    )
    run_notes = [
        *self_generated_note(run, model_layout),
        *(row_notes(run.calibration, checkpoint.path) if needs else ()),
        *(check_length(run.calibration, model_layout.config) if needs else ()),
        *(
            [guide_note(run.guided_strips, run.calibration, guide_bytes)]
            if run.guided_strips
            else []
        ),
        *([tune_note(run.tune, run.calibration, model_layout)] if run.tune else []),
    ]
    peak = peak_bytes(model_layout, tensors, run)
    _check_smaller(checkpoint, tensors)
    source_bytes = sum(file.stat().st_size for file in checkpoint.original.shards)
    written_bytes = total_file_bytes(files) + (tower.plan.size if tower else 0)
    work = run_work(
        model_layout, tensors, run, recipe.rounding, (source_bytes, written_bytes), guide_bytes
    )
    if measured:
        work = with_measuring(work, tensors, run.rows, measured)

    # Calibration inputs: a text is checked now if one is given; the builtin text needs a tokenizer, which may be added
    # later.
    late_notes: list[str] = []
    if settings.calibration:
        check_text(recipe, checkpoint, settings, observes=bool(statistics_needed))
        if (
            statistics_needed
            and first_image_reference(recipe.calibration, settings.calibration) is not None
        ):
            peak, note = add_image_memory(
                peak, model_layout, recipe.calibration, in_memory=run.in_memory
            )
            late_notes.append(note)
    importance_events: tuple[Event, ...] = ()
    if settings.imatrix is not None and statistics.has_importance_file:
        importance_events, unknown_notes = compare_importance(
            settings.imatrix, tensors, model_layout, model_path
        )
        late_notes += unknown_notes

    plan = Plan(
        model=model_path,
        name=name,
        model_type=model_layout.model_type,
        method=recipe.method,
        transforms=statistics.method_words[:-1],
        rounder=statistics.method_words[-1],
        format=recipe.format,
        tensors=tensors,
        shards=tuple(file.names for file in files),
        output_bytes=total_file_bytes(files),
        peak_memory_bytes=peak,
        engines=partial_plan.engines,
        substitutions=(
            *events,
            *substitutions,
            *(tower.events if tower else ()),
            *importance_events,
        ),
        notes=(
            *notes_before,
            *choice_notes,
            *effort_notes,
            *source_notes,
            embedding_note,
            *run_notes,
            *engine_notes,
            *late_notes,
        ),
        not_copied=not_copied(checkpoint),
        tensors_after_blocks=partial_plan.tensors_after_blocks,
        needs=tuple(sorted(statistics_needed)),
        guided_hessians=run.guided_strips,
        tune=run.tune,
        unties_head=partial_plan.unties_head,
        work=work,
    )
    return Planned(plan, model_layout, files, recipe)


def _match_unquantized(checkpoint: Checkpoint, recipe: Recipe) -> ModelLayout:
    """Match every tensor of a model that is not quantized; errors as `match_tensors` and `check_draft_model`."""
    quantization = checkpoint.config.get("quantization_config")
    if isinstance(quantization, Mapping):
        quoted_path = shlex.quote(str(checkpoint.path))
        raise InputError(
            f"already quantized (quant_method {quantization.get('quant_method')!r})",
            f"`quantforge quantize {quoted_path} --requantize --dry-run` plans a second quantization,"
            f" `quantforge export {quoted_path} --format plain` makes a source for other commands;"
            " `quantforge plan` with --context N looks at it as it is",
            subject=str(checkpoint.path),
        )
    stored = [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    model_layout = match_tensors(checkpoint.config, stored, checkpoint.derived_declarations)
    headers = [item.header for item in model_layout.tensors if item.block >= 0 or item.draft_head]
    check_experts(model_layout.config, headers)
    check_draft_model(model_layout.draft_kind, recipe)
    return model_layout


def check_draft_model(draft_kind: str, recipe: Recipe) -> None:
    """Refuse formats and engines that cannot use draft heads stored without their model.

    Args:
        draft_kind: kind of the draft heads; "" for a model, which is never refused.
        recipe: the format, and the engine that the result is made for.

    Raises:
        RefusedError: nothing reads draft heads in this format.
        UsageError: an engine is named.
    """
    if not draft_kind:
        return
    key, engine = recipe.format, recipe.engine
    if engine is not None:
        command = '; vllm serve MODEL --speculative-config \'{"method": "eagle3", "model": "OUT"}\''
        raise UsageError(
            f"--for {engine}: {draft_kind} heads alone are not served, but beside their model",
            f"leave --for out{command if (engine, draft_kind) == ('vllm', EAGLE3) else ''}",
        )
    if key not in {DEFAULT_FORMAT, PLAIN}:
        raise RefusedError(
            f"--format {key}: nothing reads {draft_kind} heads in this format",
            f"--format {DEFAULT_FORMAT}, or leave --format out",
        )


def vision_tower_file(checkpoint: Checkpoint, file_format: Format) -> ProjectorFile:
    """Return the plan of the file with the vision tower (mmproj) that is written next to a GGUF file.

    Raises:
        UsageError: the result is not a GGUF file.
        RefusedError, InputError: as `projector_file`.
    """
    if not file_format.INFO.is_single_file:
        raise UsageError(
            f"{OPTION}: llama.cpp reads the tower beside a GGUF file, and the result would be {file_format.KEY},"
            " which holds it",
            f"add --format gguf, or leave {OPTION} out",
        )
    return projector_file(checkpoint, "")


def _match_with_declarations(
    checkpoint: Checkpoint, model_layout: ModelLayout, feature: str
) -> ModelLayout:
    """Return the model layout with declarations of its family, which are derived if there are none.

    Args:
        checkpoint: the model.
        model_layout: the layout of the model, possibly without declarations.
        feature: what needs the declarations, as in ``--method WHAT``.

    Raises:
        InputError: they cannot be derived; the message says why.
    """
    if model_layout.architecture is not None:
        return model_layout
    if model_layout.draft_kind:
        raise needs_architecture(model_layout, feature)
    try:
        return match_by_derivation(checkpoint)
    except (InputError, RefusedError) as error:
        raise needs_architecture(model_layout, feature, error.message) from error


def match_by_derivation(checkpoint: Checkpoint) -> ModelLayout:
    """Match a checkpoint with declarations that are derived from the modeling code in transformers.

    Raises:
        InputError: as `derive_declarations_for` and `match_tensors`.
        RefusedError: as `derive_declarations_for`, or files hold stacks of experts in the other orientation.
    """
    from quantforge.model.derive.derive import derive_declarations_for

    entries = [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    architecture = derive_declarations_for(checkpoint.config, entries)
    if architecture.transposed_stacks:
        raise RefusedError(
            f"its files hold {min(architecture.transposed_stacks)} the other way around",
            "--method rtn",
        )
    return match_tensors(checkpoint.config, entries, architecture)


def _family_events(model_layout: ModelLayout, checkpoint: Checkpoint) -> tuple[Event, ...]:
    """Return the event of a model whose declarations were derived from a class of another ``model_type``, if any."""
    if model_layout.architecture is None or model_layout.architecture.derivation is None:
        return ()
    from quantforge.model.model_class import resolve_model_type

    _, event = resolve_model_type(checkpoint.config)
    return (event,) if event is not None else ()


def _plan_tensors(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    statistics: NeededStatistics,
    tower: ProjectorFile | None,
) -> tuple[PartialPlan, frozenset[Statistic]]:
    """Return the format's partial plan and the statistics that it needs; refuse options the format does not support."""
    check_draft_heads(recipe, model_layout)
    method_needs = statistics.for_method(model_layout)
    if recipe.format != GGUF and (recipe.type or recipe.pre_tokenizer) is not None:
        raise UsageError(
            f"--type and --pre-tokenizer belong to GGUF files, not to {recipe.format}",
            "add --format gguf, or say --bits or --scheme; `export --format plain --type F16` sets the type of numbers",
        )
    if recipe.kv_cache != kv_scales.NONE and not load_format(recipe.format).INFO.holds_kv_scales:
        raise RefusedError(
            f"--kv-cache {recipe.kv_cache}: {recipe.format} files have no place for these scales",
            "add --format compressed-tensors, or drop --kv-cache",
        )
    if recipe.format != GGUF:
        partial_plan = plan_module_tensors(checkpoint, model_layout, recipe)
    else:
        from quantforge.planning.gguf_plan import plan_gguf_tensors  # imports all of GGUF

        has_importance = statistics.has_importance_file or bool(method_needs)
        partial_plan = plan_gguf_tensors(
            recipe, checkpoint, model_layout, has_importance=has_importance, tower=tower
        )
    return partial_plan, statistics.for_plan(model_layout, partial_plan, method_needs)


def with_transformers_verdict(checkpoint: Checkpoint, partial_plan: PartialPlan) -> PartialPlan:
    """Return a partial plan in which the verdict on transformers is decided from the names of its tensors.

    Without ``--for transformers`` this check is left to the publication of the result, because it needs torch.

    Raises:
        RefusedError: transformers would not find its tensors.
    """
    if all(verdict.loads is not None for verdict in partial_plan.engines):
        return partial_plan
    from quantforge.model import transformers_loading  # torch, which planning does without

    config = unquantized_config(checkpoint)
    config = untie_config(config) if partial_plan.unties_head else config
    engines = transformers_loading.resolve_verdicts(
        partial_plan.engines, config, partial_plan.tensors
    )
    for verdict in engines:
        if verdict.engine == TRANSFORMERS and verdict.loads is False:
            raise RefusedError(
                f"{TRANSFORMERS} does not load this: {verdict.reason}",
                f"name the tensors as {TRANSFORMERS} saves this family, or drop --for {TRANSFORMERS}",
            )
    return replace(partial_plan, engines=engines)


def _check_smaller(checkpoint: Checkpoint, tensors: Sequence[TensorPlan]) -> None:
    """Refuse a quantized result that is not smaller than its source."""
    if not any(tensor.action is Action.QUANTIZE for tensor in tensors):
        return
    # In 16 or 32 bits
    before = sum(entry.to_stored_tensor().nbytes for entry in checkpoint.entries.values())
    after = sum(tensor.output_bytes for tensor in tensors if tensor.action is not Action.DROP)
    if after >= before:
        raise RefusedError(
            f"the tensors would take {after:,} bytes, those of the source take {before:,}: nothing is gained",
            "larger groups, fewer bits, or a tied head left as it is; `quantforge plan --tensors` says what takes most",
        )


def check_text(
    recipe: Recipe, checkpoint: Checkpoint, settings: Settings, *, observes: bool
) -> None:
    """Refuse a calibration text that the run would refuse at its start, if the run reads one.

    Args:
        recipe: the planned recipe.
        checkpoint: the model.
        settings: settings with the path of the text.
        observes: whether the plan collects statistics.

    Raises:
        InputError: the source is missing, malformed or too short, or the model has no tokenizer.
    """
    if observes or recipe.prune_experts is not None:
        options, text_path = recipe.calibration, settings.calibration
        check_image_support(first_image_reference(options, text_path), checkpoint.config)
        check_calibration_text(
            options, text_path, checkpoint.path, vocabulary_size(checkpoint.config)
        )
