"""The conversion of a quantized model, planned from its headers: a proven re-layout or a refusal.

Values are read for one thing alone: whether the two copies of a head that is stored twice are the same.
Headers settle most pairs (`formats.convert.express`); where the values decide, `execution.run_conversion` looks at
them. The format ``plain`` takes the decoded weights, in the type of floating-point numbers that ``type`` names.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantforge.architectures import Architecture, architecture_of, text_config
from quantforge.architectures.configuration import SAME
from quantforge.architectures.draft_heads import is_draft, type_of
from quantforge.architectures.match import MatchedTensor, ModelLayout, Role
from quantforge.engines import check_engine
from quantforge.errors import RefusedError, UnknownNameError, UsageError
from quantforge.events import Event
from quantforge.files.reader import Checkpoint
from quantforge.formats import (
    GGUF,
    KEEP,
    PLAIN,
    Compatibility,
    Format,
    ModuleLayout,
    Verdict,
    detect_format,
    kv_scales,
    load_format,
)
from quantforge.formats.configuration import (
    CASTABLE_DTYPES,
    EMBEDDING_MODULES,
    FLOAT_DTYPES,
    head_module,
)
from quantforge.formats.convert import layer_scheme_in_format
from quantforge.formats.engine_rules import TRANSFORMERS, ModelToLoad, engine_verdicts, unmapped
from quantforge.formats.match_quantized import drop_tied_copy, match_headers
from quantforge.formats.refusal_reasons import common_split_size, summarize_names
from quantforge.grids import PerGroup
from quantforge.planning import coverage, naming
from quantforge.planning.choice import Choices, matches
from quantforge.planning.coverage import Coverage
from quantforge.planning.draft import Draft
from quantforge.planning.embedding_choice import bytes_of, check_not_quantized, rounded_words
from quantforge.planning.layer_schemes import LayerSchemes
from quantforge.planning.notes import facts, left_behind
from quantforge.planning.planner import check_alone, tower_beside, with_judged_names
from quantforge.plans import Action, FilePlan, Plan, Serving, StoredTensor, TensorPlan, choice
from quantforge.recipe import Recipe, Rounding
from quantforge.scheme import LayerScheme


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """One quantized matrix: how the source holds it, what it becomes, and how well that fits.

    Attributes:
        layout: of the source.
        wanted: its scheme in the target; None where it is decoded, since the target holds no such matrix.
        fit: how exactly the target holds it; READ where the values decide.
        transposed: whether the model holds the weight ``[in, out]``.
        scattered: whether the target keeps the index that says the group of each column (desc_act).
    """

    layout: ModuleLayout
    wanted: LayerScheme | None
    fit: Compatibility
    transposed: bool
    scattered: bool = False

    @property
    def name(self) -> str:
        """Return the name of the weight."""
        return f"{self.layout.module}.weight"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A planned conversion of one checkpoint.

    Attributes:
        checkpoint: the source.
        source_key: its format.
        plan: of the result.
        files: of the result.
        layers: what has codes in the source, by the name of the weight.
        model_layout: the source.
        to_round: tensors that the source holds plainly and the result in codes: the embedding, or none.
        events: that headers tell.
        asked_type: of decoded weights; rounding to it is accepted. None where none is asked for.
        rounding: how `to_round` are rounded.
    """

    checkpoint: Checkpoint
    source_key: str
    plan: Plan
    files: tuple[FilePlan, ...]
    layers: Mapping[str, ConvertedLayer]
    model_layout: ModelLayout
    to_round: tuple[TensorPlan, ...]
    events: tuple[Event, ...]
    asked_type: str | None
    rounding: Rounding

    @property
    def decoded_type(self) -> str:
        """Return the type in which decoded weights are stored."""
        return self.asked_type or self.checkpoint.dtype

    @property
    def coverage(self) -> Coverage | None:
        """Return how much of the blocks is quantized in the result, None where nothing is."""
        return None if self.plan.format == PLAIN else coverage.coverage(self.plan.tensors)


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
    target, source = load_format(recipe.format), detect_format(checkpoint.config)
    _check_options(checkpoint, recipe, target)
    tower = tower_beside(checkpoint, target) if mmproj else None
    asked_type = _number_type(recipe)

    # What has codes, and what becomes of it.
    headers = checkpoint.headers()
    layouts = source.find_layouts(checkpoint.config, headers)
    model_layout = match_headers(checkpoint, {item.module: item for item in layouts}, headers)
    family = _family(checkpoint)
    expressed = [_plan_layer(layout, checkpoint, family, source, target) for layout in layouts]
    split, split_notes = _with_one_group(expressed, target)
    layers = {layer.name: layer for layer in split}
    modules = {
        layer.layout.module: (layer.wanted, layer.layout.shape)
        for layer in split
        if layer.wanted is not None
    }
    if recipe.format == PLAIN:
        _refuse_single_experts(_loaded(checkpoint, modules))
        modules = {}
    if (mixture := target.check_model(modules)).verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{recipe.format}: {mixture.reason}", mixture.nearest or "--format compressed-tensors"
        )

    # What becomes of every tensor.
    if target.INFO.quantizes_tied_embedding:
        model_layout = drop_tied_copy(model_layout, checkpoint)
    draft: Draft
    if recipe.format == GGUF:
        from quantforge.planning.gguf_draft import draft_gguf_export  # with all that its files hold

        schemes = {module: wanted.weight for module, (wanted, _) in modules.items()}
        draft = draft_gguf_export(recipe, checkpoint, model_layout, schemes, tower)
    else:
        draft = _draft_safetensors(checkpoint, split, target, asked_type)
        if target.INFO.quantizes_tied_embedding:
            draft = _with_embedding(draft, recipe, checkpoint, model_layout, layers)
    tensors = _with_recorded_rules(draft.tensors, naming.first_recipe(checkpoint))
    engines = engine_verdicts(target.INFO, _loaded(checkpoint, modules))
    draft = replace(draft, tensors=tensors, engines=engines)
    if recipe.engine == TRANSFORMERS:
        draft = with_judged_names(checkpoint, draft)
    files = draft.files(recipe)
    to_round = tuple(
        item for item in tensors if item.action is Action.QUANTIZE and item.name not in layers
    )
    served = replace(serving or Serving(), devices=recipe.tensor_parallel)
    place = str(checkpoint.path)
    plan = Plan(
        model=place,
        name=naming.derived(checkpoint, None, recipe.format, tensors, draft.label),
        model_type=type_of(checkpoint.config),
        method=f"export from {source.KEY}",
        transforms=(),
        rounder="",
        format=recipe.format,
        tensors=tensors,
        shards=tuple(file.names for file in files),
        output_bytes=bytes_of(files),
        peak_memory_bytes=0,
        engines=draft.engines,
        substitutions=(*draft.substitutions, *(tower.events if tower else ())),
        notes=(
            *first,
            *(
                choice(f"{item.name}: {rounded_words(item)}")
                for item in to_round
                if not recipe.embedding
            ),
            *facts(checkpoint),
            *draft.notes,
            *split_notes,
            *_order_note(split),
            *check_engine(recipe.engine, served, tensors, draft.engines, recipe.format, place),
        ),
        left_behind=left_behind(checkpoint),
    )
    events = (
        *_lost(checkpoint, target, tensors),
        *(Event("embedding-rounded", item.name, rounded_words(item)) for item in to_round),
        *plan.substitutions,
    )
    return Conversion(
        checkpoint, source.KEY, plan, files, layers, model_layout, to_round, events, asked_type, recipe.rounding,
    )  # fmt: skip


def _check_options(checkpoint: Checkpoint, recipe: Recipe, target: Format) -> None:
    """Refuse options that only make sense when quantizing; errors as `check_alone`."""
    if recipe.embedding not in {"", KEEP} and not target.INFO.quantizes_tied_embedding:
        raise UsageError(
            f"--embedding {recipe.embedding}: an export to {recipe.format} rounds no embedding",
            "drop --embedding, or quantize the original model",
        )
    if any((recipe.bits, recipe.scheme, recipe.rules, recipe.ignore, recipe.scales == "reference")):
        raise UsageError(
            f"{checkpoint.path} is already quantized: an export keeps its numbers",
            "drop --bits, --scheme, --scales, --rule and --ignore, or quantize the original model",
        )
    check_alone(_kind_of_heads(checkpoint), recipe)


def _number_type(recipe: Recipe) -> str | None:
    """Return the type that is asked for of decoded weights, None where none is or the format has types of its own.

    Raises:
        UnknownNameError: it is none of `FLOAT_DTYPES`.
    """
    if recipe.format != PLAIN or recipe.type is None:
        return None
    kind = recipe.type.upper()
    if kind not in FLOAT_DTYPES:
        raise UnknownNameError(
            f"--type {recipe.type}: with --format {PLAIN} it names the type of the numbers",
            f"one of {', '.join(FLOAT_DTYPES)}; the types of GGUF are of --format gguf",
        )
    return kind


def _with_recorded_rules(tensors: Iterable[TensorPlan], made: Recipe) -> tuple[TensorPlan, ...]:
    """Return the tensors of a quantized model; those kept get the rule of its recipe ``made`` that keeps them."""
    wanted = [(pattern, f"ignore {pattern}") for pattern in made.ignore]
    wanted += [(r.match, f"rule {r.match}={r.scheme}") for r in made.rules if r.scheme == "keep"]

    def rule(tensor: TensorPlan) -> str:
        header = StoredTensor(tensor.name, tensor.dtype, tensor.shape)
        layer = MatchedTensor(tensor.name, header, Role.LINEAR)
        return next((text for pattern, text in wanted if matches(pattern, layer)), tensor.rule)

    return tuple(replace(t, rule=rule(t)) if t.action is Action.KEEP else t for t in tensors)


def _lost(checkpoint: Checkpoint, target: Format, tensors: Iterable[TensorPlan]) -> list[Event]:
    """Return events for what the target has no place for, and for what stays unquantized."""
    lost = []
    headers = checkpoint.headers()
    scales = kv_scales.find_scales(checkpoint.config, headers).tensor_names
    if scales and not target.INFO.holds_kv_scales:
        why = f"{target.KEY} has no place for {len(scales)} scales of the KV cache"
        lost.append(Event("kv-scales-left-out", checkpoint.path.name, why))
    found = coverage.events(tensors, text_config(checkpoint.config))
    return lost + [e for e in found if e.kind == "router-rounded" or target.KEY != PLAIN]


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
        embedding=any(module.rpartition(".")[2] in EMBEDDING_MODULES for module in modules),
        unmapped=unmapped(family, checkpoint.config, checkpoint.entries),
        draft=_kind_of_heads(checkpoint),
    )


def _refuse_single_experts(model: ModelToLoad) -> None:
    """Refuse to decode experts one by one where loaders look for one tensor."""
    if model.unstacked and (model.experts or model.kept_experts):
        raise RefusedError(
            f"{PLAIN}: {model.model_types[0]} has its experts in one tensor, which are read one by one here: loaders"
            " would take random numbers for them",
            "eval and verify read it as it is",
        )


def _kind_of_heads(checkpoint: Checkpoint) -> str:
    """Return the kind of draft heads that a checkpoint is, "" for a model."""
    return type_of(checkpoint.config) if is_draft(checkpoint.config) else ""


def _family(checkpoint: Checkpoint) -> Architecture | None:
    config = checkpoint.config
    return architecture_of(config) or architecture_of(text_config(config))


def _draft_safetensors(
    checkpoint: Checkpoint,
    layers: Iterable[ConvertedLayer],
    target: Format,
    asked_type: str | None,
) -> Draft:
    """Return the draft of a result in safetensors files: layers in the target's terms, all else kept."""
    layers = tuple(layers)
    headers = checkpoint.headers()
    used = {name for layer in layers for name in layer.layout.tensor_names}
    if not target.INFO.holds_kv_scales:
        used |= kv_scales.find_scales(checkpoint.config, headers).tensor_names
    tensors = [
        TensorPlan(
            item.name,
            item.dtype,
            item.shape,
            Action.KEEP,
            "kept",
            block=_block_of(item.name),
            outputs=(
                replace(item, dtype=asked_type or item.dtype)
                if item.dtype in CASTABLE_DTYPES
                else item,
            ),
        )
        for name, item in headers.items()
        if name not in used
    ]
    tensors += [_tensor_plan(layer, checkpoint.dtype, target, asked_type) for layer in layers]
    return Draft(tuple(sorted(tensors, key=lambda tensor: tensor.name)), ())


def _tensor_plan(
    layer: ConvertedLayer, dtype: str, target: Format, asked_type: str | None
) -> TensorPlan:
    """Return the plan of a layer in a result in safetensors files."""
    name, shape, wanted = layer.name, layer.layout.shape, layer.wanted
    held = shape[::-1] if layer.transposed else shape
    if wanted is None or target.KEY == PLAIN:
        outputs: tuple[StoredTensor, ...] = (StoredTensor(name, asked_type or dtype, held),)
    else:
        outputs = target.packed_tensors(layer.layout.module, wanted, shape)
    return TensorPlan(
        name,
        dtype,
        held,
        Action.KEEP if wanted is None else Action.QUANTIZE,
        "decoded" if wanted is None else "re-laid out",
        wanted,
        outputs=outputs,
        block=_block_of(name),
        transposed=layer.transposed,
        scattered=layer.scattered,
    )


def _with_embedding(
    draft: Draft,
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    layers: Mapping[str, ConvertedLayer],
) -> Draft:
    """Return a draft with the embedding rounded, where it is the head too or ``--embedding`` names a scheme.

    Args:
        draft: with everything that is not quantized kept.
        recipe: the format, and what is asked for the embedding.
        checkpoint: the source.
        model_layout: its tensors.
        layers: what has codes already, by name: the embedding gets the scheme that most of these have in the result.

    Raises:
        UsageError: a scheme is asked for an embedding that is quantized already.
        RefusedError: the format does not hold it.
    """
    form = load_format(recipe.format)
    counts = Counter(layer.wanted for layer in layers.values() if layer.wanted is not None)
    if not counts:
        return draft
    common = counts.most_common(1)[0][0]
    wanted = Recipe(scheme=str(common), embedding=recipe.embedding)
    terms = LayerSchemes(form, wanted, checkpoint.dtype, tied=model_layout.tied)
    choices = Choices(wanted, model_layout.tensors, terms, together=False)
    plans = {tensor.name: tensor for tensor in draft.tensors}
    for tensor in model_layout.tensors:
        if tensor.role is not Role.EMBEDDING:
            continue
        plan = plans[tensor.header.name]
        if plan.name in layers:
            check_not_quantized(plan.name, recipe.embedding)
        elif (layer := (decision := choices.decided(tensor)).scheme) is not None:
            outputs = form.packed_tensors(plan.name.removesuffix(".weight"), layer, plan.matrix)
            plans[plan.name] = replace(
                plan, action=Action.QUANTIZE, rule=decision.rule, scheme=layer, outputs=outputs
            )
            for item, reason in model_layout.dropped:
                if reason == SAME:
                    plans[item.name] = replace(
                        plans[item.name], action=Action.DROP, rule=f"dropped: {reason}", outputs=()
                    )
    return replace(draft, tensors=tuple(plans.values()))


def _plan_layer(
    layout: ModuleLayout,
    checkpoint: Checkpoint,
    family: Architecture | None,
    source: Format,
    target: Format,
) -> ConvertedLayer:
    """Decide what becomes of a layer, by its scheme.

    Raises:
        RefusedError: the target cannot hold it.
    """
    transposed = family is not None and family.transposed and _block_of(layout.module) >= 0
    if target.KEY == PLAIN:
        return ConvertedLayer(
            layout,
            layout.scheme,
            Compatibility(Verdict.DEPENDS_ON_VALUES, "decoded weights"),
            transposed,
        )
    fit, wanted = layer_scheme_in_format(layout.scheme, layout.shape, target, checkpoint.dtype)
    if _is_left_plain(checkpoint, layout, (fit, wanted), target):
        return ConvertedLayer(layout, None, Compatibility(Verdict.DEPENDS_ON_VALUES), transposed)
    if fit.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{layout.module}: {layout.scheme} cannot be stored in {target.KEY}: {fit.reason}",
            rounding_command(checkpoint, target.KEY, fit.nearest),
            tensor=layout.module,
        )
    indexed = f"{layout.module}{source.INFO.group_index_suffix}" in layout.tensor_names
    if indexed and layout.act_order is not False and fit.verdict is Verdict.EXACT:
        fit = Compatibility(Verdict.DEPENDS_ON_VALUES, "an index says the group of each column")
    same_groups = wanted.weight.granularity == layout.scheme.weight.granularity
    scattered = indexed and layout.act_order is True and same_groups
    return ConvertedLayer(
        layout, wanted, fit, transposed, scattered and stores_index(layout, wanted, target)
    )


def stores_index(layout: ModuleLayout, wanted: LayerScheme, target: Format) -> bool:
    """Return whether the target stores with a matrix the index that says which column is in which group."""
    packed = target.packed_tensors(layout.module, wanted, layout.shape)
    return f"{layout.module}{target.INFO.group_index_suffix}" in [item.name for item in packed]


def rounding_command(checkpoint: Checkpoint, key: str, scheme: str = "") -> str:
    """Return the command that rounds decoded weights into a format, as a hint where its numbers are others."""
    place, chosen = shlex.quote(str(checkpoint.path)), f" --scheme {scheme}" if scheme else ""
    return f"`quantforge export {place} --format {key}{chosen} --requantize` rounds the decoded weights"


def _is_left_plain(
    checkpoint: Checkpoint,
    layout: ModuleLayout,
    expressed: tuple[Compatibility, LayerScheme],
    target: Format,
) -> bool:
    """Return whether an embedding or a head is decoded, since the target holds none, or none with such numbers."""
    fit, wanted = expressed
    head = head_module(checkpoint.config)
    if layout.module != head and layout.module.rpartition(".")[2] not in EMBEDDING_MODULES:
        return False
    if target.KEY == GGUF or is_draft(checkpoint.config):
        return False
    if fit.verdict is not Verdict.IMPOSSIBLE:
        fit = target.check_model({layout.module: (wanted, layout.shape)})
    return fit.verdict is Verdict.IMPOSSIBLE


def _with_one_group(
    layers: Sequence[ConvertedLayer], target: Format
) -> tuple[Sequence[ConvertedLayer], tuple[str, ...]]:
    """Return the layers with groups of one size, where the target states only one and all can be split into it.

    A finer group with its scale repeated is as exact as the coarser one: how well a layer fits stays what it is.

    Returns:
        The layers, and a note on what was split.
    """
    held = ((layer.wanted, layer.layout.shape) for layer in layers if layer.wanted is not None)
    size = common_split_size(held) if target.INFO.single_group_size else None
    if size is None:
        return layers, ()
    found, names, more = [], [], 0
    for layer in layers:
        module, shape, old = layer.layout.module, layer.layout.shape, layer.wanted
        if old is None or old.weight.granularity == PerGroup(size):
            found.append(layer)
            continue
        new = replace(old, weight=replace(old.weight, granularity=PerGroup(size)))
        found.append(replace(layer, wanted=new, scattered=False))
        names.append(module)
        more += _nbytes(target.packed_tensors(module, new, shape))
        more -= _nbytes(target.packed_tensors(module, old, shape))
    note = (
        f"groups of {summarize_names(names)} are split into groups of {size} columns, with the same"
        f" scales repeated ({more:,} bytes): the files state one group size for the whole model"
    )
    return found, (note,)


def _nbytes(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _order_note(layers: Iterable[ConvertedLayer]) -> tuple[str, ...]:
    """Return a note on columns that stay scattered over groups."""
    if not any(layer.scattered for layer in layers):
        return ()
    return ("desc_act stays true, with the same g_idx: not every engine of the format loads that",)


def _block_of(name: str) -> int:
    numbers = [piece for piece in name.split(".") if piece.isdecimal()]
    return int(numbers[0]) if numbers else -1
