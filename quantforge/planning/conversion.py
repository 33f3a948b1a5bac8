"""The conversion of a quantized model, planned from its headers: a proven re-layout or a refusal.

Headers settle most pairs (`formats.convert.express`); where the values decide, `execution.relayout` looks at them. The
format ``plain`` takes the decoded weights, in the type of floating-point numbers that ``type`` names.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantforge.architectures import Architecture, architecture_of, text_config
from quantforge.architectures.configuration import SAME
from quantforge.architectures.draft_kinds import is_draft, type_of
from quantforge.architectures.matched import Matched, MatchedTensor, Role
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import RefusedError, UnknownNameError, UsageError
from quantforge.events import Event
from quantforge.formats import (
    GGUF,
    KEEP,
    PLAIN,
    Fit,
    Format,
    ModuleLayout,
    Verdict,
    detect,
    format_of,
    kv_scales,
    targets,
)
from quantforge.formats.configuration import EMBEDDINGS, FLOATS, NUMBERS, head_of
from quantforge.formats.convert import express_layer, of_input
from quantforge.formats.engines import ModelToLoad, engine_verdicts, unmapped
from quantforge.formats.fits import named, split_group
from quantforge.formats.matching import match_headers, settle_tied
from quantforge.grids import PerGroup
from quantforge.planning import coverage, naming
from quantforge.planning.by_module import Draft
from quantforge.planning.choice import Choices, matches
from quantforge.planning.coverage import Coverage
from quantforge.planning.embedding_choice import bytes_of, check_not_quantized, rounded_words
from quantforge.planning.layer_schemes import LayerSchemes
from quantforge.planning.notes import facts, left_behind
from quantforge.planning.planner import check_alone, names_settled, tower_beside
from quantforge.plans import CHOSEN, Action, FilePlan, Plan, Serving, StoredTensor, TensorPlan
from quantforge.recipe import Recipe, Rounding
from quantforge.scheme import LayerScheme

if TYPE_CHECKING:
    from quantforge.packers.tensor import QuantizedTensor

DECODED = PLAIN


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """One quantized matrix: how it lies in the source, what it becomes (None: decoded), and how well that fits."""

    layout: ModuleLayout
    wanted: LayerScheme | None
    fit: Fit
    plan: TensorPlan

    def with_inputs(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """Return a tensor whose input is quantized as the target says; measured parameters of another are dropped."""
        assert self.wanted is not None
        if tensor.input == self.wanted.input:
            return tensor
        beside = of_input(tensor.parameters)
        kept = {key: value for key, value in tensor.parameters.items() if key not in beside}
        return replace(tensor, parameters=kept, input=self.wanted.input)


@dataclass(slots=True)
class Conversion:
    """A planned conversion of one checkpoint."""

    checkpoint: Checkpoint
    source_key: str
    plan: Plan
    files: tuple[FilePlan, ...]
    layers: dict[str, ConvertedLayer]
    matched: Matched
    rounded: tuple[
        TensorPlan, ...
    ]  # held plainly by the source and in codes by the result: the embedding, or none
    events: list[Event]
    asked_type: str | None  # of decoded weights: rounding to it is accepted
    rounding: Rounding
    made: dict[str, QuantizedTensor] = field(default_factory=dict)  # of `rounded`, once settled
    figures: dict[str, dict[str, float]] = field(default_factory=dict)  # of those, for the manifest

    @property
    def coverage(self) -> Coverage | None:
        """Return how much of the blocks is quantized in the result, None where nothing is."""
        return None if self.plan.format == DECODED else coverage.coverage(self.plan.tensors)


def plan_export(
    checkpoint: Checkpoint,
    recipe: Recipe,
    serving: Serving | None = None,
    *,
    mmproj: bool = False,
    first: Sequence[str] = (),
) -> Conversion:
    """Plan the conversion of a quantized checkpoint from its headers.

    Args:
        checkpoint: the source.
        recipe: the format, and what else applies to an export.
        serving: what is asked of the command that serves the result, beside the recipe's devices.
        mmproj: whether the vision tower is written beside a GGUF file.
        first: notes before all others.

    Raises:
        RefusedError: the target cannot hold a layer; the nearest scheme that it could is named.
        UsageError: options that only make sense when quantizing.
    """
    given = (recipe.bits, recipe.scheme, recipe.rules, recipe.ignore, recipe.scales == "reference")
    target = format_of(recipe.format)
    if recipe.embedding not in {"", KEEP} and not target.ABOUT.embedding_tool:
        raise UsageError(
            f"--embedding {recipe.embedding}: an export to {recipe.format} rounds no embedding",
            "drop --embedding, or quantize the original model",
        )
    if any(given):
        raise UsageError(
            f"{checkpoint.path} is already quantized: an export keeps its numbers",
            "drop --bits, --scheme, --scales, --rule and --ignore, or quantize the original model",
        )
    check_alone(_draft(checkpoint), recipe)
    tower = tower_beside(checkpoint, target, wanted=mmproj)
    asked_type = _number_type(recipe)
    source = detect(checkpoint.config)
    headers = {name: entry.stored() for name, entry in checkpoint.entries.items()}
    layouts = source.layouts(checkpoint.config, headers)
    matched = match_headers(checkpoint, {item.module: item for item in layouts}, headers)
    expressed = tuple(_layers(checkpoint, layouts, recipe.format, asked_type))
    split = _with_one_group(expressed, target)
    layers = {layer.plan.name: layer for layer in split}
    modules = {
        layer.layout.module: (layer.wanted, layer.layout.shape)
        for layer in layers.values()
        if layer.wanted is not None
    }
    if recipe.format == DECODED:
        modules = _none_left(_loaded(checkpoint, modules))
    mixture = target.check_model(modules)
    if mixture.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{recipe.format}: {mixture.reason}", mixture.nearest or "--format compressed-tensors"
        )
    draft: Draft
    if recipe.format != GGUF:
        draft = _relaid(checkpoint, layers.values(), recipe, asked_type)
    if target.ABOUT.embedding_tool:
        matched = settle_tied(matched, checkpoint)
    if recipe.format == GGUF:
        schemes = {module: wanted.weight for module, (wanted, _) in modules.items()}
        from quantforge.planning import gguf  # with all that its files hold

        draft = gguf.draft(recipe, checkpoint, matched, given=schemes, tower=tower)
    elif target.ABOUT.embedding_tool:
        draft = _with_embedding(draft, recipe, checkpoint, matched, layers)
    made = naming.first_recipe(checkpoint)
    draft = replace(draft, tensors=_as_asked(draft.tensors, made))
    engines = engine_verdicts(target.ABOUT, _loaded(checkpoint, modules))
    draft = names_settled(recipe.engine, checkpoint, replace(draft, engines=engines))
    served = replace(serving or Serving(), devices=recipe.tensor_parallel)
    place, engines = str(checkpoint.path), draft.engines
    said = targets.check(recipe.engine, served, draft.tensors, engines, recipe.format, place)
    files = draft.files(recipe)
    rounded = tuple(
        one for one in draft.tensors if one.action is Action.QUANTIZE and one.name not in layers
    )
    chosen = [
        f"{CHOSEN}{one.name}: {rounded_words(one)}" for one in rounded if not recipe.embedding
    ]
    plan = Plan(
        model=str(checkpoint.path),
        name=naming.derived(checkpoint, None, recipe.format, draft.tensors, draft.label),
        model_type=type_of(checkpoint.config),
        method=f"export from {source.KEY}",
        transforms=(),
        rounder="",
        format=recipe.format,
        tensors=draft.tensors,
        shards=tuple(file.names for file in files),
        output_bytes=bytes_of(files),
        peak_memory_bytes=0,
        engines=engines,
        substitutions=tower.events if tower else (),
        notes=(
            *first,
            *chosen,
            *facts(checkpoint),
            *draft.notes,
            *_split_note(expressed, split),
            *_order_note(split),
            *said,
        ),
        left_behind=left_behind(checkpoint),
    )
    events = [
        *_lost(checkpoint, recipe.format, draft),
        *(Event("embedding-rounded", one.name, rounded_words(one)) for one in rounded),
        *plan.substitutions,
    ]
    return Conversion(
        checkpoint,
        source.KEY,
        plan,
        files,
        layers,
        matched,
        rounded,
        events,
        asked_type,
        recipe.rounding,
    )


def _number_type(recipe: Recipe) -> str | None:
    """Return the type that is asked for of decoded weights, None where none is or the format has types of its own.

    Raises:
        UnknownNameError: it is none of `FLOATS`.
    """
    if recipe.format != DECODED or recipe.type is None:
        return None
    kind = recipe.type.upper()
    if kind not in FLOATS:
        raise UnknownNameError(
            f"--type {recipe.type}: with --format {DECODED} it names the type of the numbers",
            f"one of {', '.join(FLOATS)}; the types of GGUF are of --format gguf",
        )
    return kind


def _as_asked(tensors: Iterable[TensorPlan], made: Recipe) -> tuple[TensorPlan, ...]:
    """Return the tensors of a quantized model; those kept get the rule of its recipe ``made`` that keeps them."""
    wanted = [(pattern, f"ignore {pattern}") for pattern in made.ignore]
    wanted += [(r.match, f"rule {r.match}={r.scheme}") for r in made.rules if r.scheme == "keep"]

    def rule(tensor: TensorPlan) -> str:
        stored = StoredTensor(tensor.name, tensor.dtype, tensor.shape)
        layer = MatchedTensor(tensor.name, stored, Role.LINEAR)
        return next((text for pattern, text in wanted if matches(pattern, layer)), tensor.rule)

    return tuple(replace(t, rule=rule(t)) if t.action is Action.KEEP else t for t in tensors)


def _lost(checkpoint: Checkpoint, key: str, draft: Draft) -> list[Event]:
    """Return events for what the target has no place for, and for what stays unquantized."""
    lost = []
    headers = {name: entry.stored() for name, entry in checkpoint.entries.items()}
    scales = kv_scales.found(checkpoint.config, headers).stored
    if scales and not format_of(key).ABOUT.holds_kv_scales:
        why = f"{key} has no place for {len(scales)} scales of the KV cache"
        lost.append(Event("kv-scales-left-out", checkpoint.path.name, why))
    found = coverage.events(draft.tensors, text_config(checkpoint.config))
    return lost + [e for e in found if e.kind == "router-rounded" or key != DECODED]


def _loaded(
    checkpoint: Checkpoint, modules: Mapping[str, tuple[LayerScheme, tuple[int, int]]]
) -> ModelToLoad:
    """Return the facts of the result by which engines load it or not."""
    types = (text_config(checkpoint.config), checkpoint.config)
    family = _family(checkpoint)
    return ModelToLoad(
        modules,
        tuple(str(config.get("model_type")) for config in types),
        transposed=family is not None and family.transposed,
        unstacked=family is not None and family.stacks_experts and not family.joins_experts,
        kept=tuple(name for name in checkpoint.entries if name.rpartition(".")[0] not in modules),
        embedding=any(module.rpartition(".")[2] in EMBEDDINGS for module in modules),
        unmapped=unmapped(family, checkpoint.config, checkpoint.entries),
        draft=_draft(checkpoint),
    )


def _none_left(model: ModelToLoad) -> dict[str, tuple[LayerScheme, tuple[int, int]]]:
    """Return no modules: nothing stays quantized. Refuse experts one by one where loaders look for one tensor."""
    if model.unstacked and (model.experts or model.kept_experts):
        raise RefusedError(
            f"{DECODED}: {model.model_types[0]} has its experts in one tensor, which are read one by one here: loaders"
            " would take random numbers for them",
            "eval and verify read it as it is",
        )
    return {}


def _draft(checkpoint: Checkpoint) -> str:
    """Return the kind of draft heads that a checkpoint is, "" for a model."""
    return type_of(checkpoint.config) if is_draft(checkpoint.config) else ""


def _family(checkpoint: Checkpoint) -> Architecture | None:
    config = checkpoint.config
    return architecture_of(config) or architecture_of(text_config(config))


def _relaid(
    checkpoint: Checkpoint, layers: Iterable[ConvertedLayer], recipe: Recipe, asked_type: str | None
) -> Draft:
    """Return the tensors and files of a result that is stored module by module."""
    headers = {name: entry.stored() for name, entry in checkpoint.entries.items()}
    layers = tuple(layers)
    used = {name for layer in layers for name in layer.layout.stored}
    if not format_of(recipe.format).ABOUT.holds_kv_scales:
        used |= kv_scales.found(checkpoint.config, headers).stored
    kept = [
        TensorPlan(
            item.name,
            item.dtype,
            item.shape,
            Action.KEEP,
            "kept",
            part=_part(item.name),
            stored=(
                replace(item, dtype=asked_type or item.dtype) if item.dtype in NUMBERS else item,
            ),
        )
        for name, item in headers.items()
        if name not in used
    ]
    tensors = tuple(sorted([*kept, *(layer.plan for layer in layers)], key=lambda t: t.name))
    return Draft(tensors, ())


def _with_embedding(
    draft: Draft,
    recipe: Recipe,
    checkpoint: Checkpoint,
    matched: Matched,
    layers: Mapping[str, ConvertedLayer],
) -> Draft:
    """Return a draft with the embedding rounded, where it is the head too or ``--embedding`` names a scheme.

    Args:
        draft: with everything that is not quantized kept.
        recipe: the format, and what is asked for the embedding.
        checkpoint: the source.
        matched: its tensors.
        layers: what has codes already, by name: the embedding gets the scheme that most of these have in the result.

    Raises:
        UsageError: a scheme is asked for an embedding that is quantized already.
        RefusedError: the format does not hold it.
    """
    form = format_of(recipe.format)
    counts = Counter(layer.wanted for layer in layers.values() if layer.wanted is not None)
    if not counts:
        return draft
    common = counts.most_common(1)[0][0]
    wanted = Recipe(scheme=str(common), embedding=recipe.embedding)
    terms = LayerSchemes(form, wanted, checkpoint.dtype, tied=matched.tied)
    choices = Choices(wanted, matched.tensors, terms, together=False)
    plans = {tensor.name: tensor for tensor in draft.tensors}
    for tensor in matched.tensors:
        if tensor.role is not Role.EMBEDDING:
            continue
        plan = plans[tensor.stored.name]
        if plan.name in layers:
            check_not_quantized(plan.name, recipe.embedding)
        elif (layer := (decision := choices.decided(tensor)).form) is not None:
            stored = form.stored(plan.name.removesuffix(".weight"), layer, plan.matrix)
            plans[plan.name] = replace(
                plan, action=Action.QUANTIZE, rule=decision.rule, scheme=layer, stored=stored
            )
            for item, reason in matched.dropped:
                if reason == SAME:
                    plans[item.name] = replace(
                        plans[item.name], action=Action.DROP, rule=f"dropped: {reason}", stored=()
                    )
    return replace(draft, tensors=tuple(plans.values()))


def _layers(
    checkpoint: Checkpoint, layouts: Sequence[ModuleLayout], key: str, asked_type: str | None
) -> Iterator[ConvertedLayer]:
    target, source = format_of(key), detect(checkpoint.config)
    family = _family(checkpoint)
    conv = family is not None and family.transposed
    for layout in layouts:
        name = f"{layout.module}.weight"
        part = _part(name)
        transposed = conv and part >= 0
        shape = layout.shape[::-1] if transposed else layout.shape
        if key == DECODED:
            fit, wanted = Fit(Verdict.READ, "decoded weights"), layout.scheme
            stored: tuple[StoredTensor, ...] = (
                StoredTensor(name, asked_type or checkpoint.dtype, shape),
            )
        else:
            fit, wanted = express_layer(layout.scheme, layout.shape, target, checkpoint.dtype)
            if _is_left_plain(checkpoint, layout, (fit, wanted), target):
                held = StoredTensor(name, checkpoint.dtype, shape)
                plan = TensorPlan(
                    name, checkpoint.dtype, shape, Action.KEEP, "decoded", stored=(held,), part=part
                )
                yield ConvertedLayer(layout, None, Fit(Verdict.READ), plan)
                continue
            if fit.verdict is Verdict.IMPOSSIBLE:
                raise RefusedError(
                    f"{layout.module}: {layout.scheme} cannot be stored in {key}: {fit.reason}",
                    rounding_command(checkpoint, key, fit.nearest),
                    tensor=layout.module,
                )
            stored = target.stored(layout.module, wanted, layout.shape)
        indexed = f"{layout.module}{source.ABOUT.group_index}" in layout.stored
        if indexed and layout.scattered is not False and fit.verdict is Verdict.EXACT:
            fit = Fit(Verdict.READ, "an index says the group of each column")
        plan = TensorPlan(
            name,
            checkpoint.dtype,
            shape,
            Action.QUANTIZE,
            "re-laid out",
            wanted,
            stored=stored,
            part=part,
            transposed=transposed,
            scattered=indexed
            and layout.scattered is True
            and _keeps_index(layout, wanted, stored, target),
        )
        yield ConvertedLayer(layout, wanted, fit, plan)


def _keeps_index(
    layout: ModuleLayout, wanted: LayerScheme, stored: Sequence[StoredTensor], target: Format
) -> bool:
    """Return whether the target stores the same groups with the index that says which column is in which."""
    names = [item.name for item in stored]
    same = wanted.weight.granularity == layout.scheme.weight.granularity
    return same and f"{layout.module}{target.ABOUT.group_index}" in names


def rounding_command(checkpoint: Checkpoint, key: str, scheme: str = "") -> str:
    """Return the command that rounds decoded weights into a format, as a hint where its numbers are others."""
    place, chosen = shlex.quote(str(checkpoint.path)), f" --scheme {scheme}" if scheme else ""
    return f"`quantforge export {place} --format {key}{chosen} --requantize` rounds the decoded weights"


def _is_left_plain(
    checkpoint: Checkpoint, layout: ModuleLayout, expressed: tuple[Fit, LayerScheme], target: Format
) -> bool:
    """Return whether an embedding or a head is decoded, since the target holds none, or none with such numbers."""
    fit, wanted = expressed
    head = head_of(checkpoint.config)
    if layout.module != head and layout.module.rpartition(".")[2] not in EMBEDDINGS:
        return False
    if target.KEY == GGUF or is_draft(checkpoint.config):
        return False
    if fit.verdict is not Verdict.IMPOSSIBLE:
        fit = target.check_model({layout.module: (wanted, layout.shape)})
    return fit.verdict is Verdict.IMPOSSIBLE


def _with_one_group(
    layers: tuple[ConvertedLayer, ...], target: Format
) -> tuple[ConvertedLayer, ...]:
    """Return the layers with groups of one size, where the target states only one and all can be split into it.

    A finer group with its scale repeated is as exact as the coarser one: how well a layer fits stays what it is.
    """
    held = ((layer.wanted, layer.layout.shape) for layer in layers if layer.wanted is not None)
    size = split_group(held) if target.ABOUT.one_group else None
    if size is None:
        return layers

    def with_group(layer: ConvertedLayer) -> ConvertedLayer:
        if layer.wanted is None:
            return layer
        weight = replace(layer.wanted.weight, granularity=PerGroup(size))
        wanted = replace(layer.wanted, weight=weight)
        stored = target.stored(layer.layout.module, wanted, layer.layout.shape)
        scattered = layer.plan.scattered and wanted == layer.wanted
        plan = replace(layer.plan, scheme=wanted, stored=stored, scattered=scattered)
        return replace(layer, wanted=wanted, plan=plan)

    return tuple(map(with_group, layers))


def _split_note(
    before: Iterable[ConvertedLayer], after: Iterable[ConvertedLayer]
) -> tuple[str, ...]:
    """Return a note on the groups that were split into smaller ones."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old.wanted != new.wanted]
    if not pairs:
        return ()
    more = sum(new.plan.stored_bytes - old.plan.stored_bytes for old, new in pairs)
    names, last = [new.layout.module for _, new in pairs], pairs[-1][1].wanted
    assert last is not None
    return (
        f"groups of {named(names)} are split into groups of {last.weight.group_size(0)} columns, with the same"
        f" scales repeated ({more:,} bytes): the files state one group size for the whole model",
    )


def _order_note(layers: Iterable[ConvertedLayer]) -> tuple[str, ...]:
    """Return a note on columns that stay scattered over groups."""
    if not any(layer.plan.scattered for layer in layers):
        return ()
    return ("desc_act stays true, with the same g_idx: not every engine of the format loads that",)


def _part(name: str) -> int:
    numbers = [piece for piece in name.split(".") if piece.isdecimal()]
    return int(numbers[0]) if numbers else -1
