"""Match every stored tensor of a checkpoint to a declared tensor of its architecture, exactly once.

Loaders fill a missing tensor with random numbers and ignore superfluous ones; a quantizer that relied on them would
publish random layers. Here stored tensors are divided into declared ones (after prefix rules, with their expected
shape), foreign ones (of another tower, kept unchanged) and dropped ones (by a declared pattern). Whatever remains is an
error, and all errors are listed before any work. Only headers are read.

A model whose family is not declared can still be rounded without data, one matrix at a time: its linears are found by
name. Nothing is known about which activation a linear reads (apart from siblings with well-known names), so methods
that use data are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from quantforge.architectures import (
    Architecture,
    LayerKind,
    Parameter,
    StackSlice,
    architecture_of,
    text_config,
)
from quantforge.architectures.architecture import matches_any
from quantforge.architectures.configuration import (
    TIED_HEAD_REASON,
    check_values,
    is_head_tied,
    tied_head_mismatch,
)
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.draft_heads import (
    EAGLE3,
    EMBEDDING,
    eagle3_stored_names,
    find_draft_head_tensors,
    is_draft,
    layer_count,
    model_type_or_draft,
)
from quantforge.architectures.routers import find_routers, is_indexer_weight
from quantforge.architectures.towers import NUMBERED_NAME, find_decoder_lists
from quantforge.errors import InputError
from quantforge.plans import StoredTensor

# What needs declarations beside methods
MEASURED_INPUTS = "with measured inputs or a measured KV cache"
NAME_RULE = (
    "a linear is every two-dimensional float tensor '*.weight' inside a numbered block of the decoder whose name "
    "contains none of: embed, lm_head, router, gate.weight, wte, wpe, weights_proj; and that is no norm, no "
    "convolution and no router of experts"
)
_NOT_LINEAR = re.compile(
    r"embed|lm_head|router|(^|\.)gate\.weight|(^|\.)(wte|wpe)\."
    r"|(^|\.)\w*conv\w*\.weight$",  # a convolution over time
    re.IGNORECASE,
)
FLOAT_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
_PACKED_DTYPES = frozenset({"U8", "I8", "U16", "I16", "U32", "I32"})  # into which tools pack codes
# Tables of integers.
_INTEGER_TABLES = frozenset({"bias", "masked_bias", "position_ids", "token_type_ids", "tid2eid"})
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Linears of EAGLE-3; those of a group read the same activation.
_EAGLE3_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
_MEDUSA_LINEAR = re.compile(
    r"(?:medusa_heads?\.)?(?:(\d+)\.\d+\.linear|blocks\.(\d+)\.layers\.\d+)\.weight"
)
_MEDUSA_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(?:\d+\.\d+|lm_heads\.\d+)\.weight")


def holds_codes(tensor: StoredTensor) -> bool:
    """Return whether a tensor holds packed codes: a float type below 16 bits, or an integer matrix that is no table."""
    if tensor.dtype in _PACKED_DTYPES:
        return len(tensor.shape) > 1 and tensor.name.rpartition(".")[2] not in _INTEGER_TABLES
    return tensor.dtype.startswith("F") and tensor.dtype not in FLOAT_DTYPES


class Role(StrEnum):
    """Roles of stored tensors in a model."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"
    FOREIGN = "foreign"  # of another tower, or of a head that predicts further tokens


class DerivedDeclarations(NamedTuple):
    """Declarations derived for one model.

    Attributes:
        architecture: the derived declarations.
        names: the canonical name of each stored tensor that belongs to it.
        transposed_stacks: stored expert stacks whose matrices are transposed relative to the running model.
    """

    architecture: Architecture
    names: Mapping[str, str]
    transposed_stacks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MatchedTensor:
    """One stored tensor with its role in the model.

    Attributes:
        name: canonical name (that of the transformers model); for foreign tensors the stored name.
        header: name, type and shape in the checkpoint.
        role: what the tensor is.
        block: index of the decoder block, -1 outside.
        shared_input: for linear weights, the stored module name of the first linear that reads the same activation.
        transposed: whether it is a linear weight stored ``[in_features, out_features]``.
        expert: index of the expert whose matrix it is, -1 for all others.
        draft_head: whether it belongs to a head that predicts further tokens; linears among these have ``shared_input``
            set.
    """

    name: str
    header: StoredTensor
    role: Role
    block: int = -1
    shared_input: str = ""
    transposed: bool = False
    expert: int = -1
    draft_head: bool = False


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A checkpoint whose tensors were all matched: each one's role, block and shared input.

    Attributes:
        architecture: the declarations; None if linears were found by name (then ``dimensions`` is None as well).
        model_type: the ``model_type`` of the family.
        config: the configuration of the text decoder.
        dimensions: the sizes of the model.
        layers: the kind of every decoder block; empty if linears were found by name.
        tensors: all kept tensors, in the order of the checkpoint.
        dropped: dropped tensors, each with the pattern that matched it.
        tied: whether the output projection is tied to the embedding.
        stores_tied_head: whether it is tied and the checkpoint stores it nevertheless, see `resolve_tied`.
        linear_rule: how linears were found, as a sentence for a plan.
        draft_kind: the kind of draft heads if the directory contains nothing else, "" for a model.
        by_name: the tensors by canonical name.
    """

    architecture: Architecture | None
    model_type: str
    config: Mapping[str, Any]
    dimensions: Dimensions | None
    tensors: tuple[MatchedTensor, ...]
    layers: tuple[LayerKind, ...] = ()
    dropped: tuple[tuple[StoredTensor, str], ...] = ()
    tied: bool = False
    stores_tied_head: bool = False
    linear_rule: str = ""
    draft_kind: str = ""
    by_name: Mapping[str, MatchedTensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {tensor.name: tensor for tensor in self.tensors})

    @property
    def blocks(self) -> int:
        """Return the number of decoder blocks."""
        return 1 + max((tensor.block for tensor in self.tensors), default=-1)

    def block_name(self, index: int) -> str:
        """Return the canonical name of a block, e.g. ``model.layers.3``."""
        return f"{self.architecture.blocks if self.architecture else 'block'}.{index}"

    def expert_slice(self, tensor: MatchedTensor) -> StackSlice:
        """Return the position of an expert matrix in the stacks of the running model."""
        block = self.block_name(tensor.block)
        linear = tensor.name.removeprefix(f"{block}.").removesuffix(".weight")
        return self.layers[tensor.block].expert_slice(linear, tensor.expert)

    @property
    def draft_head_tensors(self) -> tuple[MatchedTensor, ...]:
        """Return the tensors of draft heads, see `quantforge.architectures.draft_heads`."""
        return tuple(tensor for tensor in self.tensors if tensor.draft_head)

    @property
    def foreign_tensors(self) -> tuple[MatchedTensor, ...]:
        """Return the tensors of other towers and of draft heads.

        Their modules belong on the ignore list of a format.
        """
        return tuple(tensor for tensor in self.tensors if tensor.role is Role.FOREIGN)


def match_tensors(
    config: Mapping[str, Any],
    entries: Iterable[StoredTensor],
    derived: DerivedDeclarations | None = None,
) -> ModelLayout:
    """Match the tensors of a checkpoint to the declarations of its family.

    Without declarations for the ``model_type``, or if the configuration has a setting that they do not support, linears
    are found by name and ``architecture`` is None.

    Args:
        config: the content of ``config.json``.
        entries: headers of the stored tensors.
        derived: derived declarations of this model, which replace those of its family.

    Raises:
        InputError: tensors are missing, superfluous, stored twice, or of a wrong shape or type (all are counted, the
            first ten named), or the configuration is impossible.
    """
    _check_duplicates(headers := [*entries])
    if is_draft(config):
        _refuse_packed(headers)
        return _match_draft(config, headers)
    architecture = derived.architecture if derived else architecture_of(config)
    if architecture is not None:
        architecture = architecture.for_stored_names(tensor.name for tensor in headers)
    tower = text_config(config)
    check_values(tower, declared=architecture is not None and not derived)
    if architecture is None:
        _refuse_packed(headers)
        reason = f"model_type {config.get('model_type')!r} is not declared"
        return _match_names(config, tower, headers, reason)
    try:
        architecture.check_required_values(tower)
    except InputError as error:
        _refuse_packed(headers)
        return _match_names(config, tower, headers, error.message)
    return _match_declarations(
        architecture.for_config(tower), config, tower, headers, derived.names if derived else {}
    )


def needs_architecture(model_layout: ModelLayout, method: str, reason: str = "") -> InputError:
    """Return the error for a method that needs declarations of a model that has none.

    Args:
        model_layout: the model.
        method: the method that needs them.
        reason: why none could be derived.
    """
    requested = f"rounding {method}" if " " in method else f"--method {method}"
    rtn_hint = "--method rtn works on any decoder"
    hint = (
        "dynamic inputs, and no --kv-cache, measure nothing"
        if method == MEASURED_INPUTS
        else rtn_hint
    )
    if model_layout.draft_kind:
        return InputError(
            f"{requested}: {model_layout.draft_kind} heads alone read no text, so that nothing of theirs is observed",
            hint.replace("any decoder", "weights alone"),
        )
    derivation_note = f", and its declarations could not be derived: {reason}" if reason else ""
    return InputError(
        f"{requested} needs to know which linears read the same activation; model_type"
        f" {model_layout.model_type!r} is not declared{derivation_note}",
        hint,
    )


def require_declarations(
    model_layout: ModelLayout, method: str = "with calibration data"
) -> tuple[Architecture, Dimensions]:
    """Return the declarations and sizes of a model; raise InputError, naming ``method``, if it has none."""
    if model_layout.architecture is None or model_layout.dimensions is None:
        raise needs_architecture(model_layout, method)
    return model_layout.architecture, model_layout.dimensions


def resolve_tied(model_layout: ModelLayout, equal: Callable[[str, str], bool]) -> ModelLayout:
    """Drop a tied head that is stored although it equals the embedding.

    Args:
        model_layout: the model.
        equal: compares the bytes of two stored tensors by name.

    Raises:
        InputError: they differ, so that the configuration and the tensors contradict each other.
    """
    if not model_layout.stores_tied_head or model_layout.architecture is None:
        return model_layout
    embedding, head = (
        model_layout.by_name[f"{name}.weight"]
        for name in (model_layout.architecture.embedding, model_layout.architecture.head)
    )
    if embedding.header.dtype != head.header.dtype or not equal(
        embedding.header.name, head.header.name
    ):
        raise tied_head_mismatch(embedding.header.name, head.header.name)
    other_tensors = tuple(tensor for tensor in model_layout.tensors if tensor is not head)
    dropped = (*model_layout.dropped, (head.header, TIED_HEAD_REASON))
    return replace(model_layout, tensors=other_tensors, dropped=dropped, stores_tied_head=False)


def _check_duplicates(headers: list[StoredTensor]) -> None:
    counts = Counter(tensor.name for tensor in headers)
    problems = [f"{name}: stored {count} times" for name, count in counts.items() if count > 1]
    _raise_problems(problems, "every tensor has to be in exactly one file")


def _refuse_packed(headers: list[StoredTensor]) -> None:
    """Refuse packed tensors that no format decoded."""
    problems = [_packed_problem(tensor) for tensor in headers if holds_codes(tensor)]
    _raise_problems(problems, "the quantization in config.json and the tensors disagree")


def _packed_problem(tensor: StoredTensor) -> str:
    return f"{tensor.name}: packed ({tensor.dtype}), and config.json does not say how"


def _raise_problems(problems: list[str], hint: str) -> None:
    if problems:
        more_suffix = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise InputError(
            f"the checkpoint does not fit its config.json ({len(problems)}): {'; '.join(problems[:10])}{more_suffix}",
            hint,
        )


def _match_declarations(
    architecture: Architecture,
    config: Mapping[str, Any],
    tower: Mapping[str, Any],
    headers: list[StoredTensor],
    names: Mapping[str, str],
) -> ModelLayout:
    dimensions = architecture.dimensions(tower)
    if dimensions.layers > len(headers):
        raise InputError(
            f"num_hidden_layers = {dimensions.layers}, but the checkpoint holds {len(headers)} tensors",
            "configuration and weights are not of one model",
            subject="config.json",
        )
    derived = architecture.derivation
    is_tied = derived.tied if derived else is_head_tied(tower, config, architecture.defaults)
    declared_tensors = _DeclaredTensors(architecture, dimensions, tower, names)
    draft_heads = _match_draft_heads(tower, dimensions.layers, headers)
    matched, dropped, problems = _assign_tensors(
        architecture, declared_tensors, headers, draft_heads
    )
    head = f"{architecture.head}.weight"
    problems += [
        f"{name}: missing"
        for name in declared_tensors.missing(matched)
        if not (is_tied and declared_tensors.by_name[name].name == head)
    ]
    problems += declared_tensors.stored_twice(matched)
    _raise_problems(problems, "a complete checkpoint holds every tensor once, and no other")
    return ModelLayout(
        architecture=architecture,
        model_type=architecture.model_type,
        config=tower,
        dimensions=dimensions,
        layers=declared_tensors.layers,
        tensors=_use_stored_names(tuple(matched.values())),
        dropped=dropped,
        tied=is_tied,
        stores_tied_head=is_tied and head in matched,
        linear_rule=architecture.linear_rule,
    )


def _assign_tensors(
    architecture: Architecture,
    declared_tensors: _DeclaredTensors,
    headers: Iterable[StoredTensor],
    draft_heads: Mapping[str, MatchedTensor],
) -> tuple[dict[str, MatchedTensor], tuple[tuple[StoredTensor, str], ...], list[str]]:
    """Sort stored tensors: matched ones by canonical name, dropped ones with the reason, and problems."""
    matched: dict[str, MatchedTensor] = {}
    dropped: list[tuple[StoredTensor, str]] = []
    problems: list[str] = []
    for tensor in headers:
        declared_tensor = declared_tensors.find(tensor.name)
        pattern = next(
            (text for text in architecture.droppable_patterns if re.fullmatch(text, tensor.name)),
            "",
        )
        if declared_tensor is None and tensor.name in draft_heads:
            matched[tensor.name] = draft_heads[tensor.name]
        elif declared_tensor is None and pattern:
            dropped.append((tensor, pattern))
        elif declared_tensor is None and matches_any(architecture.foreign_patterns, tensor.name):
            if holds_codes(tensor):
                problems.append(_packed_problem(tensor))
            matched[tensor.name] = MatchedTensor(tensor.name, tensor, Role.FOREIGN)
        elif declared_tensor is None:
            hint = _layer_count_hint(tensor.name, len(declared_tensors.layers))
            problems.append(f"{tensor.name}: not a tensor of {architecture.model_type}{hint}")
        elif declared_tensor.name in matched:
            problems.append(
                f"{tensor.name}: the same tensor as {matched[declared_tensor.name].header.name}"
            )
        else:
            problems += declared_tensor.problems_with(tensor)
            matched[declared_tensor.name] = declared_tensor.match(tensor)
    return matched, tuple(dropped), problems


def _block_index(name: str) -> int:
    """Return the block index in the name of a stored tensor, -1 if it has none."""
    match = NUMBERED_NAME.match(name)
    return int(match[2]) if match else -1


def _layer_count_hint(name: str, layers: int) -> str:
    return f" with num_hidden_layers = {layers}" if _block_index(name) >= layers else ""


def _use_stored_names(tensors: tuple[MatchedTensor, ...]) -> tuple[MatchedTensor, ...]:
    """Name shared inputs by stored modules, as plans and files do."""
    modules = {
        tensor.name.removesuffix(".weight"): tensor.header.name.removesuffix(".weight")
        for tensor in tensors
    }
    names = [modules.get(tensor.shared_input, "") for tensor in tensors]
    pairs = zip(tensors, names, strict=True)
    return tuple(
        renamed if renamed.shared_input == name else replace(renamed, shared_input=name)
        for renamed, name in pairs
    )


@dataclass(frozen=True, slots=True)
class _DeclaredTensor:
    """A declared tensor, to which a stored tensor can be matched.

    Attributes:
        name: canonical name, that of the running model.
        shape: the expected shape.
        role, block, expert: see `MatchedTensor`.
        linear: canonical name of the first linear of the shared input.
        transposed: whether it is a linear weight stored ``[in_features, out_features]``.
        stack: for an expert matrix, canonical name of the stacked tensor that may store all experts instead.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    block: int = -1
    linear: str = ""
    transposed: bool = False
    expert: int = -1
    stack: str = ""

    def match(self, header: StoredTensor) -> MatchedTensor:
        """Return the matched tensor for a stored one."""
        return MatchedTensor(
            self.name, header, self.role, self.block, self.linear, self.transposed, self.expert
        )

    def problems_with(self, header: StoredTensor) -> list[str]:
        """Return what is wrong with the shape or type of a stored tensor."""
        if header.shape != self.shape:
            return [
                f"{header.name}: shape {list(header.shape)}, the config asks for {list(self.shape)}"
            ]
        of_module = self.name.rpartition(".")[2] in {"weight", "bias"}
        # Counters, tables
        may_be_integer = self.role is Role.OTHER and (self.block < 0 or not of_module)
        if header.dtype not in FLOAT_DTYPES and not may_be_integer:
            return [
                f"{header.name}: type {header.dtype}, not one of {', '.join(sorted(FLOAT_DTYPES))}"
            ]
        return []


class _DeclaredTensors:
    """All declared tensors of one model.

    Attributes:
        layers: the kind of every layer.
        by_name: declared tensors by their name in files, without prefix.
    """

    def __init__(
        self,
        architecture: Architecture,
        dimensions: Dimensions,
        config: Mapping[str, Any],
        names: Mapping[str, str],
    ) -> None:
        self._names = names
        self._architecture = architecture
        self._dimensions = dimensions
        self.layers = architecture.layer_kinds(config, dimensions)
        self.by_name = dict(self._outer())
        for index, kind in enumerate(self.layers):
            self.by_name.update(self._block(index, kind))

    def find(self, stored_name: str) -> _DeclaredTensor | None:
        """Return the declaration of a stored tensor, under any prefix of the family; None if there is none."""
        stored_name = self._names.get(stored_name, stored_name)
        for prefix, canonical in self._architecture.prefixes:
            if stored_name.startswith(prefix):
                slot = self.by_name.get(canonical + stored_name.removeprefix(prefix))
                if slot is not None:
                    return slot
        return None

    def missing(self, stored_names: Container[str]) -> list[str]:
        """Return the names in files of declared tensors whose canonical name is not in ``stored_names``.

        If files may store experts stacked, the stack is reported as missing, unless some single experts are present.
        """
        partly_stored = {
            slot.stack for slot in self.by_name.values() if slot.stack and slot.name in stored_names
        }
        all_stacks = {slot.stack for slot in self.by_name.values()}
        return [
            name
            for name, slot in self.by_name.items()
            if slot.name not in stored_names
            and not (slot.stack and slot.stack not in partly_stored)
            and not (slot.name in all_stacks and slot.name in partly_stored)
        ]

    def stored_twice(self, stored_names: Container[str]) -> list[str]:
        """Return a problem for every expert stack that is stored along with matrices of single experts."""
        partly_stored = {
            slot.stack for slot in self.by_name.values() if slot.stack and slot.name in stored_names
        }
        return [
            f"{name}: some of its experts are stored one by one too"
            for name, slot in self.by_name.items()
            if slot.name in partly_stored and slot.name in stored_names
        ]

    def _outer(self) -> Iterator[tuple[str, _DeclaredTensor]]:
        architecture = self._architecture
        special = {
            f"{architecture.embedding}.weight": Role.EMBEDDING,
            f"{architecture.head}.weight": Role.HEAD,
        }
        for item in architecture.outer_parameters:
            role = special.get(item.name) or _declared_role(item, {}, frozenset())
            yield item.name, _DeclaredTensor(item.name, self._dimensions.shape(item.shape), role)

    def _block(self, index: int, kind: LayerKind) -> Iterator[tuple[str, _DeclaredTensor]]:
        block = f"{self._architecture.blocks}.{index}"
        inputs = {name: shared for shared in kind.inputs for name in shared.linears}
        weights = (item for item in kind.parameters if item.name.endswith(".weight"))
        matrices = frozenset(_module_name(item) for item in weights if len(item.shape) > 1)
        stored_stacks = kind.stored_stacks
        stacks = {
            name: f"{block}.{stack_slice.stack.parameter}"
            for name, stack_slice in (kind.expert_slices() if stored_stacks else {}).items()
            if stack_slice.stack.parameter in stored_stacks
        }
        for item in kind.parameters:
            role = _declared_role(item, inputs, matrices)
            shared = inputs[item.name.removesuffix(".weight")] if role is Role.LINEAR else None
            yield (
                f"{block}.{item.stored or item.name}",
                _DeclaredTensor(
                    f"{block}.{item.name}",
                    self._dimensions.shape(item.shape),
                    role,
                    index,
                    f"{block}.{shared.key}" if shared else "",
                    self._architecture.transposed and shared is not None,
                    shared.expert if shared else -1,
                    stacks.get(item.name.removesuffix(".weight"), ""),
                ),
            )


def _module_name(item: Parameter) -> str:
    return item.name.rpartition(".")[0]


def _declared_role(
    item: Parameter, linears: Mapping[str, object], matrices: frozenset[str]
) -> Role:
    """Return the role of a declared tensor; ``matrices`` are modules whose weight has more than one dimension."""
    module, kind = _module_name(item), item.name.rpartition(".")[2]
    if module in linears and kind == "weight":
        return Role.LINEAR
    if module in matrices and kind == "bias":
        return Role.BIAS
    may_be_norm = (
        kind in {"weight", "bias"} and "embed" not in item.name and not module.endswith("wpe")
    )
    return Role.NORM if may_be_norm and len(item.shape) == 1 else Role.OTHER


def _match_names(
    config: Mapping[str, Any], tower: Mapping[str, Any], headers: list[StoredTensor], reason: str
) -> ModelLayout:
    """Match the tensors of a model by their names alone.

    Args:
        config: configuration of the checkpoint.
        tower: configuration of its decoder.
        headers: all tensors, including those of other towers.
        reason: why there are no declarations.
    """
    draft_heads = _match_draft_heads(tower, layer_count(tower), headers)
    names = {tensor.name for tensor in headers}
    decoder_headers = [tensor for tensor in headers if tensor.name not in draft_heads]
    module_lists = find_decoder_lists(config, tower, decoder_headers)
    router_names = find_routers(
        tower, {t.name: t.shape for t in decoder_headers if module_lists.block_index(t.name) >= 0}
    )
    tensors = []
    for tensor in headers:
        if tensor.name in draft_heads:
            tensors.append(draft_heads[tensor.name])
            continue
        index = module_lists.block_index(tensor.name)
        is_other = tensor.name in router_names or module_lists.is_in_tower(tensor.name)
        role = Role.OTHER if is_other else _role_from_name(tensor, index >= 0)
        shared = _first_sibling(tensor.name, names) if role is Role.LINEAR else ""
        tensors.append(MatchedTensor(tensor.name, tensor, role, index, shared))
    has_head = any(tensor.role is Role.HEAD for tensor in tensors)
    return ModelLayout(
        architecture=None,
        model_type=str(tower.get("model_type", "")),
        config=tower,
        dimensions=None,
        tensors=tuple(tensors),
        tied=tower.get("tie_word_embeddings") is True and not has_head,
        linear_rule=f"{reason}, so {NAME_RULE}",
    )


def _role_from_name(tensor: StoredTensor, in_block: bool) -> Role:
    name = tensor.name
    linear = (
        in_block
        and name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.dtype in FLOAT_DTYPES
    )
    is_unquantized = _NOT_LINEAR.search(name) or is_indexer_weight(name) or _is_in_norm(name)
    if linear and not is_unquantized:
        return Role.LINEAR
    if len(tensor.shape) == 2 and not in_block:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and re.search(r"head$|unembed$", module):
            return Role.HEAD
        if ("embed" in name or "wte" in name) and "proj" not in name:
            return Role.EMBEDDING
    if "norm" in name:
        return Role.NORM
    return Role.BIAS if name.endswith(".bias") else Role.OTHER


def _is_in_norm(name: str) -> bool:
    """Return whether a tensor belongs directly to a norm module, not to a linear deeper inside one."""
    return "norm" in name.rpartition(".")[0].rpartition(".")[2].lower()


def _first_sibling(name: str, names: Container[str]) -> str:
    """Return the module of the first linear that, by its name, reads the same input as ``name``."""
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    for siblings in _SIBLINGS:
        if leaf in siblings:
            leaf = next(sibling for sibling in siblings if f"{parent}.{sibling}.weight" in names)
    return f"{parent}.{leaf}"


def _match_draft_heads(
    config: Mapping[str, Any], layers: int, headers: list[StoredTensor]
) -> dict[str, MatchedTensor]:
    """Return the matched tensors of draft heads by name; arguments as of `find_draft_head_tensors`."""
    linear_by_name = find_draft_head_tensors(config, layers, headers)
    return {
        tensor.name: MatchedTensor(
            tensor.name,
            tensor,
            Role.FOREIGN,
            draft_head=True,
            shared_input=_first_sibling(tensor.name, linear_by_name)
            if linear_by_name[tensor.name]
            else "",
        )
        for tensor in headers
        if tensor.name in linear_by_name
    }


def _match_draft(config: Mapping[str, Any], headers: list[StoredTensor]) -> ModelLayout:
    """Match the tensors of a directory of draft heads.

    Raises:
        InputError: it has no linear, or lacks one that is known by name.
    """
    kind = model_type_or_draft(config)
    tensors = tuple(_match_eagle3(headers) if kind == EAGLE3 else _match_medusa(headers))
    if not any(tensor.role is Role.LINEAR for tensor in tensors):
        raise InputError(
            f"{kind} heads without a linear: no tensor has the name of one", "fetch them again"
        )
    return ModelLayout(
        architecture=None,
        model_type=kind,
        config=config,
        dimensions=None,
        tensors=tensors,
        linear_rule=f"{kind} heads: the linears of their layers are rounded, whatever else they hold is kept",
        draft_kind=kind,
    )


def _match_eagle3(headers: list[StoredTensor]) -> Iterator[MatchedTensor]:
    roles = dict.fromkeys(eagle3_stored_names(EMBEDDING), Role.EMBEDDING)
    roles |= dict.fromkeys(eagle3_stored_names("lm_head.weight"), Role.HEAD)
    names = {tensor.name for tensor in headers}
    shared: dict[str, str] = {}
    for group in _EAGLE3_GROUPS:
        stored_names = [_find_stored_name(f"{name}.weight", names) for name in group]
        shared |= dict.fromkeys(stored_names, stored_names[0].removesuffix(".weight"))
    for tensor in headers:
        if tensor.name in shared:
            yield MatchedTensor(tensor.name, tensor, Role.LINEAR, 0, shared[tensor.name])
        else:
            yield MatchedTensor(tensor.name, tensor, roles.get(tensor.name) or _other_role(tensor))


def _find_stored_name(name: str, stored_names: set[str]) -> str:
    stored_name = next(
        (other for other in eagle3_stored_names(name) if other in stored_names), None
    )
    if stored_name is None:
        raise InputError(f"{EAGLE3} heads: no tensor {name!r}", "fetch the directory again")
    return stored_name


def _match_medusa(headers: list[StoredTensor]) -> Iterator[MatchedTensor]:
    for tensor in headers:
        if match := _MEDUSA_LINEAR.fullmatch(tensor.name):
            module = tensor.name.removesuffix(".weight")
            yield MatchedTensor(tensor.name, tensor, Role.LINEAR, int(match[1] or match[2]), module)
        elif _MEDUSA_OUTPUT.fullmatch(tensor.name):
            yield MatchedTensor(tensor.name, tensor, Role.HEAD)
        else:
            yield MatchedTensor(tensor.name, tensor, _other_role(tensor))


def _other_role(tensor: StoredTensor) -> Role:
    if "norm" in tensor.name:
        return Role.NORM
    return Role.BIAS if tensor.name.endswith(".bias") else Role.OTHER
