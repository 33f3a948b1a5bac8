"""Every tensor of a checkpoint, matched to what its architecture declares: exactly once, or refused.

Loaders fill a missing tensor with random numbers and ignore one too many; a quantizer that trusted them would publish
random layers. Here the stored tensors are partitioned into declared ones (by prefix rules, with their expected shape),
foreign ones (another tower, kept as it is) and dropped ones (by a declared pattern). Whatever remains is an error, and
all of them are listed before any work. Only headers are read.

A model whose family is not declared can still be rounded plainly. `GENERIC_RULE` says what is taken for a linear then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from quantforge.architectures import (
    MODEL_TYPES,
    Architecture,
    architecture_of,
    matches,
    required,
    text_config,
)
from quantforge.architectures.dimensions import Dimensions, dimensions_of, tied
from quantforge.errors import InputError
from quantforge.planned import StoredTensor

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
GENERIC_RULE = (
    "model_type {type!r} is not declared, so a linear is every two-dimensional float tensor '*.weight' inside a "
    "numbered block whose name contains none of: embed, norm, head, router, gate.weight, wte, wpe, vision, visual, "
    "audio, projector"
)
_NOT_LINEAR = re.compile(
    r"embed|norm|head|router|(^|\.)gate\.weight|(^|\.)(wte|wpe)\.|vision|visual|audio|projector",
    re.IGNORECASE,
)
_BLOCK = re.compile(r"^(.*?)\.(\d+)\.(.+)$")
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Role(StrEnum):
    """What a stored tensor is."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"
    FOREIGN = "foreign"  # of another tower


@dataclass(frozen=True, slots=True)
class MatchedTensor:
    """One stored tensor with its place in the model.

    Attributes:
        name: canonical name (that of the transformers model); of foreign tensors the stored one.
        stored: name, type and shape in the checkpoint.
        block: index of the decoder block, -1 outside.
        shared: for linear weights the stored module name of the first linear that reads the same activation.
        transposed: a linear weight stored ``[in_features, out_features]``.
    """

    name: str
    stored: StoredTensor
    role: Role
    block: int = -1
    shared: str = ""
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Matched:
    """A checkpoint, understood.

    Attributes:
        architecture: the declarations, or None after the generic rule (then ``dimensions`` is None as well).
        config: the configuration of the text tower.
        tensors: all that are kept, in the order of the checkpoint.
        dropped: tensors left out, each with the pattern that says so.
        tied: the output projection is the embedding.
        tied_twice: it is, and the checkpoint stores it twice: see `resolve_tied`.
        rule: how linears were found, as a sentence for `plan`.
    """

    architecture: Architecture | None
    model_type: str
    config: Mapping[str, Any]
    dimensions: Dimensions | None
    tensors: tuple[MatchedTensor, ...]
    dropped: tuple[tuple[StoredTensor, str], ...] = ()
    tied: bool = False
    tied_twice: bool = False
    rule: str = ""
    by_name: Mapping[str, MatchedTensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def blocks(self) -> int:
        """Number of decoder blocks."""
        return 1 + max((tensor.block for tensor in self.tensors), default=-1)

    def block_name(self, index: int) -> str:
        """Canonical name of a block, e.g. ``model.layers.3``."""
        return f"{self.architecture.blocks if self.architecture else 'block'}.{index}"

    @property
    def foreign(self) -> tuple[MatchedTensor, ...]:
        """Tensors of another tower; their modules belong into the ignore list of a format."""
        return tuple(tensor for tensor in self.tensors if tensor.role is Role.FOREIGN)


def match(config: Mapping[str, Any], entries: Iterable[StoredTensor]) -> Matched:
    """Match the tensors of a checkpoint against its configuration.

    Raises:
        InputError: tensors are missing, left over, stored twice, of a wrong shape or type (all are listed, the first
            ten by name), or the configuration is impossible.
    """
    stored = list(entries)
    _check_stored(stored)
    architecture = architecture_of(config)
    tower = text_config(config)
    if architecture is None:
        return _generic(tower, stored, GENERIC_RULE.format(type=str(config.get("model_type"))))
    required(tower, architecture)
    return _declared(architecture, config, tower, stored)


def needs_architecture(matched: Matched, method: str) -> InputError:
    """The error for a method that needs declarations on a model that has none."""
    known = ", ".join(sorted(set(MODEL_TYPES.values())))
    return InputError(
        f"--method {method} needs to know which linears read the same activation; {matched.rule}",
        f"supported families: {known}; --method rtn works on any decoder",
    )


def resolve_tied(matched: Matched, equal: Callable[[str, str], bool]) -> Matched:
    """Settle a tied head that is stored twice; ``equal`` compares the bytes of two stored tensors by name.

    Raises:
        InputError: they differ, so that the configuration and the tensors contradict each other.
    """
    if not matched.tied_twice or matched.architecture is None:
        return matched
    embedding, head = (
        matched.by_name[f"{name}.weight"]
        for name in (matched.architecture.embedding, matched.architecture.head)
    )
    if embedding.stored.dtype != head.stored.dtype or not equal(
        embedding.stored.name, head.stored.name
    ):
        raise InputError(
            f"{head.stored.name} differs from {embedding.stored.name} although tie_word_embeddings is true",
            'a model with its own head says "tie_word_embeddings": false in config.json',
            tensor=head.stored.name,
        )
    kept = tuple(tensor for tensor in matched.tensors if tensor is not head)
    dropped = (*matched.dropped, (head.stored, "equal to the tied embedding"))
    return _with_names(replace(matched, tensors=kept, dropped=dropped, tied_twice=False))


def _with_names(matched: Matched) -> Matched:
    return replace(matched, by_name={tensor.name: tensor for tensor in matched.tensors})


def _check_stored(stored: list[StoredTensor]) -> None:
    counts = Counter(tensor.name for tensor in stored)
    problems = [f"{name}: stored {count} times" for name, count in counts.items() if count > 1]
    _raise(problems, "every tensor has to be in exactly one file")


def _raise(problems: list[str], hint: str) -> None:
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise InputError(
            f"the checkpoint does not fit its config.json ({len(problems)}): {'; '.join(problems[:10])}{more}",
            hint,
        )


@dataclass(frozen=True, slots=True)
class _Slot:
    """One declared tensor: what a stored one of this name has to be."""

    shape: tuple[int, ...]
    role: Role
    block: int = -1
    linear: str = ""  # canonical name of the first linear of the shared input


def _declared(
    architecture: Architecture,
    config: Mapping[str, Any],
    tower: Mapping[str, Any],
    stored: list[StoredTensor],
) -> Matched:
    dimensions = dimensions_of(tower, architecture.defaults)
    is_tied = tied(tower, config, architecture.defaults)
    slots = _slots(architecture, dimensions, tower)
    found: dict[str, MatchedTensor] = {}
    dropped: list[tuple[StoredTensor, str]] = []
    problems: list[str] = []
    for tensor in stored:
        name = _canonical(tensor.name, architecture, slots)
        pattern = next(
            (text for text in architecture.droppable if re.fullmatch(text, tensor.name)), ""
        )
        if name is None and pattern:
            dropped.append((tensor, pattern))
        elif name is None and matches(architecture.foreign, tensor.name):
            found[tensor.name] = MatchedTensor(tensor.name, tensor, Role.FOREIGN)
        elif name is None:
            problems.append(
                f"{tensor.name}: not a tensor of {architecture.model_type}{_beyond(tensor.name, dimensions)}"
            )
        elif name in found:
            problems.append(f"{tensor.name}: the same tensor as {found[name].stored.name}")
        else:
            slot = slots[name]
            problems += _misfits(tensor, slot)
            found[name] = MatchedTensor(
                name,
                tensor,
                slot.role,
                slot.block,
                slot.linear,
                architecture.transposed and slot.role is Role.LINEAR,
            )
    head = f"{architecture.head}.weight"
    absent_allowed = {head} if is_tied else set()
    problems += [
        f"{name}: missing"
        for name in slots
        if name not in found
        and name not in absent_allowed
        and not matches(architecture.optional, name)
    ]
    _raise(problems, "a complete checkpoint holds every tensor once, and no other")
    return _with_names(
        Matched(
            architecture=architecture,
            model_type=architecture.model_type,
            config=tower,
            dimensions=dimensions,
            tensors=_stored_sharing(tuple(found.values())),
            dropped=tuple(dropped),
            tied=is_tied,
            tied_twice=is_tied and head in found,
            rule=f"linears as declared for {architecture.model_type}",
        )
    )


def _slots(
    architecture: Architecture, dimensions: Dimensions, config: Mapping[str, Any]
) -> dict[str, _Slot]:
    def exists(when: str) -> bool:
        key = when.removeprefix("!")
        return not when or bool(
            config.get(key, architecture.defaults.get(key))
        ) is not when.startswith("!")

    shared = {name: inputs.key for inputs in architecture.inputs for name in inputs.linears}
    special = {
        f"{architecture.embedding}.weight": Role.EMBEDDING,
        f"{architecture.head}.weight": Role.HEAD,
    }
    slots = {
        item.name: _Slot(
            dimensions.shape(item.shape), special.get(item.name) or _role(item.name, shared)
        )
        for item in architecture.outer
        if exists(item.when)
    }
    declared = [
        (item.name, dimensions.shape(item.shape), _role(item.name, shared))
        for item in architecture.block
        if exists(item.when)
    ]
    for index in range(dimensions.layers):
        block = f"{architecture.blocks}.{index}"
        for name, shape, role in declared:
            linear = (
                f"{block}.{shared[name.removesuffix('.weight')]}" if role is Role.LINEAR else ""
            )
            slots[f"{block}.{name}"] = _Slot(shape, role, index, linear)
    return slots


def _role(name: str, linears: Mapping[str, str]) -> Role:
    module, _, kind = name.rpartition(".")
    if module in linears:
        return Role.LINEAR if kind == "weight" else Role.BIAS
    if "embed" in name or module.endswith("wpe"):
        return Role.OTHER
    return Role.NORM


def _canonical(name: str, architecture: Architecture, slots: Mapping[str, _Slot]) -> str | None:
    for prefix, canonical in architecture.prefixes:
        if name.startswith(prefix) and (whole := canonical + name.removeprefix(prefix)) in slots:
            return whole
    return None


def _beyond(name: str, dimensions: Dimensions) -> str:
    found = _BLOCK.match(name)
    if found and int(found[2]) >= dimensions.layers:
        return f" with num_hidden_layers = {dimensions.layers}"
    return ""


def _misfits(tensor: StoredTensor, slot: _Slot) -> list[str]:
    if tensor.shape != slot.shape:
        return [
            f"{tensor.name}: shape {list(tensor.shape)}, the config asks for {list(slot.shape)}"
        ]
    if tensor.dtype not in FLOATS:
        return [f"{tensor.name}: type {tensor.dtype}, not one of {', '.join(sorted(FLOATS))}"]
    return []


def _stored_sharing(tensors: tuple[MatchedTensor, ...]) -> tuple[MatchedTensor, ...]:
    """Name shared inputs by stored modules, which is what plans and files speak of."""
    modules = {
        tensor.name.removesuffix(".weight"): tensor.stored.name.removesuffix(".weight")
        for tensor in tensors
    }
    return tuple(replace(tensor, shared=modules.get(tensor.shared, "")) for tensor in tensors)


def _generic(config: Mapping[str, Any], stored: list[StoredTensor], rule: str) -> Matched:
    tensors = []
    names = {tensor.name for tensor in stored}
    for tensor in stored:
        block = _BLOCK.match(tensor.name)
        role = _generic_role(tensor, block is not None)
        tensors.append(
            MatchedTensor(
                tensor.name,
                tensor,
                role,
                int(block[2]) if block else -1,
                _generic_shared(tensor.name, names) if role is Role.LINEAR else "",
            )
        )
    return _with_names(
        Matched(None, str(config.get("model_type", "")), config, None, tuple(tensors), rule=rule)
    )


def _generic_role(tensor: StoredTensor, in_block: bool) -> Role:
    name = tensor.name
    linear = (
        in_block and name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in FLOATS
    )
    if linear and not _NOT_LINEAR.search(name):
        return Role.LINEAR
    if len(tensor.shape) == 2 and not in_block:
        if "embed" in name or "wte" in name:
            return Role.EMBEDDING
        if "head" in name:
            return Role.HEAD
    if "norm" in name:
        return Role.NORM
    return Role.BIAS if name.endswith(".bias") else Role.OTHER


def _generic_shared(name: str, names: set[str]) -> str:
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    for siblings in _SIBLINGS:
        if leaf in siblings:
            leaf = next(word for word in siblings if f"{parent}.{word}.weight" in names)
    return f"{parent}.{leaf}"
