"""Remove experts of MoE layers, or the heads for multi-token prediction, from a checkpoint.

The result is an ordinary smaller checkpoint; making the view reads only headers. The remaining experts are renumbered
in their order; routers, their biases and corrections, and stacks of all experts lose the same rows; the configuration
gets the new number. The same number is removed from every layer, because configurations have one number for all of
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.draft_heads import without_draft_heads
from quantforge.architectures.match import ModelLayout, match_tensors
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.files.computed_tensors import KEPT_EXPERTS, ComputeRows, with_computed_tensors
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry
from quantforge.notation import parse_share

if TYPE_CHECKING:
    from torch import Tensor

# Subjects of `Checkpoint.source_notes`: what `format_removed` says, and how many tensors of how many bytes.
REMOVED_EXPERTS, DROPPED_HEADS = "removed_experts", "dropped_heads"
_EXPERTS = "experts"  # the dimension that counts them
_LAYER = re.compile(r"(\d+): (\d+(?: \d+)*)")
_HINT = "leave --prune-experts out"

# Ascending numbers of experts by the index of the layer
RemovedExperts = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ExpertPruning:
    """The number of experts to remove from every layer, checked against the number that the router selects.

    Attributes:
        num_experts: experts of every layer.
        num_groups: equal runs of consecutive experts among which the router selects first; 1 if it does not.
        removed_per_group: experts to remove from each group.
        layers: indices of the layers with experts.
    """

    num_experts: int
    num_groups: int
    removed_per_group: int
    layers: tuple[int, ...]

    def choose_experts(self, saliency: Mapping[int, list[float]]) -> RemovedExperts:
        """Return the experts with the least saliency of each group, by layer; among equal ones the later."""
        size = self.num_experts // self.num_groups
        removed_by_layer: dict[int, tuple[int, ...]] = {}
        for layer in self.layers:
            least_salient: list[int] = []
            for first in range(0, self.num_experts, size):
                group = range(first, first + size)
                order = sorted(group, key=lambda number: (saliency[layer][number], -number))
                least_salient += order[: self.removed_per_group]
            removed_by_layer[layer] = tuple(sorted(least_salient))
        return removed_by_layer

    def placeholder(self) -> RemovedExperts:
        """Return the last experts of each group, to plan with before the saliency is known."""
        size = self.num_experts // self.num_groups
        last_experts = [
            n for n in range(self.num_experts) if n % size >= size - self.removed_per_group
        ]
        return dict.fromkeys(self.layers, tuple(last_experts))


def plan_pruning(source: Checkpoint, share: str) -> ExpertPruning:
    """Compute how many experts of every layer to remove for a share such as ``25%``, rounded down.

    Raises:
        InputError: ``n_group`` does not divide the number of experts; or as `match_tensors`.
        UsageError: no expert would be removed, or the model has none.
        RefusedError: fewer would remain than are active per token, or the model cannot be pruned.
    """
    model_layout = _model_layout(source)
    assert model_layout.architecture is not None
    assert model_layout.dimensions is not None
    layers = tuple(index for index, kind in enumerate(model_layout.layers) if kind.stacks)
    if not layers:
        raise UsageError(f"--prune-experts: {model_layout.model_type} has no experts here", _HINT)
    settings = {**model_layout.architecture.defaults, **model_layout.config}
    experts, groups = model_layout.dimensions.family_sizes[_EXPERTS], settings.get("n_group") or 1
    if type(groups) is not int or groups < 1 or experts % groups:
        raise InputError(
            f"n_group = {str(groups)[:40]!r} for {experts} experts", subject="config.json"
        )
    size = experts // groups
    num_removed = int(parse_share(share, "prune_experts") * size + 1e-9)
    if not num_removed:
        described = f"each of {groups} groups of {size}" if groups > 1 else f"{experts}"
        raise UsageError(
            f"--prune-experts {share}: that is none of {described} experts", "a larger share"
        )
    family = model_layout.architecture.gguf
    key = family.used_experts_key if family else "num_experts_per_tok"
    active_setting = settings.get(key) or 1
    active = max(
        _check_counts(key, active_setting if isinstance(active_setting, list) else [active_setting])
    )
    (chosen_groups,) = _check_counts(
        "topk_group", [settings.get("topk_group") or groups if groups > 1 else 1]
    )
    if (size - num_removed) * chosen_groups < active or (groups > 1 and size - num_removed < 2):
        num_left = groups * (size - num_removed)
        message = f"{num_left} expert{'s' * (num_left != 1)} would be left"
        raise RefusedError(
            f"--prune-experts {share}: {message}, and each token is sent to {active} of {chosen_groups * size}",
            "a smaller share",
        )
    return ExpertPruning(experts, groups, num_removed, layers)


def _check_counts(key: str, values: list[Any]) -> list[int]:
    if not all(type(value) is int and value > 0 for value in values):
        raise InputError(
            f"{key} = {str(values)[:40]}", "a number, 1 or more", subject="config.json"
        )
    return values


def remove_experts(
    source: Checkpoint, removed: RemovedExperts, *, is_decided: bool = True
) -> Checkpoint:
    """Return a view of a source without some experts.

    Args:
        source: an unquantized model with declarations.
        removed: the experts to remove; equally many in every layer that has experts.
        is_decided: False for placeholders: then reading a tensor that depends on the choice is an error.

    Raises:
        RefusedError: the family is not declared, or its files store experts in a way that cannot be pruned.
    """
    model_layout = _model_layout(source)
    assert model_layout.dimensions is not None
    experts = model_layout.dimensions.family_sizes[_EXPERTS]
    computed_tensors: dict[str, ComputeRows] = {}
    new_entries: dict[str, TensorEntry] = {}
    removed_names: set[str] = set()
    for layer, layer_removed in removed.items():
        kept_experts = tuple(number for number in range(experts) if number not in layer_removed)
        per_expert_names, stacked_axes = _expert_tensors(
            model_layout, layer, model_layout.dimensions
        )
        for names in per_expert_names:
            removed_names |= {names[number] for number in range(experts)}
            for new_number, old_number in enumerate(kept_experts):
                computed_tensors[names[new_number]] = partial(
                    _read_rows, names[old_number], is_decided
                )
                new_entries[names[new_number]] = replace(
                    source.entries[names[old_number]], name=names[new_number]
                )
        for name, axis in stacked_axes.items():
            entry = source.entries[name]
            shape = (*entry.shape[:axis], len(kept_experts), *entry.shape[axis + 1 :])
            computed_tensors[name] = partial(
                _read_kept_experts, name, axis, kept_experts, is_decided
            )
            new_entries[name] = replace(entry, shape=shape)
            removed_names.add(name)
    num_kept = experts - len(next(iter(removed.values())))
    decided_facts = {REMOVED_EXPERTS: format_removed(removed)} if is_decided else {}
    facts = {KEPT_EXPERTS: f"{num_kept} of {experts} in each layer", **decided_facts}
    return with_computed_tensors(
        source,
        computed_tensors,
        config=_config_with_expert_count(source, model_layout, num_kept),
        new_entries=new_entries,
        removed=removed_names,
        source_notes=facts,
    )


def format_removed(removed: RemovedExperts) -> str:
    """Format the removed experts for a manifest: ``0: 3 5, 1: 2 7``."""
    return ", ".join(
        f"{layer}: {' '.join(map(str, experts))}" for layer, experts in sorted(removed.items())
    )


def parse_removed(text: str) -> RemovedExperts:
    """Parse the text that `format_removed` returns.

    Raises:
        InputError: it is not such a text.
    """
    removed_by_layer: dict[int, tuple[int, ...]] = {}
    for layer_text in text.split(", "):
        match = _LAYER.fullmatch(layer_text)
        if match is None:
            raise InputError(f"{REMOVED_EXPERTS}: {text[:60]!r}", "the manifest is damaged")
        removed_by_layer[int(match[1])] = tuple(map(int, match[2].split(" ")))
    if len({len(experts) for experts in removed_by_layer.values()}) != 1:
        raise InputError(
            f"{REMOVED_EXPERTS}: not as many in every layer", "the manifest is damaged"
        )
    return removed_by_layer


def _model_layout(source: Checkpoint) -> ModelLayout:
    """Match a source with its declarations; refuse one that cannot be pruned."""
    model_layout = match_tensors(
        source.config, [entry.to_stored_tensor() for entry in source.entries.values()]
    )
    family, reason = model_layout.architecture, ""
    if family is None or model_layout.dimensions is None:
        reason = "is not declared, so that nothing says which tensors count its experts"
    elif any(".experts." in tensor.name for tensor in model_layout.foreign_tensors):
        reason = "holds experts behind its last layer, or in another tower, which no calibration row reaches"
    elif callable(family.sizes.get(_EXPERTS)):
        reason = "counts its experts in several keys"
    if reason:
        raise RefusedError(f"--prune-experts: {model_layout.model_type} {reason}", _HINT)
    return model_layout


def _expert_tensors(
    model_layout: ModelLayout, layer: int, dimensions: Dimensions
) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """Return the stored names of each part of the experts, by number, and the expert axis of stacked tensors."""
    assert model_layout.architecture is not None
    kind = next(
        k for k in model_layout.architecture.kinds if k.name == model_layout.layers[layer].name
    )
    block = model_layout.block_name(layer)
    per_expert_names: list[tuple[str, ...]] = []
    stacked_axes: dict[str, int] = {}
    for item in kind.parameters:
        if item.repeated_over == _EXPERTS:
            names = [
                f"{block}.{item.name.format(n)}" for n in range(dimensions.family_sizes[_EXPERTS])
            ]
            if all(name in model_layout.by_name for name in names):
                per_expert_names.append(
                    tuple(model_layout.by_name[name].header.name for name in names)
                )
        elif f"{block}.{item.name}" in model_layout.by_name and _EXPERTS in item.shape:
            axis = item.shape.index(_EXPERTS)
            stacked_axes[model_layout.by_name[f"{block}.{item.name}"].header.name] = axis
    return per_expert_names, stacked_axes


def _config_with_expert_count(
    source: Checkpoint, model_layout: ModelLayout, num_experts: int
) -> dict[str, Any]:
    """Return the configuration with another number of experts."""
    assert model_layout.architecture is not None
    keys = model_layout.architecture.sizes[_EXPERTS]
    assert not callable(keys)  # `_model_layout` refuses such a family
    config = deepcopy(source.config)
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, dict) else config
    for key in [key for key in keys if text_config.get(key) is not None] or keys[:1]:
        text_config[key] = num_experts
    return config


def _check_decided(name: str, is_decided: bool) -> None:
    if not is_decided:
        raise RuntimeError(f"{name} is read before it is decided which experts stay")


def _read_rows(name: str, is_decided: bool, source: Checkpoint, first: int, last: int) -> Tensor:
    _check_decided(name, is_decided)
    return source.read_rows(name, first, last)


def _read_kept_experts(
    name: str,
    axis: int,
    kept_experts: tuple[int, ...],
    is_decided: bool,
    source: Checkpoint,
    first: int,
    last: int,
) -> Tensor:
    import torch

    _check_decided(name, is_decided)
    if axis:
        return source.read_rows(name, first, last).index_select(axis, torch.tensor(kept_experts))
    return torch.cat([source.read_rows(name, row, row + 1) for row in kept_experts[first:last]])


def remove_draft_heads(source: Checkpoint) -> Checkpoint:
    """Return a view of a source without its heads for multi-token prediction.

    Raises:
        UsageError: it has none.
    """
    stored = [entry.to_stored_tensor() for entry in source.entries.values()]
    heads = match_tensors(source.config, stored, source.derived_declarations).draft_head_tensors
    if not heads:
        raise UsageError("--mtp drop: no tensor here predicts further tokens", "leave --mtp out")
    num_bytes = sum(tensor.header.nbytes for tensor in heads)
    return with_computed_tensors(
        source,
        {},
        config=without_draft_heads(source.config),
        removed={tensor.header.name for tensor in heads},
        source_notes={
            DROPPED_HEADS: f"{len(heads)} tensors that predict further tokens, {num_bytes:,} bytes"
        },
    )
