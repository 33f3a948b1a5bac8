"""A checkpoint without some of its parts: experts of its mixtures, or the heads that predict further tokens.

What is left is an ordinary smaller checkpoint; only headers are read to make the view. Experts that stay are numbered
anew, in their order; routers, their biases and corrections, and stacks of all experts lose the same rows; the
configuration counts what is left. As many go from every layer, because configurations state one number for all of them.
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
from quantforge.files.computed_tensors import KEPT_EXPERTS, Rows, prepared_checkpoint
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry
from quantforge.notation import parse_share

if TYPE_CHECKING:
    from torch import Tensor

# Subjects of `Checkpoint.facts`: what `as_text` says, and how many tensors of how many bytes.
REMOVED_EXPERTS, DROPPED_HEADS = "removed_experts", "dropped_heads"
_EXPERTS = "experts"  # the dimension that counts them
_LAYER = re.compile(r"(\d+): (\d+(?: \d+)*)")
_HINT = "leave --prune-experts out"

Removed = Mapping[int, tuple[int, ...]]  # ascending numbers of experts by the index of the layer


@dataclass(frozen=True, slots=True)
class Pruning:
    """Number of experts to remove from every layer, checked against the number that the router selects.

    Attributes:
        experts: that every layer has.
        groups: equal runs of consecutive experts, of which the router first picks some; 1 where it does not.
        removed: from each group.
        layers: indices of the layers with experts.
    """

    experts: int
    groups: int
    removed: int
    layers: tuple[int, ...]

    def choose(self, saliency: Mapping[int, list[float]]) -> Removed:
        """Return the experts with the least saliency of each group, by layer; of equal ones the later."""
        size = self.experts // self.groups
        found: dict[int, tuple[int, ...]] = {}
        for layer in self.layers:
            least: list[int] = []
            for first in range(0, self.experts, size):
                group = range(first, first + size)
                order = sorted(group, key=lambda number: (saliency[layer][number], -number))
                least += order[: self.removed]
            found[layer] = tuple(sorted(least))
        return found

    def undecided(self) -> Removed:
        """Return the last experts of each group, as placeholders to plan with before the saliency is known."""
        size = self.experts // self.groups
        last = [n for n in range(self.experts) if n % size >= size - self.removed]
        return dict.fromkeys(self.layers, tuple(last))


def pruning_of(source: Checkpoint, asked: str) -> Pruning:
    """Compute how many experts of every layer to remove for a share such as ``25%``, rounded down.

    Raises:
        InputError: ``n_group`` does not divide the number of experts; or as `match`.
        UsageError: no expert would go, or the model has none.
        RefusedError: fewer would stay than a token is sent to, or the model is none that can be shrunk.
    """
    model_layout = _model_layout(source)
    assert model_layout.architecture is not None
    assert model_layout.dimensions is not None
    layers = tuple(index for index, kind in enumerate(model_layout.layers) if kind.stacks)
    if not layers:
        raise UsageError(f"--prune-experts: {model_layout.model_type} has no experts here", _HINT)
    stated = {**model_layout.architecture.defaults, **model_layout.config}
    experts, groups = model_layout.dimensions.family_sizes[_EXPERTS], stated.get("n_group") or 1
    if type(groups) is not int or groups < 1 or experts % groups:
        raise InputError(
            f"n_group = {str(groups)[:40]!r} for {experts} experts", subject="config.json"
        )
    size = experts // groups
    removed = int(parse_share(asked, "prune_experts") * size + 1e-9)
    if not removed:
        of = f"each of {groups} groups of {size}" if groups > 1 else f"{experts}"
        raise UsageError(f"--prune-experts {asked}: that is none of {of} experts", "a larger share")
    family = model_layout.architecture.gguf
    key = family.used_experts_key if family else "num_experts_per_tok"
    used = stated.get(key) or 1
    active = max(_numbers(key, used if isinstance(used, list) else [used]))
    (chosen,) = _numbers("topk_group", [stated.get("topk_group") or groups if groups > 1 else 1])
    if (size - removed) * chosen < active or (groups > 1 and size - removed < 2):
        left = groups * (size - removed)
        would = f"{left} expert{'s' * (left != 1)} would be left"
        raise RefusedError(
            f"--prune-experts {asked}: {would}, and each token is sent to {active} of {chosen * size}",
            "a smaller share",
        )
    return Pruning(experts, groups, removed, layers)


def _numbers(key: str, values: list[Any]) -> list[int]:
    if not all(type(value) is int and value > 0 for value in values):
        raise InputError(
            f"{key} = {str(values)[:40]}", "a number, 1 or more", subject="config.json"
        )
    return values


def fewer_experts(source: Checkpoint, removed: Removed, *, decided: bool = True) -> Checkpoint:
    """Return a source without some experts.

    Args:
        source: a plain model with declarations.
        removed: as many of every layer that has experts.
        decided: whether these are the ones; else nothing may be read of what would change.

    Raises:
        RefusedError: the family is not declared, or its files hold experts in a way that cannot be shrunk.
    """
    model_layout = _model_layout(source)
    assert model_layout.dimensions is not None
    experts = model_layout.dimensions.family_sizes[_EXPERTS]
    computed: dict[str, Rows] = {}
    added: dict[str, TensorEntry] = {}
    left_out: set[str] = set()
    for layer, gone in removed.items():
        kept = tuple(number for number in range(experts) if number not in gone)
        singles, wholes = _parameters(model_layout, layer, model_layout.dimensions)
        for names in singles:
            left_out |= {names[number] for number in range(experts)}
            for new, old in enumerate(kept):
                computed[names[new]] = partial(_rows, names[old], decided)
                added[names[new]] = replace(source.entries[names[old]], name=names[new])
        for name, axis in wholes.items():
            entry = source.entries[name]
            shape = (*entry.shape[:axis], len(kept), *entry.shape[axis + 1 :])
            computed[name] = partial(_chosen, name, axis, kept, decided)
            added[name] = replace(entry, shape=shape)
            left_out.add(name)
    count = experts - len(next(iter(removed.values())))
    chosen = {REMOVED_EXPERTS: as_text(removed)} if decided else {}
    facts = {KEPT_EXPERTS: f"{count} of {experts} in each layer", **chosen}
    return prepared_checkpoint(
        source,
        computed,
        config=_counting(source, model_layout, count),
        added=added,
        left_out=left_out,
        facts=facts,
    )


def as_text(removed: Removed) -> str:
    """Format the removed experts for a manifest: ``0: 3 5, 1: 2 7``."""
    return ", ".join(
        f"{layer}: {' '.join(map(str, gone))}" for layer, gone in sorted(removed.items())
    )


def from_text(text: str) -> Removed:
    """Parse what `as_text` wrote.

    Raises:
        InputError: it is nothing like that.
    """
    found: dict[int, tuple[int, ...]] = {}
    for part in text.split(", "):
        one = _LAYER.fullmatch(part)
        if one is None:
            raise InputError(f"{REMOVED_EXPERTS}: {text[:60]!r}", "the manifest is damaged")
        found[int(one[1])] = tuple(map(int, one[2].split(" ")))
    if len({len(gone) for gone in found.values()}) != 1:
        raise InputError(
            f"{REMOVED_EXPERTS}: not as many in every layer", "the manifest is damaged"
        )
    return found


def _model_layout(source: Checkpoint) -> ModelLayout:
    """Match a source; refuse what cannot be shrunk."""
    model_layout = match_tensors(
        source.config, [entry.header() for entry in source.entries.values()]
    )
    family, why = model_layout.architecture, ""
    if family is None or model_layout.dimensions is None:
        why = "is not declared, so that nothing says which tensors count its experts"
    elif any(".experts." in tensor.name for tensor in model_layout.foreign_tensors):
        why = "holds experts behind its last layer, or in another tower, which no calibration row reaches"
    elif callable(family.sizes.get(_EXPERTS)):
        why = "counts its experts in several keys"
    if why:
        raise RefusedError(f"--prune-experts: {model_layout.model_type} {why}", _HINT)
    return model_layout


def _parameters(
    model_layout: ModelLayout, layer: int, dimensions: Dimensions
) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """Return the stored names of each part of the experts, by number, and the axis of experts in other tensors."""
    assert model_layout.architecture is not None
    kind = next(
        k for k in model_layout.architecture.kinds if k.name == model_layout.layers[layer].name
    )
    block = model_layout.block_name(layer)
    singles: list[tuple[str, ...]] = []
    wholes: dict[str, int] = {}
    for item in kind.parameters:
        if item.each == _EXPERTS:
            names = [
                f"{block}.{item.name.format(n)}" for n in range(dimensions.family_sizes[_EXPERTS])
            ]
            if all(name in model_layout.by_name for name in names):
                singles.append(tuple(model_layout.by_name[name].header.name for name in names))
        elif f"{block}.{item.name}" in model_layout.by_name and _EXPERTS in item.shape:
            axis = item.shape.index(_EXPERTS)
            wholes[model_layout.by_name[f"{block}.{item.name}"].header.name] = axis
    return singles, wholes


def _counting(source: Checkpoint, model_layout: ModelLayout, count: int) -> dict[str, Any]:
    """Return the configuration with another number of experts."""
    assert model_layout.architecture is not None
    keys = model_layout.architecture.sizes[_EXPERTS]
    assert not callable(keys)  # `_model_layout` refuses such a family
    config = deepcopy(source.config)
    nested = config.get("text_config")
    tower = nested if isinstance(nested, dict) else config
    for key in [key for key in keys if tower.get(key) is not None] or keys[:1]:
        tower[key] = count
    return config


def _check(name: str, decided: bool) -> None:
    if not decided:
        raise RuntimeError(f"{name} is read before it is decided which experts stay")


def _rows(name: str, decided: bool, source: Checkpoint, first: int, last: int) -> Tensor:
    _check(name, decided)
    return source.read_rows(name, first, last)


def _chosen(
    name: str,
    axis: int,
    kept: tuple[int, ...],
    decided: bool,
    source: Checkpoint,
    first: int,
    last: int,
) -> Tensor:
    import torch

    _check(name, decided)
    if axis:
        return source.read_rows(name, first, last).index_select(axis, torch.tensor(kept))
    return torch.cat([source.read_rows(name, row, row + 1) for row in kept[first:last]])


def fewer_heads(source: Checkpoint) -> Checkpoint:
    """Return a source without its heads for multi-token prediction.

    Raises:
        UsageError: it has none.
    """
    stored = [entry.header() for entry in source.entries.values()]
    heads = match_tensors(source.config, stored, source.declared).draft_head_tensors
    if not heads:
        raise UsageError("--mtp drop: no tensor here predicts further tokens", "leave --mtp out")
    size = sum(tensor.header.nbytes for tensor in heads)
    return prepared_checkpoint(
        source,
        {},
        config=without_draft_heads(source.config),
        left_out={tensor.header.name for tensor in heads},
        facts={DROPPED_HEADS: f"{len(heads)} tensors that predict further tokens, {size:,} bytes"},
    )
