"""Planning: from a recipe and the headers of a checkpoint to every decision of the run.

Nothing here reads a weight or imports torch. Every source tensor is accounted for once: quantized, kept, or dropped
by declaration. The plan that ``quantforge plan`` prints is the object that ``quantize`` executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantforge import memory
from quantforge.architectures.match import Matched, MatchedTensor, Role, match, needs_architecture
from quantforge.checkpoint.writer import file_bytes, plan_shards
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.formats import Fit, Format, Verdict, format_of
from quantforge.planned import Action, Plan, StoredTensor, TensorPlan
from quantforge.quantizers import needs, parse_method
from quantforge.recipe import Recipe
from quantforge.rules import Choice, Rules
from quantforge.scheme import LayerScheme, PerGroup, Row, Scheme, parse

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

QUANTIZABLE = ("F32", "F16", "BF16")
SMALLER_GROUPS = (128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the matched checkpoint that it was made from."""

    plan: Plan
    matched: Matched


def make_plan(recipe: Recipe, checkpoint: Checkpoint, *, in_memory: bool = True) -> Planned:
    """Decide everything about a run.

    Raises:
        InputError: the checkpoint is incomplete, already quantized, or a pattern matches nothing.
        RefusedError: the format cannot hold a scheme and there is no substitution.
    """
    _refuse_quantized(checkpoint)
    matched = match(checkpoint.config, [entry.stored() for entry in checkpoint.entries.values()])
    transforms, rounder = parse_method(recipe.method)
    wanted = needs(recipe.method, importance=recipe.scales == "search")
    if matched.architecture is None:
        if transforms or rounder != "rtn":
            raise needs_architecture(matched, recipe.method)
        wanted = frozenset()
    form = format_of(recipe.format)
    builder = _Builder(recipe, checkpoint, matched, form)
    tensors = builder.tensors()
    if not any(tensor.action is Action.QUANTIZE for tensor in tensors):
        raise InputError(
            "nothing would be quantized: every layer is kept",
            "check --ignore, --rule and the recipe",
        )
    _refuse_mixtures(form, tensors)
    shards = shards_of(tensors, recipe.max_shard_bytes)
    layers = [(tensor.scheme, tensor.matrix) for tensor in tensors if tensor.scheme is not None]
    plan = Plan(
        model=str(checkpoint.path),
        model_type=matched.model_type,
        method=recipe.method,
        transforms=transforms,
        rounder=rounder,
        format=recipe.format,
        tensors=tuple(tensors),
        shards=tuple(tuple(item.name for item in shard) for shard in shards),
        output_bytes=file_bytes(shards),
        peak_memory_bytes=memory.peak_bytes(
            matched, tuple(tensors), recipe, wanted, in_memory=in_memory
        ),
        engines=form.engines(layers),
        substitutions=tuple(builder.substitutions),
        notes=(matched.rule, *builder.notes),
        late=tuple(builder.late),
        options={"needs": tuple(sorted(wanted)), "untie": builder.unties},
    )
    return Planned(plan, matched)


def shards_of(
    tensors: Iterable[TensorPlan], max_bytes: int
) -> tuple[tuple[StoredTensor, ...], ...]:
    """The files that the tensors of a plan are written to."""
    return plan_shards([item for tensor in tensors for item in tensor.stored], max_bytes)


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    found = checkpoint.config.get("quantization_config")
    if isinstance(found, Mapping):
        raise InputError(
            f"{checkpoint.path}: already quantized (quant_method {found.get('quant_method')!r})",
            "quantize the original model, or move this one with `quantforge export`",
        )


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


class _Builder:
    """Gives every tensor its plan, one shared input at a time."""

    def __init__(
        self, recipe: Recipe, checkpoint: Checkpoint, matched: Matched, form: Format
    ) -> None:
        self.recipe = recipe
        self.matched = matched
        self.form = form
        self.scale = form.scale_type(checkpoint.dtype)
        self.base = parse(recipe.scheme or form.default_scheme(recipe.bits or 4))
        self.rules = Rules(recipe, matched.tensors)
        self.substitutions: list[Event] = []
        self.notes: list[str] = []
        self.unties = False
        self.late: list[str] = []
        self._schemes: dict[str, tuple[Scheme | None, str]] = {}

    def tensors(self) -> list[TensorPlan]:
        planned = [self._plan(tensor) for tensor in self.matched.tensors]
        planned += [
            TensorPlan(item.name, item.dtype, item.shape, Action.DROP, f"dropped: {reason}")
            for item, reason in self.matched.dropped
        ]
        return planned + self._untied_head()

    def _plan(self, tensor: MatchedTensor) -> TensorPlan:
        choice = self._choose(tensor)
        if choice.scheme is None:
            return self._kept(tensor, choice.rule)
        scheme, rule = self._fitting(tensor, choice)
        if scheme is None:
            return self._kept(tensor, rule)
        layer = LayerScheme(scheme)
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
        if tensor.role is Role.LINEAR:
            return self._tied_choice(tensor)
        wanted = {Role.HEAD: self.recipe.head, Role.EMBEDDING: self.recipe.embedding}.get(
            tensor.role, "keep"
        )
        if wanted == "keep":
            return Choice(None, f"{tensor.role.value} kept")
        return Choice(parse(wanted), f"--{tensor.role.value} {wanted}")

    def _tied_choice(self, tensor: MatchedTensor) -> Choice:
        """One scheme for a shared input: engines load its linears as one matrix."""
        siblings = [
            other
            for other in self.matched.tensors
            if other.shared and other.shared == tensor.shared
        ]
        found = {
            other.stored.name: choice
            for other in (siblings or [tensor])
            if other.role is Role.LINEAR and other.block == tensor.block
            for choice in [self.rules.choose(other)]
            if choice is not None
        }
        if not found:
            return Choice(self.base, "default")
        schemes = {choice.scheme for choice in found.values()}
        if len(schemes) > 1:
            raise InputError(
                f"rules give different schemes to layers that engines load as one matrix: {', '.join(sorted(found))}",
                "give q, k and v (gate and up) the same scheme",
            )
        own = found.get(tensor.stored.name)
        if own is not None:
            return own
        name, choice = next(iter(found.items()))
        return Choice(choice.scheme, f"{choice.rule}, tied to {name.removesuffix('.weight')}")

    def _fitting(self, tensor: MatchedTensor, choice: Choice) -> tuple[Scheme | None, str]:
        """The scheme itself, or a planned substitution when the shape or the type cannot hold it."""
        assert choice.scheme is not None
        shape = tensor.stored.shape
        matrix = (shape[1], shape[0]) if tensor.transposed else (shape[0], shape[1])
        if tensor.stored.dtype not in QUANTIZABLE:
            raise InputError(
                f"{tensor.stored.name}: type {tensor.stored.dtype} cannot be quantized",
                f"quantizable: {', '.join(QUANTIZABLE)}", tensor=tensor.stored.name,
            )  # fmt: skip
        reason = ""
        for scheme in self._candidates(choice.scheme.stored_as(self.scale), matrix):
            fit = self._check(scheme, matrix)
            if fit.verdict is Verdict.IMPOSSIBLE:
                reason = reason or fit.reason
                continue
            if not reason:
                return scheme, choice.rule
            self._substitute(tensor, choice.scheme, str(scheme), reason)
            return scheme, f"{choice.rule}; substituted: {reason}"
        raise RefusedError(
            f"{tensor.stored.name}: {choice.scheme} does not fit {self.form.KEY}: {reason}",
            f"add --ignore '{tensor.stored.name.removesuffix('.weight')}', or choose another scheme or format",
            tensor=tensor.stored.name,
        )

    def _check(self, scheme: Scheme, matrix: tuple[int, int]) -> Fit:
        size = scheme.group_size(matrix[1])
        if matrix[1] % size:
            return Fit(Verdict.IMPOSSIBLE, f"{matrix[1]} input columns are no multiple of {size}")
        return self.form.check(LayerScheme(scheme), matrix)

    @staticmethod
    def _candidates(scheme: Scheme, matrix: tuple[int, int]) -> list[Scheme]:
        """The scheme, then finer groups that divide, then one scale per row."""
        found = [scheme]
        if isinstance(scheme.granularity, PerGroup) and matrix[1] % scheme.granularity.size:
            smaller = [size for size in SMALLER_GROUPS if size < scheme.granularity.size]
            found += [replace(scheme, granularity=PerGroup(size)) for size in smaller]
            found.append(replace(scheme, granularity=Row()))
        return found

    def _substitute(self, tensor: MatchedTensor, asked: Scheme, given: str, reason: str) -> None:
        self.substitutions.append(
            Event("substitution", tensor.stored.name, f"{asked} -> {given}: {reason}")
        )

    def _untied_head(self) -> list[TensorPlan]:
        """A tied model whose head or embedding is quantized stores both from now on."""
        if not self.matched.tied or self.recipe.head == self.recipe.embedding == "keep":
            return []
        architecture = self.matched.architecture
        assert architecture is not None
        embedding = self.matched.by_name[f"{architecture.embedding}.weight"]
        head = replace(
            embedding,
            name=f"{architecture.head}.weight",
            stored=StoredTensor(
                f"{architecture.head}.weight", embedding.stored.dtype, embedding.stored.shape
            ),
            role=Role.HEAD,
        )
        self.unties = True
        self.notes.append("the tied head is stored on its own: tie_word_embeddings becomes false")
        return [self._plan(head)]
