"""Every tensor of a checkpoint, matched to what its architecture declares: exactly once, or refused.

Loaders fill a missing tensor with random numbers and ignore one too many; a quantizer that trusted them would publish
random layers. Here the stored tensors are partitioned into declared ones (by prefix rules, with their expected shape),
foreign ones (another tower, kept as it is) and dropped ones (by a declared pattern). Whatever remains is an error, and
all of them are listed before any work. Only headers are read.

A model whose family is not declared can still be rounded plainly, one matrix at a time: its linears are found by their
names. Nothing is known about which activation a linear reads (apart from the siblings whose names say so), so that
methods which look at data are refused.
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
    Place,
    architecture_of,
    text_config,
)
from quantforge.architectures.architecture import matches
from quantforge.architectures.configuration import SAME, check_values, no_tie, tied
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.draft_heads import (
    EAGLE3,
    EMBEDDING,
    draft_head_tensors,
    is_draft,
    layers_of,
    stored_names,
    type_of,
)
from quantforge.architectures.routers import routers, weighs_an_index
from quantforge.architectures.towers import BLOCK, lists_of
from quantforge.errors import InputError
from quantforge.plans import StoredTensor

MEASURED = "with measured inputs or a measured KV cache"  # what needs declarations beside methods
RULE = (
    "a linear is every two-dimensional float tensor '*.weight' inside a numbered block of the decoder whose name "
    "contains none of: embed, lm_head, router, gate.weight, wte, wpe, weights_proj; and that is no norm, no "
    "convolution and no router of experts"
)
_NOT_LINEAR = re.compile(
    r"embed|lm_head|router|(^|\.)gate\.weight|(^|\.)(wte|wpe)\."
    r"|(^|\.)\w*conv\w*\.weight$",  # a convolution over time
    re.IGNORECASE,
)
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_INTEGERS = frozenset({"U8", "I8", "U16", "I16", "U32", "I32"})  # into which tools pack codes
# Tables of integers.
_TABLES = frozenset({"bias", "masked_bias", "position_ids", "token_type_ids", "tid2eid"})
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
    """Return whether a tensor holds packed codes: a float below 16 bits, or a matrix of integers that is no table."""
    if tensor.dtype in _INTEGERS:
        return len(tensor.shape) > 1 and tensor.name.rpartition(".")[2] not in _TABLES
    return tensor.dtype.startswith("F") and tensor.dtype not in FLOATS


class Role(StrEnum):
    """Roles of stored tensors."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"
    FOREIGN = "foreign"  # of another tower, or of a head that predicts further tokens


class DerivedDeclarations(NamedTuple):
    """Declarations of one model.

    Attributes:
        architecture: as derived.
        names: the canonical name of each stored tensor that has a place in it.
        turned: stored stacks of experts whose matrices are the transposed ones of the running model.
    """

    architecture: Architecture
    names: Mapping[str, str]
    turned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MatchedTensor:
    """One stored tensor with its place in the model.

    Attributes:
        name: canonical name (that of the transformers model); of foreign tensors the stored one.
        header: name, type and shape in the checkpoint.
        block: index of the decoder block, -1 outside.
        shared: for linear weights the stored module name of the first linear that reads the same activation.
        transposed: a linear weight stored ``[in_features, out_features]``.
        expert: the number of the expert whose matrix it is, -1 for all others.
        draft_head: it is of a head that predicts further tokens; ``shared`` is stated of the linears among them.
    """

    name: str
    header: StoredTensor
    role: Role
    block: int = -1
    shared: str = ""
    transposed: bool = False
    expert: int = -1
    draft_head: bool = False


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A checkpoint whose every tensor has a known place in the model.

    Attributes:
        architecture: the declarations, or None after the generic rule (then ``dimensions`` is None as well).
        config: the configuration of the text tower.
        layers: the kind of every decoder block, empty after the generic rule.
        tensors: all that are kept, in the order of the checkpoint.
        dropped: tensors left out, each with the pattern that says so.
        tied: the output projection is the embedding.
        tied_twice: it is, and the checkpoint stores it twice: see `resolve_tied`.
        rule: how linears were found, as a sentence for `plan`.
        draft: the kind of draft heads that it is, "" for a model.
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
    tied_twice: bool = False
    rule: str = ""
    draft: str = ""
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

    def place(self, tensor: MatchedTensor) -> Place:
        """Return where in the running model the matrix of an expert lies."""
        block = self.block_name(tensor.block)
        linear = tensor.name.removeprefix(f"{block}.").removesuffix(".weight")
        return self.layers[tensor.block].place(linear, tensor.expert)

    @property
    def draft_heads(self) -> tuple[MatchedTensor, ...]:
        """Return the tensors of heads that predict further tokens, see `quantforge.architectures.draft_heads`."""
        return tuple(tensor for tensor in self.tensors if tensor.draft_head)

    @property
    def foreign(self) -> tuple[MatchedTensor, ...]:
        """Return the tensors of other towers and of heads that predict further tokens.

        Their modules belong into the ignore list of a format.
        """
        return tuple(tensor for tensor in self.tensors if tensor.role is Role.FOREIGN)


def match_tensors(
    config: Mapping[str, Any],
    entries: Iterable[StoredTensor],
    found: DerivedDeclarations | None = None,
) -> ModelLayout:
    """Match the tensors of a checkpoint against its configuration.

    Without declarations for the ``model_type``, or where its configuration asks for something that they do not cover,
    linears are found by name; ``architecture`` is None then.

    Args:
        config: the content of ``config.json``.
        entries: the stored tensors.
        found: declarations of this very model, in the place of those of its family.

    Raises:
        InputError: tensors are missing, left over, stored twice, of a wrong shape or type (all are listed, the first
            ten by name), or the configuration is impossible.
    """
    _check_stored(headers := [*entries])
    if is_draft(config):
        _check_codes(headers)
        return _match_draft(config, headers)
    architecture = found.architecture if found else architecture_of(config)
    if architecture is not None:
        architecture = architecture.as_held(tensor.name for tensor in headers)
    tower = text_config(config)
    check_values(tower, declared=architecture is not None and not found)
    if architecture is None:
        _check_codes(headers)
        reason = f"model_type {config.get('model_type')!r} is not declared"
        return _matched_by_names(config, tower, headers, reason)
    try:
        architecture.require(tower)
    except InputError as refused:
        _check_codes(headers)
        return _matched_by_names(config, tower, headers, refused.message)
    return _declared(
        architecture.configured(tower), config, tower, headers, found.names if found else {}
    )


def needs_architecture(model_layout: ModelLayout, method: str, reason: str = "") -> InputError:
    """Return the error for a method that needs declarations on a model that has none.

    Args:
        model_layout: the model.
        method: what needs them.
        reason: why none could be derived.
    """
    asked = f"rounding {method}" if " " in method else f"--method {method}"
    plain = "--method rtn works on any decoder"
    hint = "dynamic inputs, and no --kv-cache, measure nothing" if method == MEASURED else plain
    if model_layout.draft:
        return InputError(
            f"{asked}: {model_layout.draft} heads alone read no text, so that nothing of theirs is observed",
            hint.replace("any decoder", "weights alone"),
        )
    tried = f", and its declarations could not be derived: {reason}" if reason else ""
    return InputError(
        f"{asked} needs to know which linears read the same activation; model_type"
        f" {model_layout.model_type!r} is not declared{tried}",
        hint,
    )


def require_declarations(
    model_layout: ModelLayout, method: str = "with calibration data"
) -> tuple[Architecture, Dimensions]:
    """Return the declarations and sizes of a model; raise InputError, which names ``method``, if it has none."""
    if model_layout.architecture is None or model_layout.dimensions is None:
        raise needs_architecture(model_layout, method)
    return model_layout.architecture, model_layout.dimensions


def resolve_tied(model_layout: ModelLayout, equal: Callable[[str, str], bool]) -> ModelLayout:
    """Drop a tied head that is stored twice; ``equal`` compares the bytes of two stored tensors by name.

    Raises:
        InputError: they differ, so that the configuration and the tensors contradict each other.
    """
    if not model_layout.tied_twice or model_layout.architecture is None:
        return model_layout
    embedding, head = (
        model_layout.by_name[f"{name}.weight"]
        for name in (model_layout.architecture.embedding, model_layout.architecture.head)
    )
    if embedding.header.dtype != head.header.dtype or not equal(
        embedding.header.name, head.header.name
    ):
        raise no_tie(embedding.header.name, head.header.name)
    kept = tuple(tensor for tensor in model_layout.tensors if tensor is not head)
    dropped = (*model_layout.dropped, (head.header, SAME))
    return replace(model_layout, tensors=kept, dropped=dropped, tied_twice=False)


def _check_stored(headers: list[StoredTensor]) -> None:
    counts = Counter(tensor.name for tensor in headers)
    problems = [f"{name}: stored {count} times" for name, count in counts.items() if count > 1]
    _raise(problems, "every tensor has to be in exactly one file")


def _check_codes(headers: list[StoredTensor]) -> None:
    """Refuse packed tensors that no format decoded, for models without declarations."""
    problems = [_code(tensor) for tensor in headers if holds_codes(tensor)]
    _raise(problems, "the quantization in config.json and the tensors disagree")


def _code(tensor: StoredTensor) -> str:
    return f"{tensor.name}: packed ({tensor.dtype}), and config.json does not say how"


def _raise(problems: list[str], hint: str) -> None:
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise InputError(
            f"the checkpoint does not fit its config.json ({len(problems)}): {'; '.join(problems[:10])}{more}",
            hint,
        )


def _declared(
    architecture: Architecture,
    config: Mapping[str, Any],
    tower: Mapping[str, Any],
    headers: list[StoredTensor],
    names: Mapping[str, str],
) -> ModelLayout:
    dimensions = architecture.dimensions(tower)
    if dimensions.layers > len(headers):
        raise InputError(
            f"config.json: num_hidden_layers = {dimensions.layers}, but the checkpoint holds {len(headers)} tensors",
            "configuration and weights are not of one model",
        )
    derived = architecture.derived
    is_tied = derived.tied if derived else tied(tower, config, architecture.defaults)
    slots = _Slots(architecture, dimensions, tower, names)
    heads = _head_tensors(tower, dimensions.layers, headers)
    found, dropped, problems = _partition(architecture, slots, headers, heads)
    head = f"{architecture.head}.weight"
    problems += [
        f"{name}: missing"
        for name in slots.missing(found)
        if not (is_tied and slots.by_name[name].name == head)
    ]
    problems += slots.twice(found)
    _raise(problems, "a complete checkpoint holds every tensor once, and no other")
    return ModelLayout(
        architecture=architecture,
        model_type=architecture.model_type,
        config=tower,
        dimensions=dimensions,
        layers=slots.layers,
        tensors=_stored_sharing(tuple(found.values())),
        dropped=dropped,
        tied=is_tied,
        tied_twice=is_tied and head in found,
        rule=architecture.rule,
    )


def _partition(
    architecture: Architecture,
    slots: _Slots,
    headers: Iterable[StoredTensor],
    heads: Mapping[str, MatchedTensor],
) -> tuple[dict[str, MatchedTensor], tuple[tuple[StoredTensor, str], ...], list[str]]:
    """Sort stored tensors: those with a place (by canonical name), dropped ones with the reason, and problems."""
    found: dict[str, MatchedTensor] = {}
    dropped: list[tuple[StoredTensor, str]] = []
    problems: list[str] = []
    for tensor in headers:
        slot = slots.of(tensor.name)
        pattern = next(
            (text for text in architecture.droppable if re.fullmatch(text, tensor.name)), ""
        )
        if slot is None and tensor.name in heads:
            found[tensor.name] = heads[tensor.name]
        elif slot is None and pattern:
            dropped.append((tensor, pattern))
        elif slot is None and matches(architecture.foreign, tensor.name):
            if holds_codes(tensor):
                problems.append(_code(tensor))
            found[tensor.name] = MatchedTensor(tensor.name, tensor, Role.FOREIGN)
        elif slot is None:
            problems.append(
                f"{tensor.name}: not a tensor of {architecture.model_type}{_beyond(tensor.name, len(slots.layers))}"
            )
        elif slot.name in found:
            problems.append(f"{tensor.name}: the same tensor as {found[slot.name].header.name}")
        else:
            problems += slot.misfits(tensor)
            found[slot.name] = slot.filled(tensor)
    return found, tuple(dropped), problems


def _block(name: str) -> int:
    """Return the number of the block that a stored tensor is of, -1 where its name has none."""
    found = BLOCK.match(name)
    return int(found[2]) if found else -1


def _beyond(name: str, layers: int) -> str:
    return f" with num_hidden_layers = {layers}" if _block(name) >= layers else ""


def _stored_sharing(tensors: tuple[MatchedTensor, ...]) -> tuple[MatchedTensor, ...]:
    """Name shared inputs by stored modules, the names that plans and files use."""
    modules = {
        tensor.name.removesuffix(".weight"): tensor.header.name.removesuffix(".weight")
        for tensor in tensors
    }
    names = [modules.get(tensor.shared, "") for tensor in tensors]
    pairs = zip(tensors, names, strict=True)
    return tuple(one if one.shared == name else replace(one, shared=name) for one, name in pairs)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A declared tensor: what the stored tensor of this name must look like.

    Attributes:
        name: canonical name, that of the running model.
        shape, role, block, expert: as those of `MatchedTensor` and its stored tensor.
        linear: canonical name of the first linear of the shared input.
        transposed: a linear weight stored ``[in_features, out_features]``.
        stack: of an expert's matrix, the canonical name of the tensor that may hold those of all experts instead.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    block: int = -1
    linear: str = ""
    transposed: bool = False
    expert: int = -1
    stack: str = ""

    def filled(self, header: StoredTensor) -> MatchedTensor:
        """Return the matched tensor for a stored one."""
        return MatchedTensor(
            self.name, header, self.role, self.block, self.linear, self.transposed, self.expert
        )

    def misfits(self, header: StoredTensor) -> list[str]:
        """Return what is wrong with the shape or type of a tensor of its name."""
        if header.shape != self.shape:
            return [
                f"{header.name}: shape {list(header.shape)}, the config asks for {list(self.shape)}"
            ]
        of_module = self.name.rpartition(".")[2] in {"weight", "bias"}
        beside = self.role is Role.OTHER and (self.block < 0 or not of_module)  # counters, tables
        if header.dtype not in FLOATS and not beside:
            return [f"{header.name}: type {header.dtype}, not one of {', '.join(sorted(FLOATS))}"]
        return []


class _Slots:
    """The slots of one model.

    Attributes:
        layers: the kind of every layer.
        by_name: slots by the name in files, without a prefix.
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
        self.layers = architecture.layers(config, dimensions)
        self.by_name = dict(self._outer())
        for index, kind in enumerate(self.layers):
            self.by_name.update(self._block(index, kind))

    def of(self, stored_name: str) -> _Slot | None:
        """Return the slot of a stored tensor, under any prefix of the family; None where it is not declared."""
        stored_name = self._names.get(stored_name, stored_name)
        for prefix, canonical in self._architecture.prefixes:
            if stored_name.startswith(prefix):
                slot = self.by_name.get(canonical + stored_name.removeprefix(prefix))
                if slot is not None:
                    return slot
        return None

    def missing(self, found: Container[str]) -> list[str]:
        """Return the names in files of the slots whose canonical name is not ``found``.

        Experts that files may hold in one tensor are missed as that tensor, unless some of them are there.
        """
        parts = {slot.stack for slot in self.by_name.values() if slot.stack and slot.name in found}
        known = {slot.stack for slot in self.by_name.values()}
        return [
            name
            for name, slot in self.by_name.items()
            if slot.name not in found
            and not (slot.stack and slot.stack not in parts)
            and not (slot.name in known and slot.name in parts)
        ]

    def twice(self, found: Container[str]) -> list[str]:
        """Return a problem for every expert stack that is stored along with matrices of single experts."""
        parts = {slot.stack for slot in self.by_name.values() if slot.stack and slot.name in found}
        return [
            f"{name}: some of its experts are stored one by one too"
            for name, slot in self.by_name.items()
            if slot.name in parts and slot.name in found
        ]

    def _outer(self) -> Iterator[tuple[str, _Slot]]:
        architecture = self._architecture
        special = {
            f"{architecture.embedding}.weight": Role.EMBEDDING,
            f"{architecture.head}.weight": Role.HEAD,
        }
        for item in architecture.outer:
            role = special.get(item.name) or _role(item, {}, frozenset())
            yield item.name, _Slot(item.name, self._dimensions.shape(item.shape), role)

    def _block(self, index: int, kind: LayerKind) -> Iterator[tuple[str, _Slot]]:
        block = f"{self._architecture.blocks}.{index}"
        inputs = {name: shared for shared in kind.inputs for name in shared.linears}
        weights = (item for item in kind.parameters if item.name.endswith(".weight"))
        matrices = frozenset(_module(item) for item in weights if len(item.shape) > 1)
        held = kind.stored_stacks
        stacks = {
            name: f"{block}.{place.stack.parameter}"
            for name, place in (kind.places() if held else {}).items()
            if place.stack.parameter in held
        }
        for item in kind.parameters:
            role = _role(item, inputs, matrices)
            shared = inputs[item.name.removesuffix(".weight")] if role is Role.LINEAR else None
            yield (
                f"{block}.{item.stored or item.name}",
                _Slot(
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


def _module(item: Parameter) -> str:
    return item.name.rpartition(".")[0]


def _role(item: Parameter, linears: Mapping[str, object], matrices: frozenset[str]) -> Role:
    """Return the role of a declared tensor; ``matrices``: modules whose weight has more than one dimension."""
    module, kind = _module(item), item.name.rpartition(".")[2]
    if module in linears and kind == "weight":
        return Role.LINEAR
    if module in matrices and kind == "bias":
        return Role.BIAS
    named = kind in {"weight", "bias"} and "embed" not in item.name and not module.endswith("wpe")
    return Role.NORM if named and len(item.shape) == 1 else Role.OTHER


def _matched_by_names(
    config: Mapping[str, Any], tower: Mapping[str, Any], headers: list[StoredTensor], reason: str
) -> ModelLayout:
    """Match the tensors of a model by their names alone.

    Args:
        config: of the checkpoint.
        tower: of its decoder.
        headers: all tensors, those of other towers too.
        reason: why there is nothing better.
    """
    heads = _head_tensors(tower, layers_of(tower), headers)
    names = {tensor.name for tensor in headers}
    own = [tensor for tensor in headers if tensor.name not in heads]
    lists = lists_of(config, tower, own)
    spared = routers(tower, {t.name: t.shape for t in own if lists.block(t.name) >= 0})
    tensors = []
    for tensor in headers:
        if tensor.name in heads:
            tensors.append(heads[tensor.name])
            continue
        index = lists.block(tensor.name)
        other = tensor.name in spared or lists.elsewhere(tensor.name)
        role = Role.OTHER if other else _guessed_role(tensor, index >= 0)
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
        rule=f"{reason}, so {RULE}",
    )


def _guessed_role(tensor: StoredTensor, in_block: bool) -> Role:
    name = tensor.name
    linear = (
        in_block and name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in FLOATS
    )
    spared = _NOT_LINEAR.search(name) or weighs_an_index(name) or _of_norm(name)
    if linear and not spared:
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


def _of_norm(name: str) -> bool:
    """Return whether a tensor belongs directly to a module named as a norm, not to a linear deeper inside one."""
    return "norm" in name.rpartition(".")[0].rpartition(".")[2].lower()


def _first_sibling(name: str, names: Container[str]) -> str:
    """Return the module of the first linear that, by its name, reads the same input as ``name``."""
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    for siblings in _SIBLINGS:
        if leaf in siblings:
            leaf = next(word for word in siblings if f"{parent}.{word}.weight" in names)
    return f"{parent}.{leaf}"


def _head_tensors(
    config: Mapping[str, Any], layers: int, headers: list[StoredTensor]
) -> dict[str, MatchedTensor]:
    """Return the matched tensors of draft heads by name; arguments as of `draft_head_tensors`."""
    found = draft_head_tensors(config, layers, headers)
    return {
        tensor.name: MatchedTensor(
            tensor.name,
            tensor,
            Role.FOREIGN,
            draft_head=True,
            shared=_first_sibling(tensor.name, found) if found[tensor.name] else "",
        )
        for tensor in headers
        if tensor.name in found
    }


def _match_draft(config: Mapping[str, Any], headers: list[StoredTensor]) -> ModelLayout:
    """Match the tensors of a directory of draft heads.

    Raises:
        InputError: it holds no linear, or lacks one that is known by its name.
    """
    kind = type_of(config)
    tensors = tuple(_eagle3(headers) if kind == EAGLE3 else _medusa(headers))
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
        rule=f"{kind} heads: the linears of their layers are rounded, whatever else they hold is kept",
        draft=kind,
    )


def _eagle3(headers: list[StoredTensor]) -> Iterator[MatchedTensor]:
    roles = dict.fromkeys(stored_names(EMBEDDING), Role.EMBEDDING)
    roles |= dict.fromkeys(stored_names("lm_head.weight"), Role.HEAD)
    held = {tensor.name for tensor in headers}
    shared: dict[str, str] = {}
    for group in _EAGLE3_GROUPS:
        found = [_held(f"{name}.weight", held) for name in group]
        shared |= dict.fromkeys(found, found[0].removesuffix(".weight"))
    for tensor in headers:
        if tensor.name in shared:
            yield MatchedTensor(tensor.name, tensor, Role.LINEAR, 0, shared[tensor.name])
        else:
            yield MatchedTensor(tensor.name, tensor, roles.get(tensor.name) or _rest(tensor))


def _held(name: str, held: set[str]) -> str:
    found = next((other for other in stored_names(name) if other in held), None)
    if found is None:
        raise InputError(f"{EAGLE3} heads: no tensor {name!r}", "fetch the directory again")
    return found


def _medusa(headers: list[StoredTensor]) -> Iterator[MatchedTensor]:
    for tensor in headers:
        if found := _MEDUSA_LINEAR.fullmatch(tensor.name):
            module = tensor.name.removesuffix(".weight")
            yield MatchedTensor(tensor.name, tensor, Role.LINEAR, int(found[1] or found[2]), module)
        elif _MEDUSA_OUTPUT.fullmatch(tensor.name):
            yield MatchedTensor(tensor.name, tensor, Role.HEAD)
        else:
            yield MatchedTensor(tensor.name, tensor, _rest(tensor))


def _rest(tensor: StoredTensor) -> Role:
    if "norm" in tensor.name:
        return Role.NORM
    return Role.BIAS if tensor.name.endswith(".bias") else Role.OTHER
