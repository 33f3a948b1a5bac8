"""Check that the experts stored in a checkpoint are complete and consistent.

Declarations list the tensors of a family. A family without them is matched by names, where a missing expert would go
unnoticed, because loaders number the experts that they find. So for any family, experts stored one by one must be
numbered without a gap, their count must be one that the configuration declares, every expert must have the same
tensors, each tensor must have the same dtype in all of them, and the router must have a row for each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from quantforge.architectures.draft_heads import layer_count
from quantforge.architectures.routers import expert_counts, is_expert_count_key, is_named_router
from quantforge.errors import InputError
from quantforge.plans import StoredTensor

_EXPERT_NAME = re.compile(r"^(.*\bexperts)\.(\d+)\.(.+)$")
# May be a list, with one value per group of experts
_PER_PART_KEYS = frozenset({"moe_intermediate_size"})
_SHARED_COUNT = re.compile(r"n(um)?_shared_experts")
_LAYER_LIST_KEYS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")


def has_single_experts(names: Iterable[str]) -> bool:
    """Return whether any stored tensor is the matrix of one expert."""
    return any(map(_EXPERT_NAME.match, names))


def check_experts(config: Mapping[str, Any], stored: Iterable[StoredTensor]) -> None:
    """Refuse an incomplete or inconsistent set of experts, and lists of layer kinds that are too short.

    Args:
        config: configuration of the decoder.
        stored: headers of all tensors of a source.

    Raises:
        InputError: naming the first ten problems.
    """
    problems = [*_layer_list_problems(config), *_expert_problems(config, list(stored))]
    if problems:
        more_suffix = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise InputError(
            f"the checkpoint does not fit its config.json ({len(problems)}): {'; '.join(problems[:10])}{more_suffix}",
            "a complete checkpoint holds every expert once, all in one type, and says the kind of every layer",
        )


def _expert_problems(config: Mapping[str, Any], stored: list[StoredTensor]) -> list[str]:
    sets: dict[str, dict[int, dict[str, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    for tensor in stored:
        if match := _EXPERT_NAME.match(tensor.name):
            sets[match[1]][int(match[2])][match[3]] = tensor
    problems: list[str] = []
    allowed_counts = _allowed_counts(config)
    routed_experts = min(expert_counts(config), default=0) if _zero_expert_counts(config) else 0
    for prefix, experts in sets.items():
        problems += _set_problems(prefix, experts, allowed_counts, routed_experts)
    counts = {name: len(experts) for name, experts in sets.items()}
    return problems or _router_problems(config, stored, counts)


def _layer_list_problems(config: Mapping[str, Any]) -> list[str]:
    layers = layer_count(config)
    problems = []
    for key in _LAYER_LIST_KEYS:
        values = config.get(key)
        if not isinstance(values, list) or (key == "no_rope_layers" and not values):
            continue  # flags may be empty: the period counts then
        if len(values) < layers:
            problems.append(f"{key} names {len(values)} layers of {layers}")
    return problems


def _allowed_counts(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the numbers of experts that a list of experts may have, including sums over several groups.

    A configuration declares one number per group, or one number and the width of each group (text and images).
    """
    count_lists = {
        key: value
        for key, value in config.items()
        if isinstance(value, list) and value and all(type(item) is int for item in value)
    }
    sums = {sum(value) for key, value in count_lists.items() if is_expert_count_key(key)}
    counts = expert_counts(config)
    counts |= {
        count * len(count_lists[key])
        for count in counts
        for key in _PER_PART_KEYS & count_lists.keys()
    }
    counts |= {count + zero_count for count in counts for zero_count in _zero_expert_counts(config)}
    return counts | {total for total in sums if any(total % count == 0 for count in counts)}


def _zero_expert_counts(config: Mapping[str, Any]) -> set[int]:
    """Return the numbers of zero-computation experts, for which routers also have rows."""
    return {value for key, value in config.items() if "zero_expert" in key and type(value) is int}


def _scored_shared_counts(config: Mapping[str, Any]) -> set[int]:
    """Return the numbers of shared experts if the router also scores them."""
    if config.get("shared_expert_sink") is not True:
        return set()
    return {
        value
        for key, value in config.items()
        if _SHARED_COUNT.fullmatch(key) and type(value) is int
    }


def _set_problems(
    module: str,
    experts: Mapping[int, Mapping[str, StoredTensor]],
    allowed_counts: frozenset[int],
    routed_experts: int,
) -> list[str]:
    count = len(experts)
    expected = count
    if allowed_counts and count not in allowed_counts:
        expected = min((number for number in allowed_counts if number > count), default=0)
    if expected == 0:
        return [f"{module}: {count} experts, the config counts {_join_numbers(allowed_counts)}"]
    # Counted, not listed: a damaged configuration may declare billions of experts.
    total = max(expected, max(experts) + 1)
    if num_missing := total - count:
        first_missing = next(number for number in range(total) if number not in experts)
        more_suffix = f" and {num_missing - 1} more" if num_missing > 1 else ""
        return [f"{module}.{first_missing}: missing{more_suffix}"]
    if routed_experts:  # zero-computation experts follow; what they store is not checked
        experts = {number: expert for number, expert in experts.items() if number < routed_experts}
    tensor_names = {tensor_name for expert in experts.values() for tensor_name in expert}
    problems = [
        f"{module}.{number}.{tensor_name}: missing"
        for number, expert in sorted(experts.items())
        for tensor_name in sorted(tensor_names - expert.keys())
    ]
    for tensor_name in sorted(tensor_names):
        types = {
            number: expert[tensor_name].dtype
            for number, expert in experts.items()
            if tensor_name in expert
        }
        if len(set(types.values())) > 1:
            first = types[min(types)]
            other = min(number for number, dtype in types.items() if dtype != first)
            problems.append(
                f"{module}.{other}.{tensor_name}: {types[other]}, where others are {first}"
            )
    return problems


def _router_problems(
    config: Mapping[str, Any], stored: Iterable[StoredTensor], counts: Mapping[str, int]
) -> list[str]:
    """Return a problem for every router whose number of rows differs from the number of experts."""
    extra_rows = _zero_expert_counts(config) | _scored_shared_counts(config)
    allowed_counts = _allowed_counts(config)
    parents = {name.rpartition(".")[0]: count for name, count in counts.items()}
    problems = []
    for tensor in stored:
        if (
            len(tensor.shape) != 2
            or _EXPERT_NAME.match(tensor.name)
            or not is_named_router(tensor.name)
        ):
            continue
        parent = next((p for p in _parent_names(tensor.name) if p in parents), None)
        if parent is None:
            continue
        count = parents[parent]
        is_transposed = tensor.shape[1] in allowed_counts  # some files have a column per expert
        if not is_transposed and tensor.shape[0] not in {
            1,
            count,
            *(count + number for number in extra_rows),
        }:
            problems.append(f"{tensor.name}: {tensor.shape[0]} rows for {count} experts")
    return problems


def _parent_names(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _join_numbers(numbers: Iterable[int]) -> str:
    return " or ".join(str(number) for number in sorted(numbers))
