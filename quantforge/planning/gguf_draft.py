"""The plan of a GGUF file: a name, a type and a place for every tensor, and all of the header.

The order of decision is that of `choice`. A mixture (``Q4_K_M``) gives every tensor its type; ``--scheme`` gives one
grid to all linears, and Q6_K to what lies outside of the blocks. A type whose blocks do not divide the rows of a tensor
is replaced as llama.cpp replaces it. What is F32 in every mixture (norms, biases, routers) is so whatever rules say.
The experts of a layer are one tensor of the file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantforge.architectures import architecture_of
from quantforge.architectures.configuration import SAME
from quantforge.architectures.match import MatchedTensor, ModelLayout, Role
from quantforge.artifacts.manifest import adapter_name, experts_word
from quantforge.artifacts.number_text import size
from quantforge.errors import InputError, RefusedError, UnknownNameError, nearest
from quantforge.files.computed_tensors import ADAPTER, KEPT_EXPERTS
from quantforge.files.hub import source_name
from quantforge.formats import KEEP, gguf
from quantforge.formats.engine_rules import layer_verdicts
from quantforge.formats.gguf import ggml_scheme, mixture
from quantforge.formats.gguf.container import TYPES, GgufTensor, Metadata, file_plan
from quantforge.formats.gguf.families import GgufName, gguf_names, model_type_by_arch
from quantforge.formats.gguf.metadata import general_keys, merge_keys, provenance_keys, split_keys
from quantforge.formats.gguf.mixture import file_type
from quantforge.formats.gguf.parameters import HyperParameters, translate_parameters
from quantforge.formats.gguf.projector_file import OPTION, ProjectorFile, has_projector
from quantforge.formats.gguf.vocabulary import (
    CarriedVocabulary,
    Vocabulary,
    carried_vocabulary,
    vocabulary,
)
from quantforge.grids import GGML_BLOCKS
from quantforge.notation import parse
from quantforge.packers.lattices import LATTICES, NEED_IMPORTANCE
from quantforge.planning.calibration_rows import coming_rows
from quantforge.planning.choice import QUANTIZABLE, Choice, Choices, Decision, Fitted, Terms
from quantforge.planning.draft import Draft
from quantforge.planning.embedding_choice import check_not_quantized, tied_rule
from quantforge.planning.format_choice import holders
from quantforge.planning.naming import first_recipe
from quantforge.plans import Action, FilePlan, Note, NoteKind, TensorPlan
from quantforge.recipe import Recipe
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint

LANGUAGE_ONLY = (
    "the file holds the language model alone: llama.cpp reads other towers from files of their own"
)
UNREAD = "llama.cpp computes this family's files; `eval` and `verify` do not read them back"
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_OUTSIDE = {*mixture.EMBEDDING_TENSORS, _OUTPUT}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One source tensor on its way: its name, shape and type in the file, and the rule by which it has that type."""

    tensor: MatchedTensor
    named: GgufName
    shape: tuple[int, ...]
    type: str
    rule: str


@dataclass(frozen=True, slots=True)
class GgufDraft(Draft):
    """Draft of a GGUF file, or of numbered parts of one.

    Attributes:
        table: the tensors of the file, in its order.
        keys: returns the metadata, which states the recipe.
    """

    table: tuple[GgufTensor, ...] = ()
    keys: Callable[[Recipe], Metadata] = lambda _: {}

    def files(self, recipe: Recipe) -> tuple[FilePlan, ...]:
        """Return one file, or files of at most ``max_shard_bytes`` of data each, of which the first has all keys."""
        parts: list[list[GgufTensor]] = [[]]
        filled, most = 0, recipe.max_shard_bytes
        for tensor in self.table:
            if most is not None and parts[-1] and filled + tensor.nbytes > most:
                parts.append([])
                filled = 0
            parts[-1].append(tensor)
            filled += tensor.nbytes
        keys = self.keys(recipe)
        if len(parts) == 1:
            return (file_plan("model.gguf", keys, self.table),)
        return tuple(
            file_plan(
                f"model-{number + 1:05}-of-{len(parts):05}.gguf",
                {
                    **(keys if number == 0 else {}),
                    **split_keys(number, len(parts), len(self.table)),
                },
                part,
            )
            for number, part in enumerate(parts)
        )


@dataclass(frozen=True, slots=True)
class _Contents:
    """Contents of the file of a model, before their types are chosen.

    Attributes:
        checkpoint: the source.
        model_layout: its tensors.
        kept: those that the file holds.
        named: their names in the file, by canonical name.
        parameters: what the configuration becomes.
        shape: what mixtures look at beside the tensors.
    """

    checkpoint: Checkpoint
    model_layout: ModelLayout
    kept: Sequence[MatchedTensor]
    named: Mapping[str, GgufName]
    parameters: HyperParameters
    shape: mixture.ModelShape


def draft_gguf(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    *,
    observed: bool,
    tower: ProjectorFile | None,
) -> GgufDraft:
    """Decide on every tensor of a GGUF file that is rounded into the types of a mixture, or of one scheme.

    Args:
        recipe: its type or scheme, and rules.
        checkpoint: the source.
        model_layout: its tensors.
        observed: whether the importance of columns will be known.
        tower: of pictures, which is written into a file of its own beside this one.

    Raises:
        RefusedError: a family, configuration, tokenizer or scheme that GGUF does not hold.
        InputError: the vocabulary and the embedding do not fit each other, or a pattern matches nothing.
    """
    contents = _contents(checkpoint, model_layout, observed=observed)
    types = MixtureTypes(recipe, contents.named, contents.kept, contents.shape)
    linears = sum(tensor.role is Role.LINEAR for tensor in contents.kept)

    def made_by(recipe: Recipe) -> Metadata:
        text = recipe.calibration
        if not observed:
            return provenance_keys(recipe, "", 0, 0)
        return provenance_keys(recipe, text.source, linears, coming_rows(text, checkpoint.path))

    return _draft(recipe, contents, types, made_by, tower)


def draft_gguf_export(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    schemes: Mapping[str, Scheme],
    tower: ProjectorFile | None,
) -> GgufDraft:
    """Decide on every tensor of a GGUF file that takes over codes: whatever has none keeps its type.

    Args:
        recipe: how the embedding is rounded, and the pre-tokenizer.
        checkpoint: the quantized source.
        model_layout: its tensors.
        schemes: of each module that is quantized, in the terms of the file.
        tower: as of `draft_gguf`, as the errors.
    """
    contents = _contents(checkpoint, model_layout, observed=False)
    types = GivenTypes(schemes, tied=model_layout.tied)
    wanted = Recipe(embedding=recipe.embedding, pre=recipe.pre)

    def made_by(_: Recipe) -> Metadata:
        return provenance_keys(first_recipe(checkpoint), "", 0, 0)

    return _draft(wanted, contents, types, made_by, tower)


def _contents(checkpoint: Checkpoint, model_layout: ModelLayout, *, observed: bool) -> _Contents:
    found = translate_parameters(_with_vision(model_layout.config, checkpoint.config))
    kept, sizes = _written(model_layout), found.dimensions
    named = gguf_names(found.family, sizes.layers, [tensor.name for tensor in kept])
    shape = mixture.ModelShape(sizes.layers, sizes.heads, sizes.kv_heads, found.experts, observed)
    return _Contents(checkpoint, model_layout, kept, named, found, shape)


def _draft(
    recipe: Recipe,
    contents: _Contents,
    types: FileTypes,
    made_by: Callable[[Recipe], Metadata],
    tower: ProjectorFile | None,
) -> GgufDraft:
    """Return the draft of a file whose tensors get ``types``; ``made_by`` returns the keys that state the recipe."""
    checkpoint, model_layout, found = (
        contents.checkpoint,
        contents.model_layout,
        contents.parameters,
    )
    kept, named, family = contents.kept, contents.named, contents.parameters.family
    choices = Choices(_tied(recipe, model_layout, kept), kept, types, together=False)
    targets = [_target(item, named[item.name], choices, family.squeezed) for item in kept]
    types.check(targets)
    rows = next(item.shape[0] for item in targets if item.named.name == _EMBEDDING)
    tokens = _tokens(checkpoint, rows, model_layout.config, recipe.pre)
    table = _tensor_table(targets, found)
    weights, label = sum(math.prod(tensor.shape) for tensor in table), _label(targets, types)
    held = {tensor.name: (tensor.type, tensor.shape) for tensor in table}
    kind = file_type(types.label, held, contents.shape)

    def keys(recipe: Recipe) -> Metadata:
        return merge_keys(
            general_keys(
                _name(checkpoint), family.arch, kind, weights, checkpoint.card, tokens.tokens
            ),
            found.keys,
            tokens.keys(),
            made_by(recipe),
        )

    return GgufDraft(
        tensors=(*(_tensor_plan(item, found) for item in targets), *_dropped(model_layout, kept, tower)),
        engines=layer_verdicts(gguf.INFO.engines, ()),
        label=label,
        substitutions=(*choices.substitutions, *found.events, *tokens.events),
        notes=(
            f"{label}: {_summary(targets)}",
            *choices.notes,
            *(_of_towers(checkpoint, tower) if len(model_layout.foreign) > len(model_layout.draft_heads) else ()),
            *([] if family.arch in model_type_by_arch() else [Note(UNREAD, NoteKind.NOT_READ_BACK)]),
            *tokens.notes,
        ),
        late=tuple(
            item.tensor.header.name for item in targets
            if item.named.name == _OUTPUT and item.type.lower() in GGML_BLOCKS
        ),
        table=tuple(table),
        keys=keys,
    )  # fmt: skip


def _with_vision(text: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a decoder under the name of the whole, with that of its tower: keys depend on it."""
    vision = whole.get("vision_config")
    if not isinstance(vision, Mapping):
        return text
    known = text if architecture_of(text) is not None else whole
    causal = whole.get("is_causal", True) and text.get("is_causal", True)
    own = {"model_type": known.get("model_type"), "vision_config": vision, "is_causal": causal}
    return {**text, **own}


def _of_towers(checkpoint: Checkpoint, tower: ProjectorFile | None) -> tuple[str, ...]:
    """Return what is said of the towers of a model, which the file does not hold."""
    if tower is not None:
        return (f"{LANGUAGE_ONLY}; {OPTION} writes that of pictures, {size(tower.plan.size)}",)
    written = f", {OPTION} writes that of pictures" if has_projector(checkpoint.config) else ""
    return (LANGUAGE_ONLY + written,)


def _tokens(
    checkpoint: Checkpoint, rows: int, config: Mapping[str, Any], pre: str | None
) -> CarriedVocabulary | Vocabulary:
    """Return the vocabulary of a GGUF file, or of a directory's tokenizer, for an embedding of so many rows."""
    path = checkpoint.path
    if path.is_file():
        return carried_vocabulary(path, rows)
    return vocabulary(path, rows, config, pre, _name(checkpoint))


def _name(checkpoint: Checkpoint) -> str:
    """Return the model's own name, of its repository, directory, or file, with what became of all of it."""
    path = checkpoint.path
    name = path.stem if path.is_file() else source_name(path)[0].rpartition("/")[2]
    words = ((ADAPTER, adapter_name), (KEPT_EXPERTS, experts_word))
    read = [word(said) for key, word in words if (said := checkpoint.facts.get(key)) is not None]
    return "-".join((name, *read))


def _written(model_layout: ModelLayout) -> list[MatchedTensor]:
    """Return the tensors that the file holds: of the language model, a tied head once."""
    kept = [tensor for tensor in model_layout.tensors if tensor.role is not Role.FOREIGN]
    if model_layout.tied_twice and model_layout.architecture is not None:
        head = f"{model_layout.architecture.head}.weight"
        kept = [tensor for tensor in kept if tensor.name != head]
    return kept


def _dropped(
    model_layout: ModelLayout, kept: Sequence[MatchedTensor], tower: ProjectorFile | None
) -> list[TensorPlan]:
    """Return what is left out, and why."""
    written = {tensor.header.name for tensor in kept}
    reasons = [*((item, f"dropped: {reason}") for item, reason in model_layout.dropped)]
    reasons += [
        (tensor.header, _left_out(tensor))
        for tensor in model_layout.tensors
        if tensor.header.name not in written
    ]
    beside = tower.tensors if tower is not None else {}
    return [
        TensorPlan(
            item.name, item.dtype, item.shape, Action.DROP,
            f"not of this file: {OPTION} writes it" if item.name in beside else rule,
        )
        for item, rule in reasons
    ]  # fmt: skip


def _left_out(tensor: MatchedTensor) -> str:
    if tensor.draft_head:
        return "predicts further tokens, for which these files have no place"
    return "of another tower" if tensor.role is Role.FOREIGN else SAME


def _tied(wanted: Recipe, model_layout: ModelLayout, kept: Sequence[MatchedTensor]) -> Recipe:
    """Return what is wanted of the tensors of a file, in which a tied head and the embedding are one.

    Raises:
        InputError: another scheme is asked for the head than for the embedding.
    """
    if not model_layout.tied or any(tensor.role is Role.HEAD for tensor in kept):
        return wanted
    if wanted.head not in {KEEP, wanted.embedding}:
        raise InputError(
            f"--head {wanted.head}: the head is tied to the embedding, and a GGUF file holds both as one",
            f"--embedding {wanted.head} for both, or drop --head",
        )
    return replace(wanted, head=KEEP)


def _label(targets: Sequence[FileTensor], types: FileTypes) -> str:
    """Return the kind of a file: its mixture or type, or how many bits a weight has where rules mix others in."""
    linears = [
        item for item in targets
        if item.tensor.role is Role.LINEAR and item.type.lower() in GGML_BLOCKS
    ]  # fmt: skip
    if all(
        item.type == mixture.fitting_type(types.meant(item.tensor), item.shape[-1])
        for item in linears
    ):
        return types.label
    weights = sum(math.prod(item.shape) for item in linears)
    nbytes = sum(
        TYPES[item.type].row_bytes(item.shape[-1]) * math.prod(item.shape[:-1]) for item in linears
    )
    return f"{mixture.MIXED_PREFIX}-{8 * nbytes / weights:.2f}bpw"


def _summary(targets: Iterable[FileTensor]) -> str:
    """Say how many tensors have which type."""
    counts = Counter(item.type for item in targets)
    return ", ".join(f"{kind} x{count}" for kind, count in sorted(counts.items()))


def _target(
    tensor: MatchedTensor, named: GgufName, choices: Choices[str], squeezed: tuple[str, ...]
) -> FileTensor:
    """Decide on the type of a tensor."""
    *outer, last = file_shape(tensor)
    shape = (*outer, last // (1 + len(named.others)))
    if tensor.name.endswith(squeezed):
        shape = tuple(size for size in shape if size > 1)
    if tensor.header.dtype not in QUANTIZABLE:
        raise InputError(
            f"{tensor.header.name}: type {tensor.header.dtype} is not written to GGUF",
            f"written are {', '.join(QUANTIZABLE)}", tensor=tensor.header.name,
        )  # fmt: skip
    if mixture.always_float32(named.name, len(shape)):
        return FileTensor(tensor, named, shape, "F32", "F32 always")
    decision = choices.decided(tensor)
    return FileTensor(tensor, named, shape, decision.scheme, decision.rule)


class FileTypes(Terms[str]):
    """Types of the tensors of one file; ``label`` is the mixture, or the type that most of them have."""

    label: str

    def check(self, targets: Sequence[FileTensor]) -> None:
        """Raise `RefusedError` for types that cannot be made of this model."""

    def stated(self, tensor: MatchedTensor, choice: Choice) -> str:
        """Return the type that a scheme is; that of the source where nothing is to be rounded."""
        if choice.scheme is None:
            return tensor.header.dtype
        return type_of(choice.scheme, choice.rule)

    def meant(self, tensor: MatchedTensor) -> str:
        """Return the type by which a file is of the kind that it is called after, before its blocks are fitted."""
        return self.default(tensor).scheme

    def fitted(self, tensor: MatchedTensor, form: str) -> Fitted[str]:
        """Return the type, or the one that llama.cpp takes where its blocks do not divide the rows."""
        shape = file_shape(tensor)
        given = mixture.fitting_type(form, shape[-1])
        if given == form:
            return Fitted(form)
        nbytes = TYPES[given].row_bytes(shape[-1]) * math.prod(shape[:-1])
        reason = f"{shape[-1]} columns are no multiple of {TYPES[form].columns}"
        return Fitted(given, f"{form} -> {given}, {nbytes} bytes", reason)

    def left(self, tensor: MatchedTensor, form: str) -> Fitted[str] | None:
        """Return None: files of this kind hold every shape."""
        del tensor, form
        return None


class MixtureTypes(FileTypes):
    """Types by a mixture, or by one scheme for all linears.

    Args:
        wanted: what the recipe says.
        names: of each tensor in the file, by its canonical name.
        tensors: those that are written.
        shape: of the model.
    """

    def __init__(
        self,
        wanted: Recipe,
        names: Mapping[str, GgufName],
        tensors: Sequence[MatchedTensor],
        shape: mixture.ModelShape,
    ) -> None:
        self._names = names
        self._observed = shape.importance
        self._one_scheme = wanted.scheme is not None
        self.label = _asked_label(wanted)
        columns = {
            named.name: file_shape(tensor)[-1]
            for tensor in tensors
            if not mixture.always_float32(
                (named := names[tensor.name]).name, len(tensor.header.shape)
            )
        }
        # Mixtures of the names of lattices are mostly of other types.
        pure = self.label not in mixture.MIXTURES or self.label.lower() in LATTICES
        if self._one_scheme and pure:
            self._types = dict.fromkeys(columns, self.label)
        else:
            self._types = mixture.assign_types(self.label, columns.items(), shape)

    def check(self, targets: Sequence[FileTensor]) -> None:
        """Refuse types that llama-quantize does not make without an importance; in the blocks alone it asks for one."""
        needy = [
            item for item in targets
            if item.type.lower() in NEED_IMPORTANCE and item.named.name not in _OUTSIDE
        ]  # fmt: skip
        if needy and not self._observed:
            raise RefusedError(
                f"{needy[0].tensor.name}: {needy[0].type} needs the importance of its columns,"
                f" as do {len(needy) - 1} more tensors",
                "--calibration TEXT (or builtin), or --imatrix FILE",
                tensor=needy[0].tensor.header.name,
            )

    def default(self, tensor: MatchedTensor) -> Decision[str]:
        """Return what the mixture says."""
        if self._one_scheme and tensor.role is not Role.LINEAR:
            return Decision("Q6_K", "outside of the blocks")
        name = self._names[tensor.name].name
        if name in mixture.UNQUANTIZED_TENSORS and self._types[name] not in mixture.FLOAT_TYPES:
            return Decision(tensor.header.dtype, "kept in every mixture")
        return Decision(self._types[name], self.label)


class GivenTypes(FileTypes):
    """Types of a model that is quantized already, by the schemes of its modules; what else it has keeps its type.

    An embedding that is the head too (``tied``) is rounded as in the mixture that the other types are of.
    """

    def __init__(self, given: Mapping[str, Scheme], *, tied: bool) -> None:
        self._tied = tied
        self._given = {
            module: type_of(LayerScheme(scheme), module) for module, scheme in given.items()
        }
        counted = list(self._given.values())
        self.label = max(sorted(set(counted)), key=counted.count)

    def stated(self, tensor: MatchedTensor, choice: Choice) -> str:
        """Return the type that is asked for the embedding; of one that has codes, theirs."""
        given = self._given.get(tensor.header.name.removesuffix(".weight"))
        if given is None:
            return super().stated(tensor, choice)
        check_not_quantized(tensor.header.name, str(choice.scheme or KEEP))
        return given

    def default(self, tensor: MatchedTensor) -> Decision[str]:
        """Return the type that the tensor's codes have."""
        module = tensor.header.name.removesuffix(".weight")
        if module in self._given:
            return Decision(self._given[module], "re-laid out")
        if self._tied and tensor.role is Role.EMBEDDING:
            columns = tensor.header.shape[-1]
            kind = mixture.output_type(self.label, self.label, columns)
            return Decision(mixture.fitting_type(kind, columns), tied_rule(gguf))
        return Decision(tensor.header.dtype, "kept")

    def meant(self, tensor: MatchedTensor) -> str:
        """Return the type of most tensors."""
        del tensor
        return self.label


def file_shape(tensor: MatchedTensor) -> tuple[int, ...]:
    """Return the shape of a tensor as linears have it in a file, ``[out, in]``."""
    shape = tensor.header.shape
    return shape[::-1] if tensor.transposed else shape


def type_of(layer: LayerScheme, where: str) -> str:
    """Return the type of ggml that a scheme is.

    Raises:
        RefusedError: there is none; the formats that hold it are named, or the nearest type.
    """
    scheme = ggml_scheme(layer.weight)
    if scheme.grid not in GGML_BLOCKS or layer.input is not None:
        others = holders(LayerScheme(scheme, layer.input))
        raise RefusedError(
            f"{where}: {LayerScheme(scheme, layer.input)} is no type of a GGUF file",
            f"--format {' or '.join(others)} holds it"
            if others
            else nearest(scheme.grid, GGML_BLOCKS),
        )
    return scheme.grid.upper()


def _asked_label(wanted: Recipe) -> str:
    """Return the name of the mixture, or the grid that all linears get."""
    if wanted.type is not None:
        if wanted.type.upper() not in mixture.MIXTURES:
            hint = nearest(wanted.type.upper(), mixture.MIXTURES, mixture.TYPE_HINTS)
            raise UnknownNameError(f"--type {wanted.type}: unknown", hint)
        return wanted.type.upper()
    if wanted.scheme is not None:
        return type_of(LayerScheme(parse(wanted.scheme)), "--scheme")
    bits = wanted.bits or 4
    if bits not in mixture.MIXTURE_BY_BITS:
        raise InputError(f"--bits {bits}: no mixture of that size", "2, 3, 4, 5, 6 or 8, or --type")
    return mixture.MIXTURE_BY_BITS[bits]


def _tensor_table(targets: Iterable[FileTensor], found: HyperParameters) -> list[GgufTensor]:
    """Return the tensor table in file order: experts stacked, computed tables added."""
    stacks: dict[str, list[FileTensor]] = {}
    for item in targets:
        stacks.setdefault(item.named.name, []).append(item)
    tensors = list(found.computed)
    for name, items in stacks.items():
        first = items[0]
        if first.named.expert < 0:
            given = (name, *first.named.others)
            tensors += [GgufTensor(one, first.type, first.shape) for one in given]
            continue
        experts = sorted(item.named.expert for item in items)
        if experts != list(range(found.experts)) or {item.shape for item in items} != {first.shape}:
            raise InputError(
                f"{name}: experts {experts[:8]} of {found.experts}, or their shapes differ",
                "a complete checkpoint holds every expert of every block",
                tensor=first.tensor.header.name,
            )
        tensors.append(GgufTensor(name, first.type, (len(items), *first.shape), pieces=len(items)))
    return sorted(tensors, key=lambda tensor: mixture.file_order(tensor.name))


def _tensor_plan(item: FileTensor, found: HyperParameters) -> TensorPlan:
    """Return the plan of a source tensor: its place in the table, and what is done with its rows."""
    tensor, family_heads = item.tensor, _heads(item, found)
    shape = item.shape if item.named.expert < 0 else (found.experts, *item.shape)
    pieces = 1 if item.named.expert < 0 else found.experts
    own = GgufTensor(item.named.name, item.type, shape, pieces).outputs()
    beside = [
        part
        for name in item.named.others
        for part in GgufTensor(name, item.type, shape, pieces).outputs()
    ]
    grid = item.type.lower()
    return TensorPlan(
        tensor.header.name,
        tensor.header.dtype,
        tensor.header.shape,
        Action.QUANTIZE if grid in GGML_BLOCKS else Action.KEEP,
        item.rule,
        LayerScheme(parse(grid)) if grid in GGML_BLOCKS else None,
        outputs=(own[max(item.named.expert, 0)], *beside),
        block=tensor.block,
        shared=tensor.shared,
        transposed=tensor.transposed,
        heads=family_heads,
        by_rows=grid in GGML_BLOCKS and not tensor.transposed,
        plus_one=found.family.norm_plus_one
        and item.named.name.endswith("norm.weight")
        and not tensor.name.endswith(found.family.plain_norms),
        decay=tensor.name.endswith(found.family.decays),
        expert=tensor.expert,
    )


def _heads(item: FileTensor, found: HyperParameters) -> int:
    """Return the number of heads whose rows are reordered, 0 for none."""
    if not found.family.interleaved:
        return 0
    module = item.named.name.rpartition(".")[0]
    if module.endswith("attn_q"):
        return found.dimensions.heads
    return found.dimensions.kv_heads if module.endswith("attn_k") else 0
