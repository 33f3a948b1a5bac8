"""Every tensor of a checkpoint, matched to what its architecture declares: exactly once, or refused.

Loaders fill a missing tensor with random numbers and ignore one too many; a quantizer that trusted them would publish
random layers. Here the stored tensors are partitioned into declared ones (by prefix rules, with their expected shape),
foreign ones (another tower, kept as it is) and dropped ones (by a declared pattern). Whatever remains is an error, and
all of them are listed before any work. Only headers are read.

A model whose family is not declared can still be rounded plainly: see `quantforge.architectures.generic`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Architecture, architecture_of, text_config
from quantforge.architectures.architecture import matches
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.draft_heads import match_draft
from quantforge.architectures.draft_kinds import is_draft
from quantforge.architectures.generic import match_by_names
from quantforge.architectures.heads import head_tensors
from quantforge.architectures.matched import Declared, Matched, MatchedTensor, Role, holds_codes
from quantforge.architectures.slots import Slots
from quantforge.architectures.tied_embeddings import SAME, no_tie, tied
from quantforge.architectures.towers import BLOCK
from quantforge.architectures.value_rules import check_values
from quantforge.errors import InputError
from quantforge.plans import StoredTensor

__all__ = [
    "MEASURED",
    "Matched",
    "MatchedTensor",
    "Role",
    "declared",
    "match",
    "needs_architecture",
    "resolve_tied",
]

MEASURED = "with measured inputs or a measured KV cache"  # what needs declarations beside methods


def match(
    config: Mapping[str, Any],
    entries: Iterable[StoredTensor],
    found: Declared | None = None,
) -> Matched:
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
    _check_stored(stored := [*entries])
    if is_draft(config):
        _check_codes(stored)
        return match_draft(config, stored)
    architecture = found.architecture if found else architecture_of(config)
    if architecture is not None:
        architecture = architecture.as_held(tensor.name for tensor in stored)
    tower = text_config(config)
    check_values(tower, declared=architecture is not None and not found)
    if architecture is None:
        _check_codes(stored)
        return match_by_names(
            tower, stored, f"model_type {config.get('model_type')!r} is not declared", config
        )
    try:
        architecture.require(tower)
    except InputError as refused:
        _check_codes(stored)
        return match_by_names(tower, stored, refused.message, config)
    return _declared(
        architecture.configured(tower), config, tower, stored, found.names if found else {}
    )


def needs_architecture(matched: Matched, method: str, reason: str = "") -> InputError:
    """Return the error for a method that needs declarations on a model that has none.

    Args:
        matched: the model.
        method: what needs them.
        reason: why none could be derived.
    """
    asked = f"rounding {method}" if " " in method else f"--method {method}"
    plain = "--method rtn works on any decoder"
    hint = "dynamic inputs, and no --kv-cache, measure nothing" if method == MEASURED else plain
    if matched.draft:
        return InputError(
            f"{asked}: {matched.draft} heads alone read no text, so that nothing of theirs is observed",
            hint.replace("any decoder", "weights alone"),
        )
    tried = f", and its declarations could not be derived: {reason}" if reason else ""
    return InputError(
        f"{asked} needs to know which linears read the same activation; model_type"
        f" {matched.model_type!r} is not declared{tried}",
        hint,
    )


def declared(
    matched: Matched, method: str = "with calibration data"
) -> tuple[Architecture, Dimensions]:
    """Return the declarations and sizes of a model; raise InputError, naming ``method``, where it has none."""
    if matched.architecture is None or matched.dimensions is None:
        raise needs_architecture(matched, method)
    return matched.architecture, matched.dimensions


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
        raise no_tie(embedding.stored.name, head.stored.name)
    kept = tuple(tensor for tensor in matched.tensors if tensor is not head)
    dropped = (*matched.dropped, (head.stored, SAME))
    return replace(matched, tensors=kept, dropped=dropped, tied_twice=False)


def _check_stored(stored: list[StoredTensor]) -> None:
    counts = Counter(tensor.name for tensor in stored)
    problems = [f"{name}: stored {count} times" for name, count in counts.items() if count > 1]
    _raise(problems, "every tensor has to be in exactly one file")


def _check_codes(stored: list[StoredTensor]) -> None:
    """Refuse packed tensors that no format has read, where no declaration says what each tensor has to be."""
    problems = [_code(tensor) for tensor in stored if holds_codes(tensor)]
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
    stored: list[StoredTensor],
    names: Mapping[str, str],
) -> Matched:
    dimensions = architecture.dimensions(tower)
    if dimensions.layers > len(stored):
        raise InputError(
            f"config.json: num_hidden_layers = {dimensions.layers}, but the checkpoint holds {len(stored)} tensors",
            "configuration and weights are not of one model",
        )
    derived = architecture.derived
    is_tied = derived.tied if derived else tied(tower, config, architecture.defaults)
    slots = Slots(architecture, dimensions, tower, names)
    heads = head_tensors(tower, dimensions.layers, stored)
    found, dropped, problems = _partition(architecture, slots, stored, heads)
    head = f"{architecture.head}.weight"
    problems += [
        f"{name}: missing"
        for name in slots.missing(found)
        if not (is_tied and slots.by_name[name].name == head)
    ]
    problems += slots.twice(found)
    _raise(problems, "a complete checkpoint holds every tensor once, and no other")
    return Matched(
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
    slots: Slots,
    stored: Iterable[StoredTensor],
    heads: Mapping[str, MatchedTensor],
) -> tuple[dict[str, MatchedTensor], tuple[tuple[StoredTensor, str], ...], list[str]]:
    """Return the tensors that have a place by canonical name, those that are dropped with the reason, and problems."""
    found: dict[str, MatchedTensor] = {}
    dropped: list[tuple[StoredTensor, str]] = []
    problems: list[str] = []
    for tensor in stored:
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
            problems.append(f"{tensor.name}: the same tensor as {found[slot.name].stored.name}")
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
    """Rename shared inputs to stored modules: plans and files speak of those."""
    modules = {
        tensor.name.removesuffix(".weight"): tensor.stored.name.removesuffix(".weight")
        for tensor in tensors
    }
    stored = [modules.get(tensor.shared, "") for tensor in tensors]
    pairs = zip(tensors, stored, strict=True)
    return tuple(one if one.shared == name else replace(one, shared=name) for one, name in pairs)
