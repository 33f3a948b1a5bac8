"""Experts of a checkpoint, checked as sets: as many as there should be, each of the same parts, of one type.

Declarations say which tensors a family has. A family without them is matched by names, and there a missing expert would
go unnoticed: loaders number what they find. So whatever the family, experts that are stored one by one are numbered
without a gap, their count is one that the configuration states, each has the parts that the others have, one part is
of one type in all of them, and the router beside them has a row for each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from quantforge.architectures.draft_heads import layers_of
from quantforge.architectures.routers import counts_experts, experts_of, is_named_router
from quantforge.errors import InputError
from quantforge.plans import StoredTensor

_EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(.+)$")
_PARTS = frozenset({"moe_intermediate_size"})  # of which there may be one for each part
_SHARED = re.compile(r"n(um)?_shared_experts")
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")


def has_single_experts(names: Iterable[str]) -> bool:
    """Return whether any stored tensor is the matrix of one expert."""
    return any(map(_EXPERT.match, names))


def check_experts(config: Mapping[str, Any], stored: Iterable[StoredTensor]) -> None:
    """Refuse an incomplete or inconsistent set of experts, and lists of layer kinds that are too short.

    Args:
        config: of the decoder.
        stored: all tensors of a source.

    Raises:
        InputError: naming the first ten problems.
    """
    problems = [*_of_kinds(config), *_of_experts(config, list(stored))]
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise InputError(
            f"the checkpoint does not fit its config.json ({len(problems)}): {'; '.join(problems[:10])}{more}",
            "a complete checkpoint holds every expert once, all in one type, and says the kind of every layer",
        )


def _of_experts(config: Mapping[str, Any], stored: list[StoredTensor]) -> list[str]:
    sets: dict[str, dict[int, dict[str, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    for tensor in stored:
        if found := _EXPERT.match(tensor.name):
            sets[found[1]][int(found[2])][found[3]] = tensor
    problems: list[str] = []
    stated = _counts(config)
    routed = min(experts_of(config), default=0) if _idle(config) else 0
    for prefix, experts in sets.items():
        problems += _of_set(prefix, experts, stated, routed)
    counts = {name: len(found) for name, found in sets.items()}
    return problems or _of_routers(config, stored, counts)


def _of_kinds(config: Mapping[str, Any]) -> list[str]:
    layers = layers_of(config)
    problems = []
    for key in _KINDS:
        kinds = config.get(key)
        if not isinstance(kinds, list) or (key == "no_rope_layers" and not kinds):
            continue  # flags may be empty: the period counts then
        if len(kinds) < layers:
            problems.append(f"{key} names {len(kinds)} layers of {layers}")
    return problems


def _counts(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the numbers of experts that a list of experts may have, sums over several groups included.

    A configuration states a number for each part, or one number and the widths of each (text and pictures).
    """
    lists = {
        key: value
        for key, value in config.items()
        if isinstance(value, list) and value and all(type(item) is int for item in value)
    }
    sums = {sum(value) for key, value in lists.items() if counts_experts(key)}
    found = experts_of(config)
    found |= {count * len(lists[key]) for count in found for key in _PARTS & lists.keys()}
    found |= {count + more for count in found for more in _idle(config)}
    return found | {total for total in sums if any(total % count == 0 for count in found)}


def _idle(config: Mapping[str, Any]) -> set[int]:
    """Return the numbers of zero-computation experts, for which routers have rows too."""
    return {value for key, value in config.items() if "zero_expert" in key and type(value) is int}


def _scored(config: Mapping[str, Any]) -> set[int]:
    """Return the numbers of shared experts if the router scores them too."""
    if config.get("shared_expert_sink") is not True:
        return set()
    return {value for key, value in config.items() if _SHARED.fullmatch(key) and type(value) is int}


def _of_set(
    prefix: str,
    experts: Mapping[int, Mapping[str, StoredTensor]],
    stated: frozenset[int],
    routed: int,
) -> list[str]:
    count = len(experts)
    expected = count
    if stated and count not in stated:
        expected = min((number for number in stated if number > count), default=0)
    if expected == 0:
        return [f"{prefix}: {count} experts, the config counts {_listed(stated)}"]
    missing = sorted(set(range(max(expected, max(experts) + 1))) - experts.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return [f"{prefix}.{missing[0]}: missing{more}"]
    if routed:  # those after them do nothing, and have what their class happens to store
        experts = {number: expert for number, expert in experts.items() if number < routed}
    parts = {part for expert in experts.values() for part in expert}
    problems = [
        f"{prefix}.{number}.{part}: missing"
        for number, expert in sorted(experts.items())
        for part in sorted(parts - expert.keys())
    ]
    for part in sorted(parts):
        types = {number: expert[part].dtype for number, expert in experts.items() if part in expert}
        if len(set(types.values())) > 1:
            first = types[min(types)]
            other = min(number for number, dtype in types.items() if dtype != first)
            problems.append(f"{prefix}.{other}.{part}: {types[other]}, where others are {first}")
    return problems


def _of_routers(
    config: Mapping[str, Any], stored: Iterable[StoredTensor], counts: Mapping[str, int]
) -> list[str]:
    """Return a problem for every router whose number of rows differs from the number of experts."""
    idle = _idle(config) | _scored(config)
    counted = _counts(config)
    parents = {name.rpartition(".")[0]: count for name, count in counts.items()}
    problems = []
    for tensor in stored:
        if len(tensor.shape) != 2 or _EXPERT.match(tensor.name) or not is_named_router(tensor.name):
            continue
        parent = next((p for p in _beginnings(tensor.name) if p in parents), None)
        if parent is None:
            continue
        count = parents[parent]
        turned = tensor.shape[1] in counted  # some files hold a column for each
        if not turned and tensor.shape[0] not in {1, count, *(count + number for number in idle)}:
            problems.append(f"{tensor.name}: {tensor.shape[0]} rows for {count} experts")
    return problems


def _beginnings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _listed(numbers: Iterable[int]) -> str:
    return " or ".join(str(number) for number in sorted(numbers))
