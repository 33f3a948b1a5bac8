"""Find which numbered list of modules in a checkpoint holds the decoder's blocks, by its structure.

A multimodal checkpoint contains several lists (``model.visual.blocks.0``, ``qformer.encoder.layer.0``,
``model.language_model.layers.0``), and their names do not show which one is the decoder. Its list has as many entries
as its configuration declares layers, and the most weights. All other lists, and the tensors next to them outside of the
decoder, belong to other towers and are kept unchanged. In a text-only checkpoint every list of blocks is the decoder's;
a list of single matrices is not a list of blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.plans import StoredTensor

NUMBERED_NAME = re.compile(r"^(.*?)\.(\d+)\.(.+)$")
TOWER_WORDS = re.compile(r"vision|visual|audio|projector|vq_?model", re.IGNORECASE)
LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DEPTH_KEYS = frozenset({*LAYER_COUNT_KEYS, "depth", "depths", "layers", "encoder_layers"})


@dataclass(slots=True)
class _ModuleList:
    """A numbered list of modules: its indices, the module names in them, and its number of weights."""

    entries: set[int] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    weights: int = 0


@dataclass(frozen=True, slots=True)
class DecoderLists:
    """The decoder's lists of blocks in a checkpoint.

    Attributes:
        blocks: prefixes of the decoder's lists, e.g. ``model.language_model.layers``.
        towers: name prefixes of everything that belongs to other towers.
    """

    blocks: frozenset[str]
    towers: tuple[str, ...]

    def block_index(self, name: str) -> int:
        """Return the decoder block index of a stored tensor, -1 if it belongs to none."""
        match = NUMBERED_NAME.match(name)
        return int(match[2]) if match and match[1] in self.blocks else -1

    def is_in_tower(self, name: str) -> bool:
        """Return whether a stored tensor belongs to another tower."""
        return name.startswith(self.towers) or TOWER_WORDS.search(name) is not None


def find_decoder_lists(
    config: Mapping[str, Any], text: Mapping[str, Any], stored: Iterable[StoredTensor]
) -> DecoderLists:
    """Separate the decoder's lists of blocks from those of other towers.

    Args:
        config: configuration of the whole checkpoint.
        text: configuration of its decoder; the same object if there is nothing else.
        stored: headers of all tensors.
    """
    lists: dict[str, _ModuleList] = {}
    for tensor in stored:
        if block := NUMBERED_NAME.match(tensor.name):
            item = lists.setdefault(block[1], _ModuleList())
            item.entries.add(int(block[2]))
            item.modules.add(block[3].rpartition(".")[0])
            item.weights += math.prod(tensor.shape)
    lists = {prefix: item for prefix, item in lists.items() if item.modules != {""}}
    candidates = {prefix: item for prefix, item in lists.items() if not TOWER_WORDS.search(prefix)}
    if not candidates or not has_towers(config):
        return DecoderLists(frozenset(candidates), ())
    layers = next((text[key] for key in LAYER_COUNT_KEYS if key in text), 0)
    of_right_length = {prefix for prefix, item in candidates.items() if len(item.entries) == layers}
    decoder = max(
        of_right_length or candidates, key=lambda prefix: (candidates[prefix].weights, prefix)
    )
    towers = {_tower_prefix(prefix, decoder) for prefix in lists if prefix != decoder}
    return DecoderLists(frozenset({decoder}), tuple(sorted(towers)))


def has_towers(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration describes another tower: a nested configuration with its own depth."""
    return any(
        isinstance(value, Mapping) and (not _DEPTH_KEYS.isdisjoint(value) or has_towers(value))
        for key, value in config.items()
        if key not in {"text_config", "quantization_config"}
    )


def _tower_prefix(prefix: str, decoder: str) -> str:
    """Return the shortest prefix of a list's name that the decoder's name does not share, with its dot."""
    parts, other = prefix.split("."), decoder.split(".")
    pairs = enumerate(zip(parts, other, strict=False))
    shared = next(
        (position for position, (part, other_part) in pairs if part != other_part), len(other)
    )
    return ".".join(parts[: shared + 1]) + "."
