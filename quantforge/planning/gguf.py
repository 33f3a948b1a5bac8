"""The plan of a GGUF file: a name, a type and a place for every tensor, and all of the header.

Types come from the mixture (`mixture`), from ``--scheme`` where one grid is wanted for all linears, and first of all
from rules. A type whose blocks do not divide the rows of a tensor is replaced as llama.cpp replaces it, as an event.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.architectures.match import Matched, MatchedTensor, Role
from quantforge.checkpoint.hub import source_name
from quantforge.errors import InputError, RefusedError, nearest
from quantforge.events import Event
from quantforge.formats.choice import holders
from quantforge.formats.gguf import blocks_of, engines, mixture
from quantforge.formats.gguf.carried import carried
from quantforge.formats.gguf.container import GgufTensor, Value, file_plan, stored_pieces
from quantforge.formats.gguf.families import Family, Named, family_of, names
from quantforge.formats.gguf.metadata import general, merged, provenance, split_keys
from quantforge.formats.gguf.parameters import Parameters, parameters
from quantforge.formats.gguf.tensor_types import TYPES
from quantforge.formats.gguf.vocabulary import vocabulary
from quantforge.grids import SUPERBLOCKS
from quantforge.planning.rules import Rules
from quantforge.plans import Action, Draft, FilePlan, TensorPlan
from quantforge.recipe import Recipe, to_toml
from quantforge.scheme import LayerScheme, Scheme, parse

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

SOURCE_TYPES = ("F32", "F16", "BF16")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class _Target:
    """One source tensor on its way: its name in the file and its shape as stored there."""

    tensor: MatchedTensor
    named: Named
    shape: tuple[int, ...]
    type: str
    rule: str


def draft(
    recipe: Recipe, checkpoint: Checkpoint, matched: Matched, *, observed: bool,
    given: Mapping[str, Scheme] | None = None,
) -> Draft:  # fmt: skip
    """Plan the file.

    Args:
        recipe: its type or scheme, rules, and everything that becomes a key.
        checkpoint: the source.
        matched: its tensors.
        observed: whether the importance of columns will be known.
        given: of an export, the scheme of each module that is already quantized; everything else keeps its type.

    Raises:
        RefusedError: a family, configuration, tokenizer or scheme that GGUF does not hold.
        InputError: the vocabulary and the embedding do not fit each other, or a pattern matches nothing.
    """
    family = family_of(matched.config)
    found = parameters(matched.config, family)
    builder = _FileDraft(recipe, matched, family, found, observed, given)
    targets = builder.targets()
    embedding = next(item for item in targets if item.named.name == _EMBEDDING)
    tokens = (
        carried(checkpoint.path, embedding.shape[0])
        if checkpoint.path.is_file()
        else vocabulary(checkpoint.path, embedding.shape[0], matched.config, recipe.pre)
    )
    tensors = _tensors(targets, found)
    weights = sum(math.prod(tensor.shape) for tensor in tensors)
    keys = merged(
        general(_name(checkpoint), family.arch, builder.file_type, weights, checkpoint.card, tokens.tokens),
        found.keys,
        tokens.keys(),
        provenance(
            to_toml(recipe),
            recipe.calibration.source if observed else "",
            sum(item.tensor.role is Role.LINEAR for item in targets) if observed else 0,
            recipe.calibration.samples,
        ),
    )  # fmt: skip
    return Draft(
        tensors=(*(_planned(item, found) for item in targets), *builder.dropped()),
        files=split(keys, tensors, recipe.max_shard_bytes),
        engines=engines(()),
        label=builder.label,
        substitutions=(*builder.substitutions, *found.events),
        notes=(f"{builder.label}: {builder.summary(targets)}", *builder.notes, *tokens.notes),
        late=tuple(
            item.tensor.stored.name for item in targets
            if item.named.name == _OUTPUT and item.type.lower() in SUPERBLOCKS
        ),
    )  # fmt: skip


def _name(checkpoint: Checkpoint) -> str:
    """Return the model's own name: of its repository, its directory, or its file without the ending."""
    if checkpoint.path.is_file():
        return checkpoint.path.stem
    return source_name(checkpoint.path)[0].rpartition("/")[2]


def split(
    keys: Mapping[str, Value], tensors: Sequence[GgufTensor], max_bytes: int | None
) -> tuple[FilePlan, ...]:
    """Plan one file, or files of at most ``max_bytes`` of data each, of which the first has all of the keys."""
    parts: list[list[GgufTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if max_bytes is not None and parts[-1] and filled + tensor.nbytes > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.nbytes
    if len(parts) == 1:
        return (file_plan("model.gguf", keys, tensors),)
    return tuple(
        file_plan(
            f"model-{number + 1:05}-of-{len(parts):05}.gguf",
            {**(keys if number == 0 else {}), **split_keys(number, len(parts), len(tensors))},
            part,
        )
        for number, part in enumerate(parts)
    )


def _tensors(targets: Iterable[_Target], found: Parameters) -> list[GgufTensor]:
    """Return the tensor table in file order: experts stacked, computed tables added."""
    stacks: dict[str, list[_Target]] = {}
    for item in targets:
        stacks.setdefault(item.named.name, []).append(item)
    tensors = list(found.computed)
    for name, items in stacks.items():
        first = items[0]
        if first.named.expert < 0:
            tensors.append(GgufTensor(name, first.type, first.shape))
            continue
        experts = sorted(item.named.expert for item in items)
        if experts != list(range(found.experts)) or {item.shape for item in items} != {first.shape}:
            raise InputError(
                f"{name}: experts {experts[:8]} of {found.experts}, or their shapes differ",
                "a complete checkpoint holds every expert of every block",
                tensor=first.tensor.stored.name,
            )
        tensors.append(GgufTensor(name, first.type, (len(items), *first.shape), pieces=len(items)))
    return sorted(tensors, key=lambda tensor: mixture.order(tensor.name))


def _planned(item: _Target, found: Parameters) -> TensorPlan:
    tensor, family_heads = item.tensor, _heads(item, found)
    shape = item.shape if item.named.expert < 0 else (found.experts, *item.shape)
    pieces = 1 if item.named.expert < 0 else found.experts
    stored = stored_pieces(GgufTensor(item.named.name, item.type, shape, pieces))
    grid = item.type.lower()
    return TensorPlan(
        tensor.stored.name,
        tensor.stored.dtype,
        tensor.stored.shape,
        Action.QUANTIZE if grid in SUPERBLOCKS else Action.KEEP,
        item.rule,
        LayerScheme(parse(grid)) if grid in SUPERBLOCKS else None,
        stored=(stored[max(item.named.expert, 0)],),
        part=tensor.block,
        shared=tensor.shared,
        transposed=tensor.transposed,
        heads=family_heads,
        by_rows=grid in SUPERBLOCKS and not tensor.transposed,
        plus_one=found.plus_one and item.named.name.endswith("norm.weight"),
    )


def _heads(item: _Target, found: Parameters) -> int:
    """Return the number of heads whose rows are reordered, 0 for none."""
    if not found.interleaved:
        return 0
    module = item.named.name.rpartition(".")[0]
    if module.endswith("attn_q"):
        return found.dimensions.heads
    return found.dimensions.kv_heads if module.endswith("attn_k") else 0


class _FileDraft:
    """Builder that gives every tensor its name and its type."""

    def __init__(
        self, recipe: Recipe, matched: Matched, family: Family, found: Parameters, observed: bool,
        given: Mapping[str, Scheme] | None,
    ) -> None:  # fmt: skip
        self.recipe, self.matched, self.family, self.given = recipe, matched, family, given
        self.substitutions: list[Event] = []
        self.notes: list[str] = []
        self.kept = [tensor for tensor in matched.tensors if tensor.role is not Role.FOREIGN]
        if matched.tied_twice and matched.architecture is not None:
            head = f"{matched.architecture.head}.weight"
            self.kept = [tensor for tensor in self.kept if tensor.name != head]
        self.names = names(family, found.dimensions.layers, [tensor.name for tensor in self.kept])
        self.rules = Rules(recipe, self.kept)
        self.notes += self.rules.notes
        self.label = self._label()
        self.file_type = mixture.file_type(self.label)
        self.base = self._base(found, observed)

    def _label(self) -> str:
        """Return the name of the mixture, or the grid that all linears get."""
        recipe = self.recipe
        if self.given is not None:
            counted = [_type_of(scheme, module) for module, scheme in self.given.items()]
            return max(sorted(set(counted)), key=counted.count)
        if recipe.type is not None:
            if recipe.type.upper() not in mixture.MIXTURES:
                raise InputError(
                    f"--type {recipe.type}: unknown", nearest(recipe.type.upper(), mixture.MIXTURES)
                )
            return recipe.type.upper()
        if recipe.scheme is not None:
            return _type_of(parse(recipe.scheme), "--scheme")
        bits = recipe.bits or 4
        if bits not in mixture.BY_BITS:
            raise InputError(
                f"--bits {bits}: no mixture of that size", "2, 3, 4, 5, 6 or 8, or --type"
            )
        return mixture.BY_BITS[bits]

    def _base(self, found: Parameters, observed: bool) -> dict[str, str]:
        sizes = found.dimensions
        shape = mixture.Shape(sizes.layers, sizes.heads, sizes.kv_heads, found.experts, observed)
        stored = {
            named.name: _stored_shape(tensor)[-1]
            for tensor in self.kept
            if not mixture.always_float32(
                (named := self.names[tensor.name]).name, len(tensor.stored.shape)
            )
        }
        uniform = self.recipe.scheme is not None or self.given is not None
        if uniform and self.label not in mixture.MIXTURES:
            return dict.fromkeys(stored, self.label)
        return mixture.assign(self.label, stored.items(), shape)

    def targets(self) -> list[_Target]:
        """Return every tensor that is written, in the order of the source."""
        return [self._target(tensor) for tensor in self.kept]

    def dropped(self) -> list[TensorPlan]:
        """Return what is left out, and why."""
        written = {tensor.stored.name for tensor in self.kept}
        reasons = [*((item, f"dropped: {reason}") for item, reason in self.matched.dropped)]
        reasons += [
            (tensor.stored, "of another tower" if tensor.role is Role.FOREIGN else "equal to the tied embedding")
            for tensor in self.matched.tensors
            if tensor.stored.name not in written
        ]  # fmt: skip
        if any(tensor.role is Role.FOREIGN for tensor in self.matched.tensors):
            self.notes.append(
                "only the language model is written: llama.cpp keeps other towers in files of their own"
            )
        return [
            TensorPlan(item.name, item.dtype, item.shape, Action.DROP, rule)
            for item, rule in reasons
        ]

    def summary(self, targets: Iterable[_Target]) -> str:
        """Say how many tensors have which type."""
        counts: dict[str, int] = {}
        for item in targets:
            counts[item.type] = counts.get(item.type, 0) + 1
        return ", ".join(f"{kind} x{count}" for kind, count in sorted(counts.items()))

    def _target(self, tensor: MatchedTensor) -> _Target:
        named, shape = self.names[tensor.name], _stored_shape(tensor)
        if tensor.stored.dtype not in SOURCE_TYPES:
            raise InputError(
                f"{tensor.stored.name}: type {tensor.stored.dtype} is not written to GGUF",
                f"written are {', '.join(SOURCE_TYPES)}", tensor=tensor.stored.name,
            )  # fmt: skip
        if mixture.always_float32(named.name, len(shape)):
            return _Target(tensor, named, shape, "F32", "F32 always")
        kind, rule = self._wanted(tensor, named)
        given = mixture.fitting(kind, shape[-1])
        if given != kind:
            reason = f"{shape[-1]} columns are no multiple of {TYPES[kind].columns}"
            more = TYPES[given].row_bytes(shape[-1]) * math.prod(shape[:-1])
            self.substitutions.append(
                Event(
                    "substitution", tensor.stored.name, f"{kind} -> {given}, {more} bytes: {reason}"
                )
            )
            rule = f"{rule}; substituted: {reason}"
        return _Target(tensor, named, shape, given, rule)

    def _wanted(self, tensor: MatchedTensor, named: Named) -> tuple[str, str]:
        """Return the type by rules, options, or the mixture, and which of them said so."""
        module = tensor.stored.name.removesuffix(".weight")
        if self.given is not None:
            scheme = self.given.get(module)
            return (
                (_type_of(scheme, module), "re-laid out")
                if scheme
                else (tensor.stored.dtype, "kept")
            )
        chosen = self.rules.choose(tensor)
        if chosen is not None:
            kind = (
                tensor.stored.dtype
                if chosen.scheme is None
                else _type_of(chosen.scheme.weight, chosen.rule)
            )
            return kind, chosen.rule
        wanted = {Role.HEAD: self.recipe.head, Role.EMBEDDING: self.recipe.embedding}.get(
            tensor.role, "keep"
        )
        if wanted != "keep":
            return _type_of(
                parse(wanted), f"--{tensor.role.value}"
            ), f"--{tensor.role.value} {wanted}"
        if self.recipe.scheme is not None and tensor.role is not Role.LINEAR:
            return "Q6_K", "outside of the blocks"
        return self.base[named.name], self.label


def _stored_shape(tensor: MatchedTensor) -> tuple[int, ...]:
    shape = tensor.stored.shape
    return shape[::-1] if tensor.transposed else shape


def _type_of(scheme: Scheme, where: str) -> str:
    scheme = blocks_of(scheme)
    if scheme.grid not in SUPERBLOCKS:
        others = holders(LayerScheme(scheme))
        raise RefusedError(
            f"{where}: {scheme} is no type of a GGUF file",
            f"--format {' or '.join(others)} holds it"
            if others
            else nearest(scheme.grid, SUPERBLOCKS),
        )
    return scheme.grid.upper()
