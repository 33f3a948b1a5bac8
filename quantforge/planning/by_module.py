"""Planning for the formats that store a model module by module: which layer gets which scheme, and which files hold it.

What applies is found in this order: ignores and rules, ``head`` and ``embedding``, the scheme of the recipe. Linears
that read one activation get one scheme, because engines load them as one matrix. A scheme that does not fit a shape is
replaced by a finer one of the same grid, as an event; where there is none, planning refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.architectures.match import Matched, MatchedTensor, Role
from quantforge.checkpoint.shards import file_plans, plan_shards
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.formats import KEEP, Fit, Format, Verdict, format_of, kv_scales
from quantforge.formats.choice import holders
from quantforge.formats.engine_families import joined, judged
from quantforge.grids import GRIDS, PerGroup, Row
from quantforge.notation import parse_layer
from quantforge.planning.rules import Choice, Rules
from quantforge.plans import Action, Draft, EngineVerdict, FilePlan, TensorPlan
from quantforge.recipe import Recipe
from quantforge.scheme import Activation, LayerScheme, Scheme

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

QUANTIZABLE = ("F32", "F16", "BF16")
SHARD_BYTES = 5_000_000_000  # of a safetensors file, unless the recipe says otherwise
SMALLER_GROUPS = (128, 64, 32, 16)
# Tried: transformers 5.23 with compressed-tensors 0.20.
CONV1D = (
    "its Conv1D layers take no packed weights and would stay random; quantforge eval loads them"
)
EMBEDDING = "transformers cannot load a quantized embedding, no other engine is known to; quantforge eval does"


def draft_by_module(recipe: Recipe, checkpoint: Checkpoint, matched: Matched) -> Draft:
    """Return the plan of a format that stores module by module."""
    form = format_of(recipe.format)
    builder = _ModuleDraft(recipe, checkpoint, matched, form)
    tensors = builder.tensors()
    if builder.base is not None and not any(tensor.action is Action.QUANTIZE for tensor in tensors):
        raise InputError(
            "nothing would be quantized: every layer is kept",
            "check --ignore, --rule and the recipe",
        )
    _refuse_mixtures(form, tensors)
    layers = [(tensor.scheme, tensor.matrix) for tensor in tensors if tensor.scheme is not None]
    return Draft(
        tensors=tuple(tensors),
        files=files_of(tensors, recipe.max_shard_bytes),
        engines=joined(
            builder.engines(layers),
            form.KEY,
            [t.name for t in tensors if t.scheme is not None],
            [t.name for t in tensors if layers and t.action is Action.KEEP],
        ),
        substitutions=tuple(builder.substitutions),
        notes=tuple(builder.notes),
        late=tuple(builder.late),
        untie=builder.unties,
    )


def files_of(tensors: Iterable[TensorPlan], max_bytes: int | None) -> tuple[FilePlan, ...]:
    """Return the safetensors files to which the tensors of a plan are written."""
    stored = [item for tensor in tensors for item in tensor.stored]
    return file_plans(plan_shards(stored, max_bytes or SHARD_BYTES))


def _refuse_mixtures(form: Format, tensors: list[TensorPlan]) -> None:
    layers = {
        tensor.name.removesuffix(".weight"): (tensor.scheme, tensor.matrix)
        for tensor in tensors
        if tensor.scheme is not None
    }
    fit = form.check_model(layers)
    if fit.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(
            f"{form.KEY} cannot hold this mixture: {fit.reason}",
            f"use {fit.nearest}"
            if fit.nearest
            else "use one scheme, or --format compressed-tensors",
        )


class _ModuleDraft:
    """Builder that gives every tensor its plan, one shared input at a time."""

    def __init__(
        self, recipe: Recipe, checkpoint: Checkpoint, matched: Matched, form: Format
    ) -> None:
        self.recipe = recipe
        self.matched = matched
        self.form = form
        self.model_dtype, self.model_type = (
            checkpoint.dtype,
            str(checkpoint.config.get("model_type")),
        )
        self.scale = form.scale_type(checkpoint.dtype)
        base = recipe.scheme or form.default_scheme(recipe.bits or form.OWN_BITS)
        self.base = None if base == KEEP else parse_layer(base)
        self.substitutions: list[Event] = []
        self.notes: list[str] = []
        self.late: list[str] = []
        self._head = _tied_head(matched)
        once = [self._head] if self._head and not matched.tied_twice else []
        self._layers = [*matched.tensors, *once]
        self.rules = Rules(recipe, self._layers)
        self.notes += self.rules.notes
        self._siblings: dict[str, list[MatchedTensor]] = {}
        for tensor in matched.tensors:
            if tensor.role is Role.LINEAR:
                self._siblings.setdefault(tensor.shared or tensor.name, []).append(tensor)
        self._check_asked()
        self.unties = self._head is not None and any(
            self._choose(tensor).scheme
            for tensor in self._layers
            if tensor.role in {Role.HEAD, Role.EMBEDDING}
        )

    def tensors(self) -> list[TensorPlan]:
        """Plan every tensor, and the head that a tied model has from now on if either is quantized."""
        dropped = list(self.matched.dropped)
        layers = self._layers
        if self.unties:
            self.notes.append(
                "the tied head is stored on its own: tie_word_embeddings becomes false"
            )
        elif self._head is not None:
            layers = [tensor for tensor in layers if tensor is not self._head]
            if self.matched.tied_twice:
                dropped.append((self._head.stored, "equal to the tied embedding"))
        return [
            *(self._plan(tensor) for tensor in layers),
            *(
                TensorPlan(item.name, item.dtype, item.shape, Action.DROP, f"dropped: {reason}")
                for item, reason in dropped
            ),
            *self._cache_scales(),
        ]

    def _cache_scales(self) -> list[TensorPlan]:
        """Plan scales of the KV cache: tensors that the source does not have."""
        kind, dimensions = self.recipe.kv_cache, self.matched.dimensions
        if kind == kv_scales.NONE or dimensions is None:  # the latter is refused later
            return []
        inside = f".{kv_scales.ATTENTION}."
        attention = {
            tensor.block: tensor.stored.name.partition(inside)[0] + inside[:-1]
            for tensor in self.matched.tensors
            if tensor.role is Role.LINEAR and inside in tensor.stored.name
        }
        if len(attention) < self.matched.blocks:
            raise RefusedError(
                f"--kv-cache {kind}: no {kv_scales.ATTENTION} in every block of this family",
                "engines look for the scales there: drop --kv-cache",
            )
        return [
            TensorPlan(item.name, item.dtype, item.shape, Action.MEASURE, f"--kv-cache {kind}",
                       stored=(item,), part=block)
            for block, name in sorted(attention.items())
            for item in kv_scales.announced(name, kind, dimensions.kv_heads)
        ]  # fmt: skip

    def _check_asked(self) -> None:
        """Check that what is asked for by name is there."""
        roles = {tensor.role for tensor in self._layers}
        for role, wanted in (
            (Role.HEAD, self.recipe.head),
            (Role.EMBEDDING, self.recipe.embedding),
        ):
            if wanted != "keep" and role not in roles:
                raise InputError(
                    f"--{role.value} {wanted}: the model has no {role.value} that could be told by its name",
                    f"drop --{role.value}",
                )

    def engines(
        self, layers: list[tuple[LayerScheme, tuple[int, int]]]
    ) -> tuple[EngineVerdict, ...]:
        """Return the format's verdicts on its layers, less what an embedding or a family forbids."""
        found = self.form.engines(layers)
        if layers:
            found = judged(found, self.matched.model_type, self.model_type)
        if self.matched.architecture and self.matched.architecture.transposed:
            found = tuple(
                replace(verdict, loads=False, reason=CONV1D)
                if (verdict.engine, self.form.KEY) == ("transformers", "compressed-tensors")
                else verdict
                for verdict in found
            )
        if all(
            self._choose(tensor).scheme is None
            for tensor in self._layers
            if tensor.role is Role.EMBEDDING
        ):
            return found
        return tuple(
            replace(verdict, loads=False, reason=verdict.reason if not verdict.loads else EMBEDDING)
            for verdict in found
        )

    def _plan(self, tensor: MatchedTensor) -> TensorPlan:
        choice = self._choose(tensor)
        if choice.scheme is None:
            return self._kept(tensor, choice.rule)
        if tensor.role is Role.EMBEDDING and self.matched.tied and self._head is None:
            raise RefusedError(
                f"{tensor.stored.name}: the head of this undeclared family is tied to it",
                "keep the embedding",
            )
        scheme, rule = self._fitting(tensor, choice)
        layer = LayerScheme(scheme, choice.scheme.input)
        module = tensor.stored.name.removesuffix(".weight")
        if tensor.role is Role.HEAD:
            self.late.append(tensor.stored.name)
        draft = TensorPlan(
            tensor.stored.name, tensor.stored.dtype, tensor.stored.shape, Action.QUANTIZE, rule, layer,
            part=tensor.block, shared=tensor.shared, transposed=tensor.transposed,
        )  # fmt: skip
        return replace(draft, stored=self.form.stored(module, layer, draft.matrix))

    @staticmethod
    def _kept(tensor: MatchedTensor, rule: str) -> TensorPlan:
        stored = tensor.stored
        return TensorPlan(
            stored.name, stored.dtype, stored.shape, Action.KEEP, rule, stored=(stored,),
            part=tensor.block, shared=tensor.shared, transposed=tensor.transposed,
        )  # fmt: skip

    def _choose(self, tensor: MatchedTensor) -> Choice:
        """Choose what becomes of a tensor: by the rules, by ``head`` and ``embedding``, or by default."""
        if tensor.role is Role.LINEAR:
            return self._shared_choice(tensor)
        options = {Role.HEAD: self.recipe.head, Role.EMBEDDING: self.recipe.embedding}
        chosen = self.rules.choose(tensor)
        if chosen is not None:
            return chosen
        wanted = options.get(tensor.role, "keep")
        if wanted == "keep":
            return Choice(None, f"{tensor.role.value} kept")
        return Choice(parse_layer(wanted), f"--{tensor.role.value} {wanted}")

    def _shared_choice(self, tensor: MatchedTensor) -> Choice:
        """Choose one scheme for a shared input: engines load its linears as one matrix."""
        found = {
            other.stored.name: choice
            for other in self._siblings[tensor.shared or tensor.name]
            if (choice := self.rules.choose(other)) is not None
        }
        if not found:
            return Choice(self.base, "default")
        if len({choice.scheme for choice in found.values()}) > 1:
            raise InputError(
                f"rules give different schemes to layers that engines load as one matrix: {', '.join(sorted(found))}",
                "give q, k and v (gate and up) the same scheme",
            )
        own = found.get(tensor.stored.name)
        if own is not None:
            return own
        name, choice = next(iter(found.items()))
        return Choice(choice.scheme, f"{choice.rule}, tied to {name.removesuffix('.weight')}")

    def _fitting(self, tensor: MatchedTensor, choice: Choice) -> tuple[Scheme, str]:
        """Return the scheme itself, or a planned substitution when the shape or the type cannot hold it."""
        assert choice.scheme is not None
        shape = tensor.stored.shape
        matrix = (shape[1], shape[0]) if tensor.transposed else (shape[0], shape[1])
        if tensor.stored.dtype not in QUANTIZABLE:
            raise InputError(
                f"{tensor.stored.name}: type {tensor.stored.dtype} cannot be quantized",
                f"quantizable: {', '.join(QUANTIZABLE)}", tensor=tensor.stored.name,
            )  # fmt: skip
        reason = ""
        asked = choice.scheme.weight
        for scheme in self._candidates(asked.stored_as(self.scale), matrix):
            fit = self._check(scheme, choice.scheme.input, matrix)
            if fit.verdict is Verdict.IMPOSSIBLE:
                reason = reason or fit.reason
                continue
            if not reason:
                return scheme, choice.rule
            self._substitute(tensor, asked, str(scheme), reason)
            return scheme, f"{choice.rule}; substituted: {reason}"
        others = holders(choice.scheme, matrix, self.model_dtype)
        raise RefusedError(
            f"{tensor.stored.name}: {choice.scheme} does not fit {self.form.KEY}: {reason}",
            f"--format {' or '.join(others)} holds it"
            if others
            else f"add --ignore '{tensor.stored.name.removesuffix('.weight')}', or choose another scheme",
            tensor=tensor.stored.name,
        )

    def _check(self, scheme: Scheme, activation: Activation | None, matrix: tuple[int, int]) -> Fit:
        size = scheme.group_size(matrix[1])
        if matrix[1] % size:
            return Fit(Verdict.IMPOSSIBLE, f"{matrix[1]} input columns are no multiple of {size}")
        return self.form.check(LayerScheme(scheme, activation), matrix)

    @staticmethod
    def _candidates(scheme: Scheme, matrix: tuple[int, int]) -> list[Scheme]:
        """Return the scheme, then finer groups that divide, then one scale per row."""
        found = [scheme]
        if isinstance(scheme.granularity, PerGroup) and matrix[1] % scheme.granularity.size:
            smaller = [size for size in SMALLER_GROUPS if size < scheme.granularity.size]
            if GRIDS[scheme.grid].free:
                found += [replace(scheme, granularity=PerGroup(size)) for size in smaller]
            if scheme.integer:
                found.append(replace(scheme, granularity=Row()))
        return found

    def _substitute(self, tensor: MatchedTensor, asked: Scheme, given: str, reason: str) -> None:
        self.substitutions.append(
            Event("substitution", tensor.stored.name, f"{asked} -> {given}: {reason}")
        )


def _tied_head(matched: Matched) -> MatchedTensor | None:
    """Return the head of a tied model, stored a second time or as it will be stored; None where none is tied."""
    architecture = matched.architecture
    if not matched.tied or architecture is None:
        return None
    name = f"{architecture.head}.weight"
    if matched.tied_twice:
        return matched.by_name[name]
    embedding = matched.by_name[f"{architecture.embedding}.weight"]
    places = (  # the prefix of the embedding, where it applies to the head too
        prefix + name.removeprefix(canonical)
        for prefix, canonical in architecture.prefixes
        if name.startswith(canonical)
        and prefix + embedding.name.removeprefix(canonical) == embedding.stored.name
    )
    stored = replace(embedding.stored, name=next(places, name))
    return replace(embedding, name=name, stored=stored, role=Role.HEAD)
