"""Plan a GGUF file: the name, type and position of every tensor, and the metadata.

Schemes are chosen in the order of `scheme_rules`. A mixture (``Q4_K_M``) gives every tensor its type; ``--scheme``
gives one grid to all linears, and Q6_K to tensors outside the blocks. A type whose block size does not divide the rows
of a tensor is replaced as llama.cpp replaces it. Tensors that are F32 in every mixture (norms, biases, routers) stay
F32 whatever rules say. The experts of a layer become one tensor of the file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantforge.architectures import architecture_of
from quantforge.architectures.configuration import TIED_HEAD_REASON
from quantforge.architectures.match import MatchedTensor, ModelLayout, Role
from quantforge.artifacts.manifest import adapter_name, kept_experts_word
from quantforge.artifacts.number_text import size
from quantforge.errors import InputError, RefusedError, UnknownNameError, nearest_hint
from quantforge.files.computed_tensors import ADAPTER, KEPT_EXPERTS
from quantforge.files.hub import source_name
from quantforge.formats import KEEP, gguf
from quantforge.formats.engine_verdicts import layer_verdicts
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
from quantforge.planning.calibration_rows import expected_rows
from quantforge.planning.embedding_choice import check_not_quantized, tied_rule
from quantforge.planning.format_choice import formats_holding
from quantforge.planning.naming import original_recipe
from quantforge.planning.partial_plan import PartialPlan
from quantforge.planning.scheme_rules import (
    QUANTIZABLE,
    ChosenScheme,
    FittedScheme,
    FormatSchemes,
    RequestedScheme,
    SchemeChooser,
)
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
_OUTER_NAMES = {*mixture.EMBEDDING_TENSORS, _OUTPUT}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One source tensor with its name, shape and type in the GGUF file, and the rule that chose the type."""

    tensor: MatchedTensor
    named: GgufName
    shape: tuple[int, ...]
    type: str
    rule: str


@dataclass(frozen=True, slots=True)
class PartialGgufPlan(PartialPlan):
    """Partial plan of a GGUF file or of its numbered parts.

    Attributes:
        table: tensors of the file, in file order.
        keys: returns the metadata for a recipe, which is stored in it.
    """

    table: tuple[GgufTensor, ...] = ()
    keys: Callable[[Recipe], Metadata] = lambda _: {}

    def files(self, recipe: Recipe) -> tuple[FilePlan, ...]:
        """Return one file, or parts of at most ``max_shard_bytes`` of data, the first of which has all metadata."""
        tensor_groups: list[list[GgufTensor]] = [[]]
        filled, limit = 0, recipe.max_shard_bytes
        for tensor in self.table:
            if limit is not None and tensor_groups[-1] and filled + tensor.nbytes > limit:
                tensor_groups.append([])
                filled = 0
            tensor_groups[-1].append(tensor)
            filled += tensor.nbytes
        keys = self.keys(recipe)
        if len(tensor_groups) == 1:
            return (file_plan("model.gguf", keys, self.table),)
        return tuple(
            file_plan(
                f"model-{number + 1:05}-of-{len(tensor_groups):05}.gguf",
                {
                    **(keys if number == 0 else {}),
                    **split_keys(number, len(tensor_groups), len(self.table)),
                },
                tensor_group,
            )
            for number, tensor_group in enumerate(tensor_groups)
        )


@dataclass(frozen=True, slots=True)
class _Contents:
    """Contents of a GGUF file before the types of its tensors are chosen.

    Attributes:
        checkpoint: the source.
        model_layout: its tensors.
        written: the tensors that are written.
        named: their names in the file, by canonical name.
        parameters: metadata made from the configuration.
        shape: the model's dimensions that mixtures depend on.
    """

    checkpoint: Checkpoint
    model_layout: ModelLayout
    written: Sequence[MatchedTensor]
    named: Mapping[str, GgufName]
    parameters: HyperParameters
    shape: mixture.ModelShape


def plan_gguf_tensors(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    *,
    has_importance: bool,
    tower: ProjectorFile | None,
) -> PartialGgufPlan:
    """Plan every tensor of a GGUF file that is quantized into the types of a mixture, or of one scheme.

    Args:
        recipe: its type or scheme, and rules.
        checkpoint: the source.
        model_layout: its tensors.
        has_importance: whether the importance of columns will be known.
        tower: the file of the vision tower that is written next to this one, or None.

    Raises:
        RefusedError: GGUF cannot hold the family, configuration, tokenizer or a scheme.
        InputError: vocabulary and embedding do not match, or a pattern matches nothing.
    """
    contents = _contents(checkpoint, model_layout, has_importance=has_importance)
    types = MixtureTypes(recipe, contents.named, contents.written, contents.shape)
    linears = sum(tensor.role is Role.LINEAR for tensor in contents.written)

    def recipe_metadata(recipe: Recipe) -> Metadata:
        text = recipe.calibration
        if not has_importance:
            return provenance_keys(recipe, "", 0, 0)
        return provenance_keys(recipe, text.source, linears, expected_rows(text, checkpoint.path))

    return _plan_file(recipe, contents, types, recipe_metadata, tower)


def plan_gguf_export(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
    schemes: Mapping[str, Scheme],
    tower: ProjectorFile | None,
) -> PartialGgufPlan:
    """Plan every tensor of a GGUF file that reuses the codes of a quantized source; other tensors keep their type.

    Args:
        recipe: how the embedding is quantized, and the pre-tokenizer.
        checkpoint: the quantized source.
        model_layout: its tensors.
        schemes: the scheme of each quantized module, in terms of GGUF.
        tower: as in `plan_gguf_tensors`; so are the errors.
    """
    contents = _contents(checkpoint, model_layout, has_importance=False)
    types = SourceTypes(schemes, tied=model_layout.tied)
    export_recipe = Recipe(embedding=recipe.embedding, pre_tokenizer=recipe.pre_tokenizer)

    def recipe_metadata(_: Recipe) -> Metadata:
        return provenance_keys(original_recipe(checkpoint), "", 0, 0)

    return _plan_file(export_recipe, contents, types, recipe_metadata, tower)


def _contents(
    checkpoint: Checkpoint, model_layout: ModelLayout, *, has_importance: bool
) -> _Contents:
    hyper_parameters = translate_parameters(_with_vision(model_layout.config, checkpoint.config))
    written_tensors, sizes = _written_tensors(model_layout), hyper_parameters.dimensions
    names_by_tensor = gguf_names(
        hyper_parameters.family, sizes.layers, [tensor.name for tensor in written_tensors]
    )
    shape = mixture.ModelShape(
        sizes.layers, sizes.heads, sizes.kv_heads, hyper_parameters.experts, has_importance
    )
    return _Contents(
        checkpoint, model_layout, written_tensors, names_by_tensor, hyper_parameters, shape
    )


def _plan_file(
    recipe: Recipe,
    contents: _Contents,
    types: FileTypes,
    recipe_metadata: Callable[[Recipe], Metadata],
    tower: ProjectorFile | None,
) -> PartialGgufPlan:
    """Return the partial plan of a file, given the types of its tensors and the metadata about the recipe."""
    checkpoint, model_layout, hyper_parameters = (
        contents.checkpoint,
        contents.model_layout,
        contents.parameters,
    )
    written_tensors, names_by_tensor, family = (
        contents.written,
        contents.named,
        contents.parameters.family,
    )
    chooser = SchemeChooser(
        _without_tied_head(recipe, model_layout, written_tensors),
        written_tensors,
        types,
        join_linears=False,
    )
    file_tensors = [
        _file_tensor(item, names_by_tensor[item.name], chooser, family.squeezed_suffixes)
        for item in written_tensors
    ]
    types.check(file_tensors)
    vocabulary_size = next(item.shape[0] for item in file_tensors if item.named.name == _EMBEDDING)
    tokenizer = _file_vocabulary(
        checkpoint, vocabulary_size, model_layout.config, recipe.pre_tokenizer
    )
    table = _tensor_table(file_tensors, hyper_parameters)
    weights, label = sum(math.prod(tensor.shape) for tensor in table), _label(file_tensors, types)
    types_and_shapes = {tensor.name: (tensor.type, tensor.shape) for tensor in table}
    file_type_id = file_type(types.label, types_and_shapes, contents.shape)

    def keys(recipe: Recipe) -> Metadata:
        return merge_keys(
            general_keys(
                _model_name(checkpoint),
                family.arch,
                file_type_id,
                weights,
                checkpoint.card,
                tokenizer.tokens,
            ),
            hyper_parameters.keys,
            tokenizer.keys(),
            recipe_metadata(recipe),
        )

    has_towers = len(model_layout.foreign_tensors) > len(model_layout.draft_head_tensors)
    return PartialGgufPlan(
        tensors=(
            *(_tensor_plan(item, hyper_parameters) for item in file_tensors),
            *_dropped_tensors(model_layout, written_tensors, tower),
        ),
        engines=layer_verdicts(gguf.INFO.engines, ()),
        label=label,
        substitutions=(*chooser.substitutions, *hyper_parameters.events, *tokenizer.events),
        notes=(
            f"{label}: {_type_counts(file_tensors)}",
            *chooser.notes,
            *(_tower_notes(checkpoint, tower) if has_towers else ()),
            *([] if family.arch in model_type_by_arch() else [Note(UNREAD, NoteKind.NOT_READ_BACK)]),
            *tokenizer.notes,
        ),
        tensors_after_blocks=tuple(
            item.tensor.header.name for item in file_tensors
            if item.named.name == _OUTPUT and item.type.lower() in GGML_BLOCKS
        ),
        table=tuple(table),
        keys=keys,
    )  # fmt: skip


def _with_vision(text: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a decoder's configuration with the model type and vision tower of the whole model, for metadata."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return text
    declared = text if architecture_of(text) is not None else config
    causal = config.get("is_causal", True) and text.get("is_causal", True)
    whole_keys = {
        "model_type": declared.get("model_type"),
        "vision_config": vision,
        "is_causal": causal,
    }
    return {**text, **whole_keys}


def _tower_notes(checkpoint: Checkpoint, tower: ProjectorFile | None) -> tuple[str, ...]:
    """Return notes on the model's towers, which the file does not hold."""
    if tower is not None:
        return (f"{LANGUAGE_ONLY}; {OPTION} writes that of pictures, {size(tower.plan.size)}",)
    option_text = f", {OPTION} writes that of pictures" if has_projector(checkpoint.config) else ""
    return (LANGUAGE_ONLY + option_text,)


def _file_vocabulary(
    checkpoint: Checkpoint, rows: int, config: Mapping[str, Any], pre: str | None
) -> CarriedVocabulary | Vocabulary:
    """Return the vocabulary of the source, a GGUF file or a directory with a tokenizer, for ``rows`` embedding rows."""
    path = checkpoint.path
    if path.is_file():
        return carried_vocabulary(path, rows)
    return vocabulary(path, rows, config, pre, _model_name(checkpoint))


def _model_name(checkpoint: Checkpoint) -> str:
    """Return the model's name (of its repository, directory or file) with merged adapters and kept experts."""
    path = checkpoint.path
    name = path.stem if path.is_file() else source_name(path)[0].rpartition("/")[2]
    name_parts = ((ADAPTER, adapter_name), (KEPT_EXPERTS, kept_experts_word))
    changes = [
        name_part(fact)
        for key, name_part in name_parts
        if (fact := checkpoint.source_notes.get(key)) is not None
    ]
    return "-".join((name, *changes))


def _written_tensors(model_layout: ModelLayout) -> list[MatchedTensor]:
    """Return the tensors that the file holds: those of the language model, a tied head only once."""
    tensors = [tensor for tensor in model_layout.tensors if tensor.role is not Role.FOREIGN]
    if model_layout.stores_tied_head and model_layout.architecture is not None:
        head = f"{model_layout.architecture.head}.weight"
        tensors = [tensor for tensor in tensors if tensor.name != head]
    return tensors


def _dropped_tensors(
    model_layout: ModelLayout, written_tensors: Sequence[MatchedTensor], tower: ProjectorFile | None
) -> list[TensorPlan]:
    """Return plans that drop the tensors that the file does not hold, with the reasons."""
    written_names = {tensor.header.name for tensor in written_tensors}
    reasons = [*((item, f"dropped: {reason}") for item, reason in model_layout.dropped)]
    reasons += [
        (tensor.header, _drop_reason(tensor))
        for tensor in model_layout.tensors
        if tensor.header.name not in written_names
    ]
    tower_tensors = tower.tensors if tower is not None else {}
    return [
        TensorPlan(
            item.name, item.dtype, item.shape, Action.DROP,
            f"not of this file: {OPTION} writes it" if item.name in tower_tensors else rule,
        )
        for item, rule in reasons
    ]  # fmt: skip


def _drop_reason(tensor: MatchedTensor) -> str:
    if tensor.draft_head:
        return "predicts further tokens, for which these files have no place"
    return "of another tower" if tensor.role is Role.FOREIGN else TIED_HEAD_REASON


def _without_tied_head(
    recipe: Recipe, model_layout: ModelLayout, written_tensors: Sequence[MatchedTensor]
) -> Recipe:
    """Return the recipe for a file in which a tied head and the embedding are one tensor.

    Raises:
        InputError: the head and the embedding are to get different schemes.
    """
    if not model_layout.tied or any(tensor.role is Role.HEAD for tensor in written_tensors):
        return recipe
    if recipe.lm_head not in {KEEP, recipe.embedding}:
        raise InputError(
            f"--lm-head {recipe.lm_head}: the head is tied to the embedding, and a GGUF file holds both as one",
            f"--embedding {recipe.lm_head} for both, or drop --lm-head",
        )
    return replace(recipe, lm_head=KEEP)


def _label(file_tensors: Sequence[FileTensor], types: FileTypes) -> str:
    """Return the label of a file: its mixture or type, or the bits per weight if rules mix other types in."""
    linears = [
        item for item in file_tensors
        if item.tensor.role is Role.LINEAR and item.type.lower() in GGML_BLOCKS
    ]  # fmt: skip
    if all(
        item.type == mixture.fitting_type(types.labelled_type(item.tensor), item.shape[-1])
        for item in linears
    ):
        return types.label
    weights = sum(math.prod(item.shape) for item in linears)
    nbytes = sum(
        TYPES[item.type].row_bytes(item.shape[-1]) * math.prod(item.shape[:-1]) for item in linears
    )
    return f"{mixture.MIXED_PREFIX}-{8 * nbytes / weights:.2f}bpw"


def _type_counts(file_tensors: Iterable[FileTensor]) -> str:
    """Return how many tensors have each type, as text."""
    counts = Counter(item.type for item in file_tensors)
    return ", ".join(f"{kind} x{count}" for kind, count in sorted(counts.items()))


def _file_tensor(
    tensor: MatchedTensor,
    file_name: GgufName,
    chooser: SchemeChooser[str],
    squeezed_suffixes: tuple[str, ...],
) -> FileTensor:
    """Choose the type of a source tensor."""
    *outer, last = file_shape(tensor)
    shape = (*outer, last // (1 + len(file_name.others)))
    if tensor.name.endswith(squeezed_suffixes):
        shape = tuple(size for size in shape if size > 1)
    if tensor.header.dtype not in QUANTIZABLE:
        raise InputError(
            f"{tensor.header.name}: type {tensor.header.dtype} is not written to GGUF",
            f"written are {', '.join(QUANTIZABLE)}", tensor=tensor.header.name,
        )  # fmt: skip
    if mixture.always_float32(file_name.name, len(shape)):
        return FileTensor(tensor, file_name, shape, "F32", "F32 always")
    decision = chooser.choose(tensor)
    return FileTensor(tensor, file_name, shape, decision.scheme, decision.rule)


class FileTypes(FormatSchemes[str]):
    """Types of the tensors of one file; ``label`` is the mixture, or the type that most of them have."""

    label: str

    def check(self, file_tensors: Sequence[FileTensor]) -> None:
        """Raise `RefusedError` for types that this model cannot have."""

    def from_request(self, tensor: MatchedTensor, request: RequestedScheme) -> str:
        """Return the ggml type of a requested scheme, or the source's type if the tensor is kept."""
        if request.scheme is None:
            return tensor.header.dtype
        return ggml_type_of(request.scheme, request.rule)

    def labelled_type(self, tensor: MatchedTensor) -> str:
        """Return the type that a tensor has in an unmodified file of this label, before block sizes are checked."""
        return self.default(tensor).scheme

    def fit_to_shape(self, tensor: MatchedTensor, file_type: str) -> FittedScheme[str]:
        """Return the type, or the one that llama.cpp substitutes if its block size does not divide the rows."""
        shape = file_shape(tensor)
        fitting_type = mixture.fitting_type(file_type, shape[-1])
        if fitting_type == file_type:
            return FittedScheme(file_type)
        nbytes = TYPES[fitting_type].row_bytes(shape[-1]) * math.prod(shape[:-1])
        reason = f"{shape[-1]} columns are no multiple of {TYPES[file_type].columns}"
        return FittedScheme(fitting_type, f"{file_type} -> {fitting_type}, {nbytes} bytes", reason)

    def unquantized_fallback(
        self, tensor: MatchedTensor, file_type: str
    ) -> FittedScheme[str] | None:
        """Return None: GGUF files can hold every shape."""
        del tensor, file_type
        return None


class MixtureTypes(FileTypes):
    """Types by a mixture, or by one scheme for all linears.

    Args:
        recipe: the recipe.
        names: names of the tensors in the file, by canonical name.
        tensors: the tensors that are written.
        shape: the model's dimensions that mixtures depend on.
    """

    def __init__(
        self,
        recipe: Recipe,
        names: Mapping[str, GgufName],
        tensors: Sequence[MatchedTensor],
        shape: mixture.ModelShape,
    ) -> None:
        self._names = names
        self._observed = shape.importance
        self._one_scheme = recipe.scheme is not None
        self.label = _requested_label(recipe)
        columns = {
            file_name.name: file_shape(tensor)[-1]
            for tensor in tensors
            if not mixture.always_float32(
                (file_name := names[tensor.name]).name, len(tensor.header.shape)
            )
        }
        # A mixture that is named after a lattice type consists mostly of other types.
        is_single_type = self.label not in mixture.MIXTURES or self.label.lower() in LATTICES
        if self._one_scheme and is_single_type:
            self._types = dict.fromkeys(columns, self.label)
        else:
            self._types = mixture.assign_types(self.label, columns.items(), shape)

    def check(self, file_tensors: Sequence[FileTensor]) -> None:
        """Refuse types in the blocks that llama-quantize does not make without an importance matrix."""
        refused = [
            item for item in file_tensors
            if item.type.lower() in NEED_IMPORTANCE and item.named.name not in _OUTER_NAMES
        ]  # fmt: skip
        if refused and not self._observed:
            raise RefusedError(
                f"{refused[0].tensor.name}: {refused[0].type} needs the importance of its columns,"
                f" as do {len(refused) - 1} more tensors",
                "--calibration TEXT (or builtin), or --imatrix FILE",
                tensor=refused[0].tensor.header.name,
            )

    def default(self, tensor: MatchedTensor) -> ChosenScheme[str]:
        """Return the type by the mixture."""
        if self._one_scheme and tensor.role is not Role.LINEAR:
            return ChosenScheme("Q6_K", "outside of the blocks")
        name = self._names[tensor.name].name
        if name in mixture.UNQUANTIZED_TENSORS and self._types[name] not in mixture.FLOAT_TYPES:
            return ChosenScheme(tensor.header.dtype, "kept in every mixture")
        return ChosenScheme(self._types[name], self.label)


class SourceTypes(FileTypes):
    """Types of an already quantized model, by the schemes of its modules; its other tensors keep their type.

    A tied embedding is quantized as in the mixture whose types the modules have.

    Args:
        given: scheme of each quantized module, by name.
        tied: whether the head is tied to the embedding.
    """

    def __init__(self, schemes: Mapping[str, Scheme], *, tied: bool) -> None:
        self._tied = tied
        self._given = {
            module: ggml_type_of(LayerScheme(scheme), module) for module, scheme in schemes.items()
        }
        given_types = list(self._given.values())
        self.label = max(sorted(set(given_types)), key=given_types.count)

    def from_request(self, tensor: MatchedTensor, request: RequestedScheme) -> str:
        """Return the type requested for the embedding, or that of its codes if it is quantized already."""
        source_type = self._given.get(tensor.header.name.removesuffix(".weight"))
        if source_type is None:
            return super().from_request(tensor, request)
        check_not_quantized(tensor.header.name, str(request.scheme or KEEP))
        return source_type

    def default(self, tensor: MatchedTensor) -> ChosenScheme[str]:
        """Return the type that the tensor has in the source."""
        module = tensor.header.name.removesuffix(".weight")
        if module in self._given:
            return ChosenScheme(self._given[module], "re-laid out")
        if self._tied and tensor.role is Role.EMBEDDING:
            columns = tensor.header.shape[-1]
            kind = mixture.output_type(self.label, self.label, columns)
            return ChosenScheme(mixture.fitting_type(kind, columns), tied_rule(gguf))
        return ChosenScheme(tensor.header.dtype, "kept")

    def labelled_type(self, tensor: MatchedTensor) -> str:
        """Return the most frequent type."""
        del tensor
        return self.label


def file_shape(tensor: MatchedTensor) -> tuple[int, ...]:
    """Return the shape ``[out, in]`` of a tensor in the file."""
    shape = tensor.header.shape
    return shape[::-1] if tensor.transposed else shape


def ggml_type_of(layer: LayerScheme, origin: str) -> str:
    """Return the ggml type of a scheme.

    Raises:
        RefusedError: there is none; the formats that can hold it are named, or the nearest type.
    """
    scheme = ggml_scheme(layer.weight)
    if scheme.grid not in GGML_BLOCKS or layer.input is not None:
        other_formats = formats_holding(LayerScheme(scheme, layer.input))
        raise RefusedError(
            f"{origin}: {LayerScheme(scheme, layer.input)} is no type of a GGUF file",
            f"--format {' or '.join(other_formats)} holds it"
            if other_formats
            else nearest_hint(scheme.grid, GGML_BLOCKS),
        )
    return scheme.grid.upper()


def _requested_label(recipe: Recipe) -> str:
    """Return the name of the requested mixture, or the type that all linears get."""
    if recipe.type is not None:
        if recipe.type.upper() not in mixture.MIXTURES:
            hint = nearest_hint(recipe.type.upper(), mixture.MIXTURES, mixture.TYPE_HINTS)
            raise UnknownNameError(f"--type {recipe.type}: unknown", hint)
        return recipe.type.upper()
    if recipe.scheme is not None:
        return ggml_type_of(LayerScheme(parse(recipe.scheme)), "--scheme")
    bits = recipe.bits or 4
    if bits not in mixture.MIXTURE_BY_BITS:
        raise InputError(f"--bits {bits}: no mixture of that size", "2, 3, 4, 5, 6 or 8, or --type")
    return mixture.MIXTURE_BY_BITS[bits]


def _tensor_table(
    file_tensors: Iterable[FileTensor], parameters: HyperParameters
) -> list[GgufTensor]:
    """Return the tensor table in file order, with stacked experts and computed tables (such as RoPE factors)."""
    stacks: dict[str, list[FileTensor]] = {}
    for item in file_tensors:
        stacks.setdefault(item.named.name, []).append(item)
    tensors = list(parameters.computed)
    for name, items in stacks.items():
        first = items[0]
        if first.named.expert < 0:
            stored_names = (name, *first.named.others)
            tensors += [
                GgufTensor(stored_name, first.type, first.shape) for stored_name in stored_names
            ]
            continue
        experts = sorted(item.named.expert for item in items)
        if experts != list(range(parameters.experts)) or {item.shape for item in items} != {
            first.shape
        }:
            raise InputError(
                f"{name}: experts {experts[:8]} of {parameters.experts}, or their shapes differ",
                "a complete checkpoint holds every expert of every block",
                tensor=first.tensor.header.name,
            )
        tensors.append(
            GgufTensor(name, first.type, (len(items), *first.shape), num_pieces=len(items))
        )
    return sorted(tensors, key=lambda tensor: mixture.file_order(tensor.name))


def _tensor_plan(item: FileTensor, parameters: HyperParameters) -> TensorPlan:
    """Return the plan of a source tensor: its place in the tensor table, and how its rows are converted."""
    tensor, family_heads = item.tensor, _reordered_heads(item, parameters)
    shape = item.shape if item.named.expert < 0 else (parameters.experts, *item.shape)
    num_experts = 1 if item.named.expert < 0 else parameters.experts
    outputs = GgufTensor(item.named.name, item.type, shape, num_experts).outputs()
    copies = [
        output
        for name in item.named.others
        for output in GgufTensor(name, item.type, shape, num_experts).outputs()
    ]
    grid = item.type.lower()
    return TensorPlan(
        tensor.header.name,
        tensor.header.dtype,
        tensor.header.shape,
        Action.QUANTIZE if grid in GGML_BLOCKS else Action.KEEP,
        item.rule,
        LayerScheme(parse(grid)) if grid in GGML_BLOCKS else None,
        outputs=(outputs[max(item.named.expert, 0)], *copies),
        block=tensor.block,
        shared=tensor.shared_input,
        transposed=tensor.transposed,
        heads=family_heads,
        strip_by_strip=grid in GGML_BLOCKS and not tensor.transposed,
        plus_one=parameters.family.norm_plus_one
        and item.named.name.endswith("norm.weight")
        and not tensor.name.endswith(parameters.family.unshifted_norm_suffixes),
        negate_exp=tensor.name.endswith(parameters.family.decay_suffixes),
        expert=tensor.expert,
    )


def _reordered_heads(item: FileTensor, parameters: HyperParameters) -> int:
    """Return the number of heads whose rotary rows are reordered, 0 if none are."""
    if not parameters.family.permutes_qk:
        return 0
    module = item.named.name.rpartition(".")[0]
    if module.endswith("attn_q"):
        return parameters.dimensions.heads
    return parameters.dimensions.kv_heads if module.endswith("attn_k") else 0
