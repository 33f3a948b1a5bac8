"""Towers: which numbered list of modules in a checkpoint is the decoder's blocks, told by structure.

A multimodal checkpoint holds several lists (``model.visual.blocks.0``, ``qformer.encoder.layer.0``,
``model.language_model.layers.0``). Names do not say which one is the decoder: mergers, aligners and encoders are called
anything. Its list has as many entries as its configuration counts layers, and the most weights. All other lists, and
what lies beside them outside of the decoder, belong to other towers and stay as they are. In a checkpoint of text alone
every list of blocks is the decoder's; a list of single matrices is not a list of blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.plans import StoredTensor

BLOCK = re.compile(r"^(.*?)\.(\d+)\.(.+)$")
NAMES = re.compile(r"vision|visual|audio|projector|vq_?model", re.IGNORECASE)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DEPTHS = frozenset({*LAYERS, "depth", "depths", "layers", "encoder_layers"})


@dataclass(slots=True)
class _List:
    """A numbered list of modules: its entries, the modules in them, and its weights."""

    entries: set[int] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    weights: int = 0


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of a checkpoint.

    Attributes:
        blocks: prefixes of the decoder's lists, e.g. ``model.language_model.layers``.
        towers: beginnings of the names of all that is of other towers.
    """

    blocks: frozenset[str]
    towers: tuple[str, ...]

    def block(self, name: str) -> int:
        """Return the number of the decoder block that a stored tensor is of, -1 if of none."""
        found = BLOCK.match(name)
        return int(found[2]) if found and found[1] in self.blocks else -1

    def elsewhere(self, name: str) -> bool:
        """Return whether a stored tensor is of another tower."""
        return name.startswith(self.towers) or NAMES.search(name) is not None


def lists_of(
    config: Mapping[str, Any], text: Mapping[str, Any], stored: Iterable[StoredTensor]
) -> Lists:
    """Tell the decoder's lists from those of other towers.

    Args:
        config: of the whole checkpoint.
        text: of its decoder, the same object where there is nothing else.
        stored: all tensors.
    """
    found: dict[str, _List] = {}
    for tensor in stored:
        if block := BLOCK.match(tensor.name):
            item = found.setdefault(block[1], _List())
            item.entries.add(int(block[2]))
            item.modules.add(block[3].rpartition(".")[0])
            item.weights += math.prod(tensor.shape)
    found = {prefix: item for prefix, item in found.items() if item.modules != {""}}
    own = {prefix: item for prefix, item in found.items() if not NAMES.search(prefix)}
    if not own or not has_towers(config):
        return Lists(frozenset(own), ())
    layers = next((text[key] for key in LAYERS if key in text), 0)
    counted = {prefix for prefix, item in own.items() if len(item.entries) == layers}
    decoder = max(counted or own, key=lambda prefix: (own[prefix].weights, prefix))
    towers = {_root(prefix, decoder) for prefix in found if prefix != decoder}
    return Lists(frozenset({decoder}), tuple(sorted(towers)))


def has_towers(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration describes another tower: a nested one with a depth of its own."""
    return any(
        isinstance(value, Mapping) and (not _DEPTHS.isdisjoint(value) or has_towers(value))
        for key, value in config.items()
        if key not in {"text_config", "quantization_config"}
    )


def _root(prefix: str, decoder: str) -> str:
    """Return the shortest beginning of a list's name that the decoder's name does not share, with its dot."""
    parts, other = prefix.split("."), decoder.split(".")
    pairs = enumerate(zip(parts, other, strict=False))
    shared = next((place for place, (own, its) in pairs if own != its), len(other))
    return ".".join(parts[: shared + 1]) + "."
