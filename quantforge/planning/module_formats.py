"""Planning for the formats that store a model module by module: which layer gets which scheme, and which files hold it.

The order of decision is that of `choice`, the schemes are those of `layer_schemes`; linears that read one activation
get one scheme, because engines load them as one matrix. A tied head is stored on its own as soon as it or the embedding
is quantized, unless the engine multiplies by the codes of the embedding (`FormatInfo.rounds_tied_embedding`).

Zeros (`sparse`) go into linears that stay as they are. They save bytes or time only where a format or a kernel leaves
them out; no format here does, and the engine that did has given it up. So the result is a plain model, to be measured,
or to be quantized by a second run (`rtn` keeps zeros).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.architectures.configuration import SAME
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.layer_kind import KEYS
from quantforge.architectures.match import MatchedTensor, ModelLayout, Role
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.files.computed_tensors import RUNNING
from quantforge.formats import PLAIN, Format, Verdict, kv_scales, load_format
from quantforge.formats.compressed_tensors.linears import (
    can_store_transposed,
    packed_transposed_tensors,
)
from quantforge.formats.engine_rules import ModelToLoad, engine_verdicts, unmapped
from quantforge.notation import SPARSITY_HINT
from quantforge.planning.choice import Choices
from quantforge.planning.coverage import asked
from quantforge.planning.draft import Draft
from quantforge.planning.embedding_choice import rounded_words, tied_rule
from quantforge.planning.layer_schemes import LayerSchemes
from quantforge.plans import Action, StoredTensor, TensorPlan, choice
from quantforge.quantizers import is_sparse
from quantforge.recipe import Recipe
from quantforge.scheme import LayerScheme

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint

UNTIED = "the tied head is stored on its own: tie_word_embeddings becomes false"
_NO_USE_OF_ZEROS = (
    "codes of zeros take as much room as others, and no engine skips them: vLLM removed its sparse kernels and their"
    " format in March 2026 (vllm-project/vllm, pull request 36799)"
)


def draft_by_module(
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    recipe: Recipe,
) -> Draft:
    """Return the draft of a result that is stored module by module.

    Raises:
        InputError: nothing would be quantized, no linear can have zeros; or as `Choices`.
        UsageError: as `LayerSchemes.check_groups`.
        RefusedError: the format cannot hold a scheme or the mixture of them, or a block has no place for cache scales.
    """
    form = load_format(recipe.format)
    builder = _ModuleDraft(recipe, checkpoint, model_layout, form)
    tensors = [*builder.tensors(), *_cache_scales(recipe.kv_cache, model_layout)]
    if recipe.zeros is not None and not any(tensor.sparse for tensor in tensors):
        raise InputError(
            f"--sparsity {recipe.zeros}: no linear is left that could have it", "check --ignore"
        )
    if builder.rounds and not any(tensor.action is Action.QUANTIZE for tensor in tensors):
        raise _nothing_quantized(form, builder.choices.substitutions)
    if recipe.engine == "transformers":
        tensors = _turned(form, tensors)
    layers = {
        tensor.name.removesuffix(".weight"): (tensor.scheme, tensor.matrix)
        for tensor in tensors
        if tensor.scheme is not None
    }
    _refuse_mixture(form, layers)
    family = model_layout.architecture
    model = ModelToLoad(
        layers,
        (model_layout.model_type, str(checkpoint.config.get("model_type"))),
        transposed=family is not None and family.transposed,
        turned=any(tensor.turned for tensor in tensors),
        unstacked=family is not None and family.stacks_experts and not family.joins_experts,
        embedding=builder.rounds_embedding,
        kept=tuple(tensor.name for tensor in tensors if tensor.action is Action.KEEP),
        running=RUNNING in checkpoint.facts,
        unmapped=unmapped(
            family, checkpoint.config, (item.header.name for item in model_layout.tensors)
        ),
        draft=model_layout.draft,
    )
    return Draft(
        tensors=tuple(tensors),
        engines=engine_verdicts(form.INFO, model),
        substitutions=(*builder.choices.substitutions, *builder.without_zeros),
        notes=(
            *builder.choices.notes,
            *([UNTIED] if builder.unties else []),
            *(
                choice(f"{item.name}: {rounded_words(item)}")
                for item in tensors
                if item.scheme and item.rule.startswith(tied_rule(form))
            ),
        ),
        late=tuple(
            tensor.name for tensor in tensors if tensor.scheme and tensor.name in builder.heads
        ),
        untie=builder.unties,
        label=form.KEY,
    )


def _nothing_quantized(form: Format, substitutions: Sequence[Event]) -> InputError:
    """Return the error for a plan that keeps every layer: for their shapes, or because rules keep them."""
    if not substitutions:
        return InputError(
            "nothing would be quantized: --ignore, a rule or the recipe keeps every layer",
            "leave out the --ignore or the rule that keeps too much",
        )
    first = substitutions[0]
    more = f", and {len(substitutions) - 1} more" if len(substitutions) > 1 else ""
    return InputError(
        f"nothing would be quantized: {form.KEY} cannot hold the shape of any matrix: "
        f"{first.where}: {first.detail}{more}",
        "--format compressed-tensors holds matrices of any shape with one scale per row: --scheme fp8:row, or int4:row",
    )


def _turned(form: Format, tensors: list[TensorPlan]) -> list[TensorPlan]:
    """Return the plans with linears stored as the model holds them, where it holds all that are rounded turned."""
    rounded = [tensor for tensor in tensors if tensor.scheme is not None]
    if not form.INFO.stores_transposed or not all(tensor.transposed for tensor in rounded):
        return tensors
    layers = {layer for tensor in rounded if (layer := tensor.scheme) is not None}
    if len(layers) > 1 or not all(map(can_store_transposed, layers)):
        return tensors
    return [
        replace(
            tensor,
            turned=True,
            outputs=packed_transposed_tensors(
                tensor.name.removesuffix(".weight"), tensor.scheme, tensor.matrix
            ),
        )
        if tensor.scheme is not None
        else tensor
        for tensor in tensors
    ]


def _refuse_mixture(
    form: Format, layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]
) -> None:
    fit = form.check_model(layers)
    if fit.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{form.KEY} cannot hold this mixture: {fit.reason}",
            fit.nearest or "use one scheme, or --format compressed-tensors",
        )


class _ModuleDraft:
    """Builder that gives every tensor its plan, one shared input at a time."""

    def __init__(
        self, wanted: Recipe, checkpoint: Checkpoint, model_layout: ModelLayout, form: Format
    ) -> None:
        self.model_layout, self.form = model_layout, form
        self._zeros, self._method = wanted.zeros, wanted.method
        self.without_zeros: list[Event] = []
        self._head = _tied_head(model_layout)
        once = [self._head] if self._head and not model_layout.tied_twice else []
        self._layers = [*model_layout.tensors, *once]
        self._schemes = LayerSchemes(form, wanted, checkpoint.dtype, tied=model_layout.tied)
        self.rounds = self._schemes.base is not None
        self.choices = Choices(wanted, self._layers, self._schemes, together=True)
        self._schemes.share_groups(
            (item, self.choices.chosen(item).scheme) for item in self._layers
        )
        self.heads = {item.header.name for item in self._layers if item.role is Role.HEAD}
        rounded = {
            tensor.role: scheme
            for tensor in self._layers
            if tensor.role in {Role.HEAD, Role.EMBEDDING}
            and (scheme := self.choices.chosen(tensor).scheme)
        }
        self.rounds_embedding = Role.EMBEDDING in rounded
        # One tensor for both, unless the head is to have another scheme.
        if form.INFO.quantizes_tied_embedding:
            shared = rounded.get(Role.EMBEDDING)
            self.unties = self._head is not None and rounded.get(Role.HEAD, shared) != shared
            return
        if self.rounds_embedding and model_layout.tied and self._head is None:
            embedding = next(item for item in self._layers if item.role is Role.EMBEDDING)
            raise RefusedError(
                f"{embedding.header.name}: the head of this undeclared family is tied to it",
                "keep the embedding",
            )
        self.unties = self._head is not None and bool(rounded)

    def tensors(self) -> list[TensorPlan]:
        """Plan every tensor, and the head that a tied model has from now on if either is quantized."""
        dropped = list(self.model_layout.dropped)
        layers = self._layers
        if self._head is not None and not self.unties:
            layers = [tensor for tensor in layers if tensor is not self._head]
            if self.model_layout.tied_twice:
                dropped.append((self._head.header, SAME))
        planned = [self._plan(tensor) for tensor in layers]
        self._schemes.check_groups()
        return [
            *planned,
            *(
                TensorPlan(item.name, item.dtype, item.shape, Action.DROP, f"dropped: {reason}")
                for item, reason in dropped
            ),
        ]

    def _plan(self, tensor: MatchedTensor) -> TensorPlan:
        decision = self.choices.decided(tensor)
        layer, header = decision.scheme, tensor.header
        written: tuple[StoredTensor, ...] = (header,)
        if layer is not None:
            first, second = header.shape
            matrix = (second, first) if tensor.transposed else (first, second)
            written = self.form.packed_tensors(header.name.removesuffix(".weight"), layer, matrix)
        plan = TensorPlan(
            header.name,
            header.dtype,
            header.shape,
            Action.QUANTIZE if layer else Action.KEEP,
            decision.rule,
            layer,
            outputs=written,
            block=tensor.block,
            shared=tensor.shared,
            transposed=tensor.transposed,
            expert=tensor.expert,
        )
        linear = tensor.block >= 0 and tensor.role is Role.LINEAR
        return self._with_zeros(plan) if linear and layer is None and not asked(plan) else plan

    def _with_zeros(self, plan: TensorPlan) -> TensorPlan:
        """Return the plan of a linear that gets zeros, if the recipe asks for them and their runs divide its rows."""
        zeros = self._zeros
        if zeros is None:
            return plan
        if not zeros.fits(plan.matrix[1]):
            detail = f"none: {plan.matrix[1]} input columns are no multiple of {zeros.run}"
            self.without_zeros.append(Event("substitution", plan.name, detail))
            return plan
        return replace(plan, sparse=True, rule=f"{self._method}, sparsity {zeros}")


def _cache_scales(kind: str, model_layout: ModelLayout) -> list[TensorPlan]:
    """Plan scales of the KV cache: tensors that the source does not have."""
    dimensions = model_layout.dimensions
    if kind == kv_scales.NONE or dimensions is None:  # the latter is refused later
        return []
    inside = f".{kv_scales.ATTENTION_MODULE}."
    attention = {
        tensor.block: tensor.header.name.partition(inside)[0] + inside[:-1]
        for tensor in model_layout.tensors
        if tensor.role is Role.LINEAR and inside in tensor.header.name
    }
    if len(attention) < model_layout.blocks:
        raise RefusedError(
            f"--kv-cache {kind}: no {kv_scales.ATTENTION_MODULE} in every block of this family",
            "engines look for the scales there: drop --kv-cache",
        )
    heads = _key_heads(model_layout, dimensions)
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


def _key_heads(model_layout: ModelLayout, sizes: Dimensions) -> list[int]:
    """Return how many heads of keys every layer keeps, 0 where it reads those of another one."""
    found = []
    for kind in model_layout.layers:
        keys = next((state for state in kind.states or () if state.part == KEYS), None)
        found.append(sizes.size(keys.rows) if keys else 0 if kind.states == () else sizes.kv_heads)
    return found or [sizes.kv_heads] * model_layout.blocks


def check_zeros(recipe: Recipe) -> None:
    """Refuse zeros of which nothing would come.

    Raises:
        UsageError: a method or a sparsity without the other, or another method beside it.
        RefusedError: the format has nothing of them.
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
            f"--sparsity {pattern} in {recipe.format}: {_NO_USE_OF_ZEROS}",
            f"--format {PLAIN}, to measure it by `eval`, or to quantize it by a second run",
        )


def _tied_head(model_layout: ModelLayout) -> MatchedTensor | None:
    """Return the head of a tied model, stored a second time or as it will be stored; None where none is tied."""
    architecture = model_layout.architecture
    if not model_layout.tied or architecture is None:
        return None
    name = f"{architecture.head}.weight"
    if model_layout.tied_twice:
        return model_layout.by_name[name]
    embedding = model_layout.by_name[f"{architecture.embedding}.weight"]
    places = (  # the prefix of the embedding, where it applies to the head too
        prefix + name.removeprefix(canonical)
        for prefix, canonical in architecture.prefixes
        if name.startswith(canonical)
        and prefix + embedding.name.removeprefix(canonical) == embedding.header.name
    )
    header = replace(embedding.header, name=next(places, name))
    return replace(embedding, name=name, header=header, role=Role.HEAD)
