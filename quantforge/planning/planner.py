"""Planning: from a recipe and the headers of a checkpoint to every decision of the run.

`make_plan` decides once, from top to bottom: format, method, what becomes of every tensor, what effort sets, the files,
what has to be observed, what the run takes. Nothing here reads a weight, and torch is imported only where declarations
of a family have to be derived: what reads activations has to know which linears read the same one. Every source tensor
is accounted for once: quantized, kept, or dropped by declaration. The plan that ``quantforge plan`` prints is the
object that ``quantize`` executes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.architectures.configuration import embedding_rows, untied
from quantforge.architectures.draft_heads import EAGLE3
from quantforge.architectures.expert_sets import check_experts
from quantforge.architectures.match import ModelLayout, match_tensors, needs_architecture
from quantforge.engines import check_engine
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.formats import DEFAULT_FORMAT, GGUF, PLAIN, Format, kv_scales, load_format
from quantforge.formats.decoded import unquantized_config
from quantforge.formats.engine_rules import TRANSFORMERS
from quantforge.formats.gguf.projector_file import OPTION, ProjectorFile, projector_file
from quantforge.model.statistics import Statistic
from quantforge.planning import coverage, naming
from quantforge.planning.calibration_rows import (
    check_length,
    check_source,
    check_towers,
    named_image,
    own_text,
    random_share,
    row_notes,
    with_images,
)
from quantforge.planning.draft import Draft
from quantforge.planning.effort import Asked, apply_effort, chosen_method
from quantforge.planning.embedding_choice import bytes_of, chosen_embedding
from quantforge.planning.format_choice import chosen_format
from quantforge.planning.gradient_options import disk_bytes, guide_note, tune_note
from quantforge.planning.importance_check import compare_importance
from quantforge.planning.module_formats import check_zeros, draft_by_module
from quantforge.planning.needed_statistics import Observation
from quantforge.planning.notes import check_heads, left_behind, notes
from quantforge.planning.peak_memory import RunSizes, peak_bytes
from quantforge.planning.run_work import run_work, with_measuring
from quantforge.plans import Action, FilePlan, Plan, TensorPlan
from quantforge.quantizers import source_transforms
from quantforge.recipe import Recipe
from quantforge.settings import Settings, workers_of

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the recipe and the matched checkpoint that it was made from."""

    plan: Plan
    model_layout: ModelLayout
    files: tuple[FilePlan, ...]
    recipe: Recipe  # with its format and method


def make_plan(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path | None = None,
    settings: Settings | None = None,
    *,
    name: str = "",
    events: Sequence[Event] = (),
    first: Sequence[str] = (),
    measured: int = 0,
) -> Planned:
    """Decide everything about a run.

    Args:
        recipe: what is asked for.
        checkpoint: the model, as `quantforge.planning.source_views.planned_source` returns it.
        out: the result, where one is named: it may decide the format.
        settings: how the run goes: where activations wait, threads, where text and importance are, what is written
            beside the result and how that is served; one thread when left out.
        name: of the result where none is named; by `naming` when left out.
        events: that are known already.
        first: notes before all others.
        measured: how many candidates are measured before the run, which takes time.

    Raises:
        UsageError: ``out`` contradicts the format, or options contradict each other.
        InputError: the checkpoint is incomplete, already quantized, a pattern matches nothing, or the calibration text
            is one that the run would refuse.
        RefusedError: the format cannot hold a scheme and there is no substitution.
    """
    settings = settings or Settings(threads=1)
    recipe, choice_notes = chosen_format(recipe, out)
    model_layout = _model_layout(checkpoint, recipe)
    file_format = load_format(recipe.format)
    tower = tower_beside(checkpoint, file_format) if settings.mmproj else None
    if not recipe.method:
        method, method_notes = chosen_method(recipe, file_format, checkpoint, model_layout)
        recipe = replace(recipe, method=method)
        choice_notes = (*choice_notes, *method_notes)
    observation = Observation(recipe)
    check_zeros(recipe)
    if observation.needs_declarations:
        model_layout = _with_declarations(checkpoint, model_layout, observation.declaring)

    # What becomes of every tensor.
    def drafted(recipe: Recipe) -> tuple[Draft, frozenset[Statistic]]:
        return _drafted(recipe, checkpoint, model_layout, observation, tower)

    draft, observed = drafted(recipe)
    needs = observed or frozenset({Statistic.SQUARES} if recipe.prune_experts else ())
    asked = Asked(observation.words, draft.tensors, model_layout, needs)
    recipe, effort_notes = apply_effort(recipe, asked)  # tuning after gptq at few bits, by default
    share = random_share(recipe, observation.words, draft.tensors)
    recipe = replace(recipe, calibration=replace(recipe.calibration, random=share))
    files = draft.files(recipe)
    chosen, draft, embedding_note = chosen_embedding(
        file_format, recipe, draft, bytes_of(files), model_layout, lambda lean: drafted(lean)[0]
    )
    if chosen is not recipe:
        recipe, files = chosen, draft.files(chosen)
    if recipe.engine == TRANSFORMERS:
        draft = with_judged_names(checkpoint, draft)
    serving = replace(settings.serving, devices=recipe.tensor_parallel)
    place, tensors = str(checkpoint.path), draft.tensors
    engine_notes = check_engine(
        recipe.engine, serving, tensors, draft.engines, recipe.format, place
    )
    source_notes = notes(recipe.sparsity, checkpoint, model_layout, draft)
    if not name:
        name = naming.derived(
            checkpoint, recipe.method, recipe.format, tensors, draft.label, recipe.zeros
        )

    # What the run takes.
    run = RunSizes(
        recipe.calibration,
        words=observation.words,
        searched=recipe.awq.rows,
        needs=needs,
        in_memory=settings.activations == "memory",
        workers=workers_of(settings),
        guide=recipe.guide or 0,
        tune=recipe.tune or 0,
        whole=source_transforms(recipe.method),
    )
    substitutions = (
        *draft.substitutions,
        *_family_events(model_layout, checkpoint),
        *coverage.events(tensors, model_layout.config),
    )
    guide_bytes = disk_bytes(run.guide, tensors, model_layout, run.calibration) if run.guide else 0
    run_notes = [
        *own_text(run, model_layout),
        *(row_notes(run.calibration, checkpoint.path) if needs else ()),
        *(check_length(run.calibration, model_layout.config) if needs else ()),
        *([guide_note(run.guide, run.calibration, guide_bytes)] if run.guide else []),
        *([tune_note(run.tune, run.calibration, model_layout)] if run.tune else []),
    ]
    peak = peak_bytes(model_layout, tensors, run)
    _refuse_growth(checkpoint, tensors)
    source_bytes = sum(file.stat().st_size for file in checkpoint.opened.shards)
    written = bytes_of(files) + (tower.plan.size if tower else 0)
    work = run_work(
        model_layout, tensors, run, recipe.rounding, (source_bytes, written), guide_bytes
    )
    if measured:
        work = with_measuring(work, tensors, run.rows, measured)

    # What it reads beside the model: a text is looked at where one is named; the builtin needs a tokenizer, which may
    # come later.
    late_notes: list[str] = []
    if settings.calibration:
        check_text(recipe, checkpoint, settings, observes=bool(observed))
        if observed and named_image(recipe.calibration, settings.calibration) is not None:
            peak, note = with_images(
                peak, model_layout, recipe.calibration, in_memory=run.in_memory
            )
            late_notes.append(note)
    importance: tuple[Event, ...] = ()
    if settings.imatrix is not None and observation.is_known:
        importance, strange = compare_importance(settings.imatrix, tensors, model_layout, place)
        late_notes += strange

    plan = Plan(
        model=place,
        name=name,
        model_type=model_layout.model_type,
        method=recipe.method,
        transforms=observation.words[:-1],
        rounder=observation.words[-1],
        format=recipe.format,
        tensors=tensors,
        shards=tuple(file.names for file in files),
        output_bytes=bytes_of(files),
        peak_memory_bytes=peak,
        engines=draft.engines,
        substitutions=(*events, *substitutions, *(tower.events if tower else ()), *importance),
        notes=(
            *first,
            *choice_notes,
            *effort_notes,
            *source_notes,
            embedding_note,
            *run_notes,
            *engine_notes,
            *late_notes,
        ),
        left_behind=left_behind(checkpoint),
        late=draft.late,
        needs=tuple(sorted(observed)),
        guide=run.guide,
        tune=run.tune,
        untie=draft.untie,
        work=work,
    )
    return Planned(plan, model_layout, files, recipe)


def _model_layout(checkpoint: Checkpoint, recipe: Recipe) -> ModelLayout:
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
    stored = [entry.header() for entry in checkpoint.entries.values()]
    model_layout = match_tensors(checkpoint.config, stored, checkpoint.declared)
    own = [item.header for item in model_layout.tensors if item.block >= 0 or item.draft_head]
    check_experts(model_layout.config, own)
    check_alone(model_layout.draft, recipe)
    return model_layout


def check_alone(draft: str, recipe: Recipe) -> None:
    """Refuse a format or an engine that knows no draft heads, which no engine serves without their model.

    Args:
        draft: their kind; "" for a model, of which nothing is refused.
        recipe: the format, and the engine that the result is made for.

    Raises:
        RefusedError: nothing reads them in the format.
        UsageError: an engine is named.
    """
    if not draft:
        return
    key, engine = recipe.format, recipe.engine
    if engine is not None:
        served = '; vllm serve MODEL --speculative-config \'{"method": "eagle3", "model": "OUT"}\''
        raise UsageError(
            f"--for {engine}: {draft} heads alone are not served, but beside their model",
            f"leave --for out{served if (engine, draft) == ('vllm', EAGLE3) else ''}",
        )
    if key not in {DEFAULT_FORMAT, PLAIN}:
        raise RefusedError(
            f"--format {key}: nothing reads {draft} heads in this format",
            f"--format {DEFAULT_FORMAT}, or leave --format out",
        )


def tower_beside(checkpoint: Checkpoint, form: Format) -> ProjectorFile:
    """Return the file of the vision tower that is written beside a GGUF file.

    Raises:
        UsageError: the result is no such file.
        RefusedError, InputError: as `projector_file`.
    """
    if not form.INFO.is_single_file:
        raise UsageError(
            f"{OPTION}: llama.cpp reads the tower beside a GGUF file, and the result would be {form.KEY},"
            " which holds it",
            f"add --format gguf, or leave {OPTION} out",
        )
    return projector_file(checkpoint, "")


def _with_declarations(checkpoint: Checkpoint, model_layout: ModelLayout, what: str) -> ModelLayout:
    """Return a match with declarations: the same, or one by derived ones.

    Args:
        checkpoint: the model.
        model_layout: of it.
        what: needs them, as in ``--method WHAT``.

    Raises:
        InputError: none can be derived; the message says why.
    """
    if model_layout.architecture is not None:
        return model_layout
    if model_layout.draft:
        raise needs_architecture(model_layout, what)
    try:
        return derived_match(checkpoint)
    except (InputError, RefusedError) as error:
        raise needs_architecture(model_layout, what, error.message) from error


def derived_match(checkpoint: Checkpoint) -> ModelLayout:
    """Match a checkpoint by declarations that are derived from the code of transformers.

    Raises:
        InputError: as `derive_declarations_for` and `match`.
        RefusedError: as `derive_declarations_for`, or files hold stacks of experts in the other orientation.
    """
    from quantforge.model.derive.derive import derive_declarations_for

    entries = [entry.header() for entry in checkpoint.entries.values()]
    found = derive_declarations_for(checkpoint.config, entries)
    if found.turned:
        raise RefusedError(
            f"its files hold {min(found.turned)} the other way around", "--method rtn"
        )
    return match_tensors(checkpoint.config, entries, found)


def _family_events(model_layout: ModelLayout, checkpoint: Checkpoint) -> tuple[Event, ...]:
    """Return the event of a model that was derived as one of another ``model_type``, if it was."""
    if model_layout.architecture is None or model_layout.architecture.derived is None:
        return ()
    from quantforge.model.model_class import resolve_model_type

    _, event = resolve_model_type(checkpoint.config)
    return (event,) if event is not None else ()


def _drafted(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    observation: Observation,
    tower: ProjectorFile | None,
) -> tuple[Draft, frozenset[Statistic]]:
    """Return the draft of the format, and what has to be observed for it; refuse what files have no place for."""
    check_heads(recipe, model_layout)
    wanted = observation.of_method(model_layout)
    if recipe.format != GGUF and (recipe.type or recipe.pre) is not None:
        raise UsageError(
            f"--type and --pre belong to GGUF files, not to {recipe.format}",
            "add --format gguf, or say --bits or --scheme; `export --format plain --type F16` sets the type of numbers",
        )
    if recipe.kv_cache != kv_scales.NONE and not load_format(recipe.format).INFO.holds_kv_scales:
        raise RefusedError(
            f"--kv-cache {recipe.kv_cache}: {recipe.format} files have no place for these scales",
            "add --format compressed-tensors, or drop --kv-cache",
        )
    if recipe.format != GGUF:
        draft = draft_by_module(checkpoint, model_layout, recipe)
    else:
        from quantforge.planning.gguf_draft import draft_gguf  # with all that its files hold

        known = observation.is_known or bool(wanted)
        draft = draft_gguf(recipe, checkpoint, model_layout, observed=known, tower=tower)
    return draft, observation.of_draft(model_layout, draft, wanted)


def with_judged_names(checkpoint: Checkpoint, draft: Draft) -> Draft:
    """Return a draft whose verdict on transformers, which is asked for, is by the names of its tensors.

    What a plan without an engine cannot tell from declarations is left open, for the publication of the result.

    Raises:
        RefusedError: transformers would not find its tensors.
    """
    if all(verdict.loads is not None for verdict in draft.engines):
        return draft
    from quantforge.model import transformers_loading  # torch, which planning does without

    config = unquantized_config(checkpoint)
    config = untied(config) if draft.untie else config
    engines = transformers_loading.resolve_verdicts(draft.engines, config, draft.tensors)
    for verdict in engines:
        if verdict.engine == TRANSFORMERS and verdict.loads is False:
            raise RefusedError(
                f"{TRANSFORMERS} does not load this: {verdict.reason}",
                f"name the tensors as {TRANSFORMERS} saves this family, or drop --for {TRANSFORMERS}",
            )
    return replace(draft, engines=engines)


def _refuse_growth(checkpoint: Checkpoint, tensors: Sequence[TensorPlan]) -> None:
    """Refuse a result that is no smaller than the source, unless nothing is quantized: that is a mere conversion."""
    if not any(tensor.action is Action.QUANTIZE for tensor in tensors):
        return
    before = sum(entry.header().nbytes for entry in checkpoint.entries.values())  # as decoded
    after = sum(tensor.output_bytes for tensor in tensors if tensor.action is not Action.DROP)
    if after >= before:
        raise RefusedError(
            f"the tensors would take {after:,} bytes, those of the source take {before:,}: nothing is gained",
            "larger groups, fewer bits, or a tied head left as it is; `quantforge plan --tensors` says what takes most",
        )


def check_text(
    recipe: Recipe, checkpoint: Checkpoint, settings: Settings, *, observes: bool
) -> None:
    """Refuse a calibration text that the run would refuse at its start, where it reads one.

    Args:
        recipe: as planned.
        checkpoint: the model.
        settings: where the text is.
        observes: whether the plan needs statistics.

    Raises:
        InputError: the source is missing, malformed or too short, or the model has no tokenizer.
    """
    if observes or recipe.prune_experts is not None:
        options, place = recipe.calibration, settings.calibration
        check_towers(named_image(options, place), checkpoint.config)
        check_source(options, place, checkpoint.path, embedding_rows(checkpoint.config))
