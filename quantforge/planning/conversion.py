"""Plan the export of a quantized model from its headers: either an exact re-layout of its codes or a refusal.

Headers decide most pairs of formats (`formats.convert.layer_scheme_in_format`); where values decide,
`execution.run_conversion` reads them. Planning reads values for one purpose only: to see whether both copies of a head
that is stored twice are equal. The format ``plain`` takes the decoded weights in the dtype that ``--type`` names.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantforge.architectures import Architecture, architecture_of, text_config
from quantforge.architectures.configuration import TIED_HEAD_REASON
from quantforge.architectures.draft_heads import is_draft, model_type_or_draft
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
from quantforge.formats.engine_verdicts import (
    TRANSFORMERS,
    ModelToLoad,
    engine_verdicts,
    unmapped_reason,
)
from quantforge.formats.match_quantized import drop_tied_copy, match_headers
from quantforge.formats.refusal_reasons import common_split_size, summarize_names
from quantforge.grids import PerGroup
from quantforge.planning import coverage, naming
from quantforge.planning.coverage import Coverage
from quantforge.planning.embedding_choice import (
    check_not_quantized,
    embedding_note,
    total_file_bytes,
)
from quantforge.planning.layer_schemes import LayerSchemes
from quantforge.planning.notes import facts, not_copied
from quantforge.planning.partial_plan import PartialPlan
from quantforge.planning.planner import (
    check_draft_model,
    vision_tower_file,
    with_transformers_verdict,
)
from quantforge.planning.scheme_rules import SchemeChooser, matches
from quantforge.plans import Action, FilePlan, Plan, Serving, StoredTensor, TensorPlan, choice
from quantforge.recipe import Recipe, Rounding
from quantforge.scheme import LayerScheme


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """One quantized matrix: how the source stores it, what it becomes, and how exactly.

    Attributes:
        layout: how the source stores it.
        target_scheme: its scheme in the target; None if it is decoded because the target cannot hold it.
        fit: how exactly the target holds it; DEPENDS_ON_VALUES if only the values tell.
        transposed: whether the model holds the weight as ``[in, out]``.
        has_group_index: whether the target keeps the index of each column's group (desc_act).
    """

    layout: ModuleLayout
    target_scheme: LayerScheme | None
    fit: Compatibility
    transposed: bool
    has_group_index: bool = False

    @property
    def name(self) -> str:
        """Return the name of the weight."""
        return f"{self.layout.module}.weight"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A planned export of one checkpoint.

    Attributes:
        checkpoint: the source.
        source_format: key of the source's format.
        plan: plan of the result.
        files: files of the result.
        layers: layers that are quantized in the source, by the name of the weight.
        model_layout: tensors of the source, matched to its architecture.
        tensors_to_quantize: tensors that are quantized only in the result: the embedding, or none.
        events: events that headers tell.
        requested_dtype: dtype that the user requested for decoded weights, accepting its rounding; None if none.
        rounding: options for `tensors_to_quantize`.
    """

    checkpoint: Checkpoint
    source_format: str
    plan: Plan
    files: tuple[FilePlan, ...]
    layers: Mapping[str, ConvertedLayer]
    model_layout: ModelLayout
    tensors_to_quantize: tuple[TensorPlan, ...]
    events: tuple[Event, ...]
    requested_dtype: str | None
    rounding: Rounding

    @property
    def decoded_type(self) -> str:
        """Return the dtype in which decoded weights are stored."""
        return self.requested_dtype or self.checkpoint.dtype

    @property
    def coverage(self) -> Coverage | None:
        """Return which share of the blocks is quantized in the result; None for the plain format."""
        return None if self.plan.format == PLAIN else coverage.coverage(self.plan.tensors)


def plan_export(
    checkpoint: Checkpoint,
    recipe: Recipe,
    serving: Serving | None = None,
    *,
    mmproj: bool = False,
    notes_before: Sequence[str] = (),
) -> ExportPlan:
    """Plan the export of a quantized checkpoint from its headers.

    Args:
        checkpoint: the source.
        recipe: the format, and the other options that apply to an export.
        serving: options of the command that serves the result, except the recipe's number of devices.
        mmproj: whether to write the vision tower next to a GGUF file.
        notes_before: notes that precede all others.

    Raises:
        RefusedError: the target cannot hold a layer; the nearest scheme that it can hold is named.
        UsageError: an option only makes sense when quantizing.
    """
    target, source = load_format(recipe.format), detect_format(checkpoint.config)
    _check_options(checkpoint, recipe, target)
    tower = vision_tower_file(checkpoint, target) if mmproj else None
    requested_dtype = _requested_dtype(recipe)

    # Quantized layers of the source.
    headers = checkpoint.stored_tensors()
    layouts = source.find_layouts(checkpoint.config, headers)
    model_layout = match_headers(checkpoint, {item.module: item for item in layouts}, headers)
    family = _family(checkpoint)
    converted = [_plan_layer(layout, checkpoint, family, source, target) for layout in layouts]
    split_layers, split_notes = _with_common_group_size(converted, target)
    layers = {layer.name: layer for layer in split_layers}
    modules = {
        layer.layout.module: (layer.target_scheme, layer.layout.shape)
        for layer in split_layers
        if layer.target_scheme is not None
    }
    if recipe.format == PLAIN:
        _refuse_unstacked_experts(_model_to_load(checkpoint, modules))
        modules = {}
    if (model_fit := target.check_model(modules)).verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{recipe.format}: {model_fit.reason}",
            model_fit.nearest or "--format compressed-tensors",
        )

    # All tensors.
    if target.INFO.quantizes_tied_embedding:
        model_layout = drop_tied_copy(model_layout, checkpoint)
    partial_plan: PartialPlan
    if recipe.format == GGUF:
        from quantforge.planning.gguf_plan import plan_gguf_export  # imports all of GGUF

        schemes = {module: target_scheme.weight for module, (target_scheme, _) in modules.items()}
        partial_plan = plan_gguf_export(recipe, checkpoint, model_layout, schemes, tower)
    else:
        partial_plan = _plan_safetensors(checkpoint, split_layers, target, requested_dtype)
        if target.INFO.quantizes_tied_embedding:
            partial_plan = _with_quantized_embedding(
                partial_plan, recipe, checkpoint, model_layout, layers
            )
    tensors = _with_recorded_rules(partial_plan.tensors, naming.original_recipe(checkpoint))
    engines = engine_verdicts(target.INFO, _model_to_load(checkpoint, modules))
    partial_plan = replace(partial_plan, tensors=tensors, engines=engines)
    if recipe.engine == TRANSFORMERS:
        partial_plan = with_transformers_verdict(checkpoint, partial_plan)
    files = partial_plan.files(recipe)
    tensors_to_quantize = tuple(
        item for item in tensors if item.action is Action.QUANTIZE and item.name not in layers
    )
    serving_with_devices = replace(serving or Serving(), devices=recipe.tensor_parallel)
    model_path = str(checkpoint.path)
    plan = Plan(
        model=model_path,
        name=naming.default_name(checkpoint, None, recipe.format, tensors, partial_plan.label),
        model_type=model_type_or_draft(checkpoint.config),
        method=f"export from {source.KEY}",
        transforms=(),
        rounder="",
        format=recipe.format,
        tensors=tensors,
        shards=tuple(file.names for file in files),
        output_bytes=total_file_bytes(files),
        peak_memory_bytes=0,
        engines=partial_plan.engines,
        substitutions=(*partial_plan.substitutions, *(tower.events if tower else ())),
        notes=(
            *notes_before,
            *(
                choice(f"{item.name}: {embedding_note(item)}")
                for item in tensors_to_quantize
                if not recipe.embedding
            ),
            *facts(checkpoint),
            *partial_plan.notes,
            *split_notes,
            *_scattered_note(split_layers),
            *check_engine(
                recipe.engine,
                serving_with_devices,
                tensors,
                partial_plan.engines,
                recipe.format,
                model_path,
            ),
        ),
        not_copied=not_copied(checkpoint),
    )
    events = (
        *_loss_events(checkpoint, target, tensors),
        *(
            Event("embedding-quantized", item.name, embedding_note(item))
            for item in tensors_to_quantize
        ),
        *plan.substitutions,
    )
    return ExportPlan(
        checkpoint, source.KEY, plan, files, layers, model_layout, tensors_to_quantize, events, requested_dtype,
        recipe.rounding,
    )  # fmt: skip


def _check_options(checkpoint: Checkpoint, recipe: Recipe, target: Format) -> None:
    """Refuse options that only make sense when quantizing; errors also as in `check_draft_model`."""
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
    check_draft_model(_draft_head_kind(checkpoint), recipe)


def _requested_dtype(recipe: Recipe) -> str | None:
    """Return the dtype that is requested for decoded weights; None if none is, or if the format defines its own types.

    Raises:
        UnknownNameError: it is not one of `FLOATS`.
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


def _with_recorded_rules(
    tensors: Iterable[TensorPlan], source_recipe: Recipe
) -> tuple[TensorPlan, ...]:
    """Return tensor plans in which kept tensors get the rule of the source's recipe that kept them."""
    keep_rules = [(pattern, f"ignore {pattern}") for pattern in source_recipe.ignore]
    keep_rules += [
        (r.match, f"rule {r.match}={r.scheme}") for r in source_recipe.rules if r.scheme == "keep"
    ]

    def rule(tensor: TensorPlan) -> str:
        header = StoredTensor(tensor.name, tensor.dtype, tensor.shape)
        layer = MatchedTensor(tensor.name, header, Role.LINEAR)
        return next((text for pattern, text in keep_rules if matches(pattern, layer)), tensor.rule)

    return tuple(replace(t, rule=rule(t)) if t.action is Action.KEEP else t for t in tensors)


def _loss_events(
    checkpoint: Checkpoint, target: Format, tensors: Iterable[TensorPlan]
) -> list[Event]:
    """Return events for what the target cannot store (KV-cache scales) and for layers that stay unquantized."""
    lost_events = []
    headers = checkpoint.stored_tensors()
    scales = kv_scales.find_scales(checkpoint.config, headers).tensor_names
    if scales and not target.INFO.holds_kv_scales:
        reason = f"{target.KEY} has no place for {len(scales)} scales of the KV cache"
        lost_events.append(Event("kv-scales-dropped", checkpoint.path.name, reason))
    coverage_events = coverage.events(tensors, text_config(checkpoint.config))
    return lost_events + [
        e for e in coverage_events if e.kind == "router-quantized" or target.KEY != PLAIN
    ]


def _model_to_load(
    checkpoint: Checkpoint, modules: Mapping[str, tuple[LayerScheme, tuple[int, int]]]
) -> ModelToLoad:
    """Return the facts of the result that decide whether an engine loads it."""
    configs = (text_config(checkpoint.config), checkpoint.config)
    family = _family(checkpoint)
    return ModelToLoad(
        modules,
        tuple(str(config.get("model_type")) for config in configs),
        transposed=family is not None and family.transposed,
        unstacked_experts=family is not None
        and family.publishes_stacked_experts
        and not family.loads_single_experts,
        unquantized=tuple(
            name for name in checkpoint.entries if name.rpartition(".")[0] not in modules
        ),
        quantized_embedding=any(
            module.rpartition(".")[2] in EMBEDDING_MODULES for module in modules
        ),
        unmapped_reason=unmapped_reason(family, checkpoint.config, checkpoint.entries),
        draft_kind=_draft_head_kind(checkpoint),
    )


def _refuse_unstacked_experts(model: ModelToLoad) -> None:
    """Refuse to decode experts into single tensors if loaders expect one stacked tensor."""
    if model.unstacked_experts and (model.expert_schemes or model.has_unquantized_experts):
        raise RefusedError(
            f"{PLAIN}: {model.model_types[0]} has its experts in one tensor, which are read one by one here: loaders"
            " would take random numbers for them",
            "eval and verify read it as it is",
        )


def _draft_head_kind(checkpoint: Checkpoint) -> str:
    """Return the kind of draft heads that a checkpoint consists of, "" for a model."""
    return model_type_or_draft(checkpoint.config) if is_draft(checkpoint.config) else ""


def _family(checkpoint: Checkpoint) -> Architecture | None:
    config = checkpoint.config
    return architecture_of(config) or architecture_of(text_config(config))


def _plan_safetensors(
    checkpoint: Checkpoint,
    layers: Iterable[ConvertedLayer],
    target: Format,
    requested_dtype: str | None,
) -> PartialPlan:
    """Return the partial plan of a result in safetensors files: layers in the target's format, all else kept."""
    layers = tuple(layers)
    headers = checkpoint.stored_tensors()
    used_names = {name for layer in layers for name in layer.layout.tensor_names}
    if not target.INFO.holds_kv_scales:
        used_names |= kv_scales.find_scales(checkpoint.config, headers).tensor_names
    tensors = [
        TensorPlan(
            item.name,
            item.dtype,
            item.shape,
            Action.KEEP,
            "kept",
            block=_block_of(item.name),
            outputs=(
                replace(item, dtype=requested_dtype or item.dtype)
                if item.dtype in CASTABLE_DTYPES
                else item,
            ),
        )
        for name, item in headers.items()
        if name not in used_names
    ]
    tensors += [_tensor_plan(layer, checkpoint.dtype, target, requested_dtype) for layer in layers]
    return PartialPlan(tuple(sorted(tensors, key=lambda tensor: tensor.name)), ())


def _tensor_plan(
    layer: ConvertedLayer, dtype: str, target: Format, requested_dtype: str | None
) -> TensorPlan:
    """Return the plan of one converted layer of a result in safetensors files."""
    name, shape, target_scheme = layer.name, layer.layout.shape, layer.target_scheme
    stored_shape = shape[::-1] if layer.transposed else shape
    if target_scheme is None or target.KEY == PLAIN:
        outputs: tuple[StoredTensor, ...] = (
            StoredTensor(name, requested_dtype or dtype, stored_shape),
        )
    else:
        outputs = target.packed_tensors(layer.layout.module, target_scheme, shape)
    return TensorPlan(
        name,
        dtype,
        stored_shape,
        Action.KEEP if target_scheme is None else Action.QUANTIZE,
        "decoded" if target_scheme is None else "re-laid out",
        target_scheme,
        outputs=outputs,
        block=_block_of(name),
        transposed=layer.transposed,
        has_group_index=layer.has_group_index,
    )


def _with_quantized_embedding(
    partial_plan: PartialPlan,
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    layers: Mapping[str, ConvertedLayer],
) -> PartialPlan:
    """Return a partial plan with the embedding quantized, if it is tied to the head or ``--embedding`` names a scheme.

    Args:
        partial_plan: plan that keeps everything that is not quantized in the source.
        recipe: the format, and the scheme that is requested for the embedding.
        checkpoint: the source.
        model_layout: its tensors.
        layers: quantized layers by name; by default the embedding gets the scheme that most of them have in the result.

    Raises:
        UsageError: a scheme is requested for an embedding that is already quantized.
        RefusedError: the format cannot hold the scheme.
    """
    target = load_format(recipe.format)
    counts = Counter(
        layer.target_scheme for layer in layers.values() if layer.target_scheme is not None
    )
    if not counts:
        return partial_plan
    common_scheme = counts.most_common(1)[0][0]
    embedding_recipe = Recipe(scheme=str(common_scheme), embedding=recipe.embedding)
    schemes = LayerSchemes(target, embedding_recipe, checkpoint.dtype, tied=model_layout.tied)
    chooser = SchemeChooser(embedding_recipe, model_layout.tensors, schemes, join_linears=False)
    plans = {tensor.name: tensor for tensor in partial_plan.tensors}
    for tensor in model_layout.tensors:
        if tensor.role is not Role.EMBEDDING:
            continue
        plan = plans[tensor.header.name]
        if plan.name in layers:
            check_not_quantized(plan.name, recipe.embedding)
        elif (layer := (decision := chooser.choose(tensor)).scheme) is not None:
            outputs = target.packed_tensors(plan.name.removesuffix(".weight"), layer, plan.matrix)
            plans[plan.name] = replace(
                plan, action=Action.QUANTIZE, rule=decision.rule, scheme=layer, outputs=outputs
            )
            for item, reason in model_layout.dropped:
                if reason == TIED_HEAD_REASON:
                    plans[item.name] = replace(
                        plans[item.name], action=Action.DROP, rule=f"dropped: {reason}", outputs=()
                    )
    return replace(partial_plan, tensors=tuple(plans.values()))


def _plan_layer(
    layout: ModuleLayout,
    checkpoint: Checkpoint,
    family: Architecture | None,
    source: Format,
    target: Format,
) -> ConvertedLayer:
    """Decide what becomes of one quantized layer.

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
    compatibility, target_scheme = layer_scheme_in_format(
        layout.scheme, layout.shape, target, checkpoint.dtype
    )
    if _is_decoded(checkpoint, layout, (compatibility, target_scheme), target):
        return ConvertedLayer(layout, None, Compatibility(Verdict.DEPENDS_ON_VALUES), transposed)
    if compatibility.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{layout.module}: {layout.scheme} cannot be stored in {target.KEY}: {compatibility.reason}",
            requantize_hint(checkpoint, target.KEY, compatibility.nearest),
            tensor=layout.module,
        )
    indexed = f"{layout.module}{source.INFO.group_index_suffix}" in layout.tensor_names
    if indexed and layout.act_order is not False and compatibility.verdict is Verdict.EXACT:
        compatibility = Compatibility(
            Verdict.DEPENDS_ON_VALUES, "an index says the group of each column"
        )
    same_groups = target_scheme.weight.granularity == layout.scheme.weight.granularity
    scattered = indexed and layout.act_order is True and same_groups
    return ConvertedLayer(
        layout,
        target_scheme,
        compatibility,
        transposed,
        scattered and stores_group_index(layout, target_scheme, target),
    )


def stores_group_index(layout: ModuleLayout, scheme: LayerScheme, target: Format) -> bool:
    """Return whether the target stores, with a matrix, the index of each column's group."""
    packed = target.packed_tensors(layout.module, scheme, layout.shape)
    return f"{layout.module}{target.INFO.group_index_suffix}" in [item.name for item in packed]


def requantize_hint(checkpoint: Checkpoint, key: str, scheme: str = "") -> str:
    """Return the command that quantizes the decoded weights into a format, as a hint where codes cannot be kept."""
    path, scheme_option = shlex.quote(str(checkpoint.path)), f" --scheme {scheme}" if scheme else ""
    return f"`quantforge export {path} --format {key}{scheme_option} --requantize` rounds the decoded weights"


def _is_decoded(
    checkpoint: Checkpoint,
    layout: ModuleLayout,
    converted: tuple[Compatibility, LayerScheme],
    target: Format,
) -> bool:
    """Return whether an embedding or head is decoded because the target cannot hold it quantized."""
    compatibility, scheme = converted
    head = head_module(checkpoint.config)
    if layout.module != head and layout.module.rpartition(".")[2] not in EMBEDDING_MODULES:
        return False
    if target.KEY == GGUF or is_draft(checkpoint.config):
        return False
    if compatibility.verdict is not Verdict.IMPOSSIBLE:
        compatibility = target.check_model({layout.module: (scheme, layout.shape)})
    return compatibility.verdict is Verdict.IMPOSSIBLE


def _with_common_group_size(
    layers: Sequence[ConvertedLayer], target: Format
) -> tuple[Sequence[ConvertedLayer], tuple[str, ...]]:
    """Return the layers with groups of one size, if the target stores only one and all groups can be split into it.

    A smaller group that repeats the scale is as exact as the larger one, so that the fit of a layer does not change.

    Returns:
        The layers, and a note on what was split.
    """
    schemes = (
        (layer.target_scheme, layer.layout.shape)
        for layer in layers
        if layer.target_scheme is not None
    )
    size = common_split_size(schemes) if target.INFO.single_group_size else None
    if size is None:
        return layers, ()
    result, names, extra_bytes = [], [], 0
    for layer in layers:
        module, shape, old_scheme = layer.layout.module, layer.layout.shape, layer.target_scheme
        if old_scheme is None or old_scheme.weight.granularity == PerGroup(size):
            result.append(layer)
            continue
        new_scheme = replace(
            old_scheme, weight=replace(old_scheme.weight, granularity=PerGroup(size))
        )
        result.append(replace(layer, target_scheme=new_scheme, has_group_index=False))
        names.append(module)
        extra_bytes += _total_bytes(target.packed_tensors(module, new_scheme, shape))
        extra_bytes -= _total_bytes(target.packed_tensors(module, old_scheme, shape))
    note = (
        f"groups of {summarize_names(names)} are split into groups of {size} columns, with the same"
        f" scales repeated ({extra_bytes:,} bytes): the files state one group size for the whole model"
    )
    return result, (note,)


def _total_bytes(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _scattered_note(layers: Iterable[ConvertedLayer]) -> tuple[str, ...]:
    """Return a note if any layer keeps columns scattered over groups (desc_act)."""
    if not any(layer.has_group_index for layer in layers):
        return ()
    return ("desc_act stays true, with the same g_idx: not every engine of the format loads that",)


def _block_of(name: str) -> int:
    numbers = [piece for piece in name.split(".") if piece.isdecimal()]
    return int(numbers[0]) if numbers else -1
