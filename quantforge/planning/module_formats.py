"""Plan results of formats that store a model module by module: the scheme of every tensor, and what is written for it.

`scheme_rules` has the order of decisions, `layer_schemes` the schemes; linears that read the same activation get one
scheme, because engines load them as one matrix. A tied head is stored separately as soon as it or the embedding is
quantized, unless the engine multiplies by the codes of the embedding (`FormatInfo.quantizes_tied_embedding`).

Sparsity (`sparse`) sets weights of otherwise unquantized linears to zero. Zeros save bytes or time only if a format or
a kernel skips them; no format here does, and vLLM has removed the one that did. So the result is a plain model, to be
evaluated, or to be quantized by a second run (`rtn` keeps zeros).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.architectures.configuration import TIED_HEAD_REASON
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.layer_kind import KEYS
from quantforge.architectures.match import MatchedTensor, ModelLayout, Role
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.files.computed_tensors import LAYOUT
from quantforge.formats import PLAIN, Format, Verdict, kv_scales, load_format
from quantforge.formats.compressed_tensors.linears import (
    can_store_transposed,
    packed_transposed_tensors,
)
from quantforge.formats.engine_verdicts import ModelToLoad, engine_verdicts, unmapped_reason
from quantforge.notation import SPARSITY_HINT
from quantforge.planning.coverage import is_kept_by_user
from quantforge.planning.embedding_choice import embedding_note, tied_rule
from quantforge.planning.layer_schemes import LayerSchemes
from quantforge.planning.partial_plan import PartialPlan
from quantforge.planning.scheme_rules import SchemeChooser
from quantforge.plans import Action, StoredTensor, TensorPlan, choice
from quantforge.quantizers import is_sparse
from quantforge.recipe import Recipe
from quantforge.scheme import LayerScheme

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint

UNTIED_NOTE = "the tied head is stored on its own: tie_word_embeddings becomes false"
_ZEROS_SAVE_NOTHING = (
    "codes of zeros take as much room as others, and no engine skips them: vLLM removed its sparse kernels and their"
    " format in March 2026 (vllm-project/vllm, pull request 36799)"
)


def plan_module_tensors(
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    recipe: Recipe,
) -> PartialPlan:
    """Return the partial plan of a result that is stored module by module.

    Raises:
        InputError: nothing would be quantized, no linear can be made sparse; or as `SchemeChooser`.
        UsageError: as `LayerSchemes.check_groups`.
        RefusedError: the format cannot hold a scheme or the mixture of them, or a block has no place for cache scales.
    """
    file_format = load_format(recipe.format)
    planner = _ModulePlanner(recipe, checkpoint, model_layout, file_format)
    tensors = [*planner.tensors(), *_plan_cache_scales(recipe.kv_cache, model_layout)]
    if recipe.zeros is not None and not any(tensor.sparse for tensor in tensors):
        raise InputError(
            f"--sparsity {recipe.zeros}: no linear is left that could have it", "check --ignore"
        )
    if planner.quantizes and not any(tensor.action is Action.QUANTIZE for tensor in tensors):
        raise _nothing_quantized(file_format, planner.chooser.substitutions)
    if recipe.engine == "transformers":
        tensors = _with_transposed_storage(file_format, tensors)
    layers = {
        tensor.name.removesuffix(".weight"): (tensor.scheme, tensor.matrix)
        for tensor in tensors
        if tensor.scheme is not None
    }
    _check_mixture(file_format, layers)
    family = model_layout.architecture
    model = ModelToLoad(
        layers,
        (model_layout.model_type, str(checkpoint.config.get("model_type"))),
        transposed=family is not None and family.transposed,
        transposed_codes=any(tensor.codes_transposed for tensor in tensors),
        unstacked_experts=family is not None
        and family.publishes_stacked_experts
        and not family.loads_single_experts,
        quantized_embedding=planner.quantizes_embedding,
        unquantized=tuple(tensor.name for tensor in tensors if tensor.action is Action.KEEP),
        running_layout=LAYOUT in checkpoint.source_notes,
        unmapped_reason=unmapped_reason(
            family, checkpoint.config, (item.header.name for item in model_layout.tensors)
        ),
        draft_kind=model_layout.draft_kind,
    )
    return PartialPlan(
        tensors=tuple(tensors),
        engines=engine_verdicts(file_format.INFO, model),
        substitutions=(*planner.chooser.substitutions, *planner.not_sparsified),
        notes=(
            *planner.chooser.notes,
            *([UNTIED_NOTE] if planner.unties else []),
            *(
                choice(f"{item.name}: {embedding_note(item)}")
                for item in tensors
                if item.scheme and item.rule.startswith(tied_rule(file_format))
            ),
        ),
        tensors_after_blocks=tuple(
            tensor.name for tensor in tensors if tensor.scheme and tensor.name in planner.heads
        ),
        unties_head=planner.unties,
        label=file_format.KEY,
    )


def _nothing_quantized(file_format: Format, substitutions: Sequence[Event]) -> InputError:
    """Return the error for a plan that keeps every layer, because of their shapes or because of rules."""
    if not substitutions:
        return InputError(
            "nothing would be quantized: --ignore, a rule or the recipe keeps every layer",
            "leave out the --ignore or the rule that keeps too much",
        )
    first = substitutions[0]
    count_note = f", and {len(substitutions) - 1} more" if len(substitutions) > 1 else ""
    return InputError(
        f"nothing would be quantized: {file_format.KEY} cannot hold the shape of any matrix: "
        f"{first.where}: {first.detail}{count_note}",
        "--format compressed-tensors holds matrices of any shape with one scale per row: --scheme fp8:row, or int4:row",
    )


def _with_transposed_storage(file_format: Format, tensors: list[TensorPlan]) -> list[TensorPlan]:
    """Store linears transposed, as the model does, provided that this is possible for every quantized linear."""
    quantized = [tensor for tensor in tensors if tensor.scheme is not None]
    if not file_format.INFO.stores_transposed or not all(tensor.transposed for tensor in quantized):
        return tensors
    layers = {layer for tensor in quantized if (layer := tensor.scheme) is not None}
    if len(layers) > 1 or not all(map(can_store_transposed, layers)):
        return tensors
    return [
        replace(
            tensor,
            codes_transposed=True,
            outputs=packed_transposed_tensors(
                tensor.name.removesuffix(".weight"), tensor.scheme, tensor.matrix
            ),
        )
        if tensor.scheme is not None
        else tensor
        for tensor in tensors
    ]


def _check_mixture(
    file_format: Format, layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]
) -> None:
    compatibility = file_format.check_model(layers)
    if compatibility.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{file_format.KEY} cannot hold this mixture: {compatibility.reason}",
            compatibility.nearest or "use one scheme, or --format compressed-tensors",
        )


class _ModulePlanner:
    """Plans every tensor of a model for a format that stores it module by module.

    Attributes:
        chooser: chooses schemes by rules, options and defaults.
        quantizes: whether the recipe has a scheme for linears.
        quantizes_embedding: whether the embedding is quantized.
        unties: whether a tied head is stored separately.
        heads: names of head tensors.
        not_sparsified: events for linears whose shape does not fit the sparsity pattern.
    """

    def __init__(
        self, recipe: Recipe, checkpoint: Checkpoint, model_layout: ModelLayout, file_format: Format
    ) -> None:
        self.model_layout, self.file_format = model_layout, file_format
        self._sparsity, self._method = recipe.zeros, recipe.method
        self.not_sparsified: list[Event] = []
        self._head = _tied_head(model_layout)
        extra_head = [self._head] if self._head and not model_layout.stores_tied_head else []
        self._layers = [*model_layout.tensors, *extra_head]
        self._schemes = LayerSchemes(file_format, recipe, checkpoint.dtype, tied=model_layout.tied)
        self.quantizes = self._schemes.base is not None
        self.chooser = SchemeChooser(recipe, self._layers, self._schemes, join_linears=True)
        self._schemes.share_groups(
            (tensor, self.chooser.choose_ignoring_shape(tensor).scheme) for tensor in self._layers
        )
        self.heads = {tensor.header.name for tensor in self._layers if tensor.role is Role.HEAD}
        outer_schemes = {
            tensor.role: scheme
            for tensor in self._layers
            if tensor.role in {Role.HEAD, Role.EMBEDDING}
            and (scheme := self.chooser.choose_ignoring_shape(tensor).scheme)
        }
        self.quantizes_embedding = Role.EMBEDDING in outer_schemes
        # One tensor for both, unless the head is to have another scheme.
        if file_format.INFO.quantizes_tied_embedding:
            embedding_scheme = outer_schemes.get(Role.EMBEDDING)
            self.unties = (
                self._head is not None
                and outer_schemes.get(Role.HEAD, embedding_scheme) != embedding_scheme
            )
            return
        if self.quantizes_embedding and model_layout.tied and self._head is None:
            embedding = next(tensor for tensor in self._layers if tensor.role is Role.EMBEDDING)
            raise RefusedError(
                f"{embedding.header.name}: the head of this undeclared family is tied to it",
                "keep the embedding",
            )
        self.unties = self._head is not None and bool(outer_schemes)

    def tensors(self) -> list[TensorPlan]:
        """Plan every tensor, including the separate head of a model that was tied, if it is quantized."""
        dropped_tensors = list(self.model_layout.dropped)
        layers = self._layers
        if self._head is not None and not self.unties:
            layers = [tensor for tensor in layers if tensor is not self._head]
            if self.model_layout.stores_tied_head:
                dropped_tensors.append((self._head.header, TIED_HEAD_REASON))
        planned = [self._plan(tensor) for tensor in layers]
        self._schemes.check_groups()
        return [
            *planned,
            *(
                TensorPlan(item.name, item.dtype, item.shape, Action.DROP, f"dropped: {reason}")
                for item, reason in dropped_tensors
            ),
        ]

    def _plan(self, tensor: MatchedTensor) -> TensorPlan:
        choice = self.chooser.choose(tensor)
        layer, header = choice.scheme, tensor.header
        outputs: tuple[StoredTensor, ...] = (header,)
        if layer is not None:
            first, second = header.shape
            matrix = (second, first) if tensor.transposed else (first, second)
            outputs = self.file_format.packed_tensors(
                header.name.removesuffix(".weight"), layer, matrix
            )
        plan = TensorPlan(
            header.name,
            header.dtype,
            header.shape,
            Action.QUANTIZE if layer else Action.KEEP,
            choice.rule,
            layer,
            outputs=outputs,
            block=tensor.block,
            shared=tensor.shared_input,
            transposed=tensor.transposed,
            expert=tensor.expert,
        )
        linear = tensor.block >= 0 and tensor.role is Role.LINEAR
        return (
            self._with_sparsity(plan)
            if linear and layer is None and not is_kept_by_user(plan)
            else plan
        )

    def _with_sparsity(self, plan: TensorPlan) -> TensorPlan:
        """Return the plan of a linear that is made sparse, if the recipe asks for it and its shape allows it."""
        sparsity = self._sparsity
        if sparsity is None:
            return plan
        if not sparsity.fits(plan.matrix[1]):
            detail = (
                f"none: {plan.matrix[1]} input columns are no multiple of {sparsity.pattern_length}"
            )
            self.not_sparsified.append(Event("substitution", plan.name, detail))
            return plan
        return replace(plan, sparse=True, rule=f"{self._method}, sparsity {sparsity}")


def _plan_cache_scales(kind: str, model_layout: ModelLayout) -> list[TensorPlan]:
    """Plan the scales of the KV cache, which are tensors that the source does not have."""
    dimensions = model_layout.dimensions
    if kind == kv_scales.NONE or dimensions is None:  # the latter is refused later
        return []
    attention_part = f".{kv_scales.ATTENTION_MODULE}."
    attention = {
        tensor.block: tensor.header.name.partition(attention_part)[0] + attention_part[:-1]
        for tensor in model_layout.tensors
        if tensor.role is Role.LINEAR and attention_part in tensor.header.name
    }
    if len(attention) < model_layout.blocks:
        raise RefusedError(
            f"--kv-cache {kind}: no {kv_scales.ATTENTION_MODULE} in every block of this family",
            "engines look for the scales there: drop --kv-cache",
        )
    heads = _key_heads_by_layer(model_layout, dimensions)
    if 0 in heads:
        raise RefusedError(
            f"--kv-cache {kind}: block {heads.index(0)} reads keys and values of an earlier one, and has no scales",
            "drop --kv-cache",
        )
    if kind == kv_scales.HEAD and {*heads} != {dimensions.kv_heads}:
        raise RefusedError(
            f"--kv-cache {kind}: layers have {' and '.join(map(str, sorted({*heads})))} heads of keys",
            f"--kv-cache {kv_scales.TENSOR} has a scale per layer",
        )
    return [
        TensorPlan(
            item.name,
            item.dtype,
            item.shape,
            Action.MEASURE,
            f"--kv-cache {kind}",
            outputs=(item,),
            block=block,
        )
        for block, name in sorted(attention.items())
        for item in kv_scales.scale_tensors(name, kind, dimensions.kv_heads)
    ]


def _key_heads_by_layer(model_layout: ModelLayout, sizes: Dimensions) -> list[int]:
    """Return the number of key heads that every layer caches, 0 for a layer that reads those of another one."""
    heads = []
    for kind in model_layout.layers:
        keys = next((state for state in kind.states or () if state.part == KEYS), None)
        heads.append(sizes.size(keys.rows) if keys else 0 if kind.states == () else sizes.kv_heads)
    return heads or [sizes.kv_heads] * model_layout.blocks


def check_sparsity(recipe: Recipe) -> None:
    """Refuse a sparsity option that would have no effect.

    Raises:
        UsageError: a sparsity method without a sparsity or the reverse, or together with another method.
        RefusedError: the format gains nothing from zeros.
    """
    method, pattern = recipe.method, recipe.zeros
    if not is_sparse(method):
        if pattern is not None:
            raise UsageError(
                f"--sparsity {pattern}: --method {method} makes no zeros",
                "--method sparsegpt, wanda or magnitude",
            )
        return
    if pattern is None:
        raise UsageError(f"--method {method}: no --sparsity is given", f"say {SPARSITY_HINT}")
    if "+" in method:
        raise UsageError(
            f"--method {method}: zeros are made by a run of their own",
            "--method sparsegpt --format plain first, then quantize its result",
        )
    if recipe.format != PLAIN:
        raise RefusedError(
            f"--sparsity {pattern} in {recipe.format}: {_ZEROS_SAVE_NOTHING}",
            f"--format {PLAIN}, to measure it by `eval`, or to quantize it by a second run",
        )


def _tied_head(model_layout: ModelLayout) -> MatchedTensor | None:
    """Return the head of a tied model, as it is stored or would be stored separately; None if no head is tied."""
    architecture = model_layout.architecture
    if not model_layout.tied or architecture is None:
        return None
    name = f"{architecture.head}.weight"
    if model_layout.stores_tied_head:
        return model_layout.by_name[name]
    embedding = model_layout.by_name[f"{architecture.embedding}.weight"]
    stored_names = (  # with the prefix that the files give to the embedding
        prefix + name.removeprefix(canonical)
        for prefix, canonical in architecture.prefixes
        if name.startswith(canonical)
        and prefix + embedding.name.removeprefix(canonical) == embedding.header.name
    )
    header = replace(embedding.header, name=next(stored_names, name))
    return replace(embedding, name=name, header=header, role=Role.HEAD)
