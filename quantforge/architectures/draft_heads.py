"""Recognize draft heads: layers that predict further tokens, in a model's files or in a directory of their own.

Within a model they are recognized by name and count. The decoder works without them (speculative decoding is faster
with them). Files store them after the last layer, as many as the configuration declares, or under their own names; the
classes of transformers leave them out. They are therefore declared for no family but recognized in all, and kept
unchanged unless a recipe says otherwise. A directory of Medusa or EAGLE-3 heads contains nothing else and is not a
model: EAGLE-3 declares itself a llama, which it is not.

The matrices inside attention and MLP are linears like those of the decoder; for EAGLE-3 it is known which read the same
activation. The projection that joins a head to the decoder (`eh_proj`, `fc`), its embedding, output matrix, routers and
norms are not quantized, and engines hold them in 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quantforge.architectures.routers import find_routers, is_indexer_weight
from quantforge.architectures.towers import LAYER_COUNT_KEYS, NUMBERED_NAME, TOWER_WORDS
from quantforge.errors import InputError
from quantforge.plans import StoredTensor

MEDUSA, EAGLE3 = "medusa", "eagle3"
DRAFT_KINDS = (MEDUSA, EAGLE3)
NEXTN_LAYERS = "num_nextn_predict_layers"  # counts layers after the last one
# Other counts, and whether there are any; 0 and false where they are left out.
COUNT_KEYS = (
    NEXTN_LAYERS,
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_layers",
)
ENABLED_KEYS = ("use_mtp",)
_DRAFT_NAME = re.compile(r"(\w+\.)*?(mtp|mtp_layers|mtp_\w+|medusa_heads?)\..+")
_DRAFT_WORDS = ("mtp", "medusa")  # one of them is in every such name
# A module that holds layers, and is no part of one.
_LAYER_CONTAINER = re.compile(r"(?<!\.experts)\.\d+$|(^|\.)(mtp\w*|medusa_heads?)$")
_NOT_LINEAR = re.compile(r"embed|head|norm|router|(^|\.)gate\.weight|conv")
EMBEDDING = "embed_tokens.weight"


def draft_kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of draft heads in a ``config.json``, supported or not; None for an ordinary model."""
    names = config.get("architectures")
    type_names = [config.get("model_type"), config.get("speculators_model_type")]
    type_names += names if isinstance(names, list) else []
    description = " ".join(
        type_name.lower() for type_name in type_names if isinstance(type_name, str)
    )
    if "medusa_num_heads" in config or MEDUSA in description:
        return MEDUSA
    if EAGLE3 in description or ("draft_vocab_size" in config and "eagle" not in description):
        return EAGLE3
    return "eagle" if "eagle" in description else None


def is_draft(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` describes draft heads of a kind in `DRAFT_KINDS`."""
    return draft_kind(config) in DRAFT_KINDS


def model_type_or_draft(config: Mapping[str, Any]) -> str:
    """Return the kind of draft heads in a ``config.json``, or else its ``model_type``; "" if it has none."""
    kind = draft_kind(config)
    return kind if kind in DRAFT_KINDS else str(config.get("model_type", ""))


def find_draft_head_tensors(
    config: Mapping[str, Any], layers: int, stored: Iterable[StoredTensor]
) -> dict[str, bool]:
    """Return the names of the tensors of draft heads, each with whether it is a linear.

    Args:
        config: configuration of the decoder.
        layers: number of its layers.
        stored: headers of all tensors.

    Raises:
        InputError: ``num_nextn_predict_layers`` is not a number of layers.
    """
    count = config.get(NEXTN_LAYERS) or 0
    if type(count) is not int or not 0 <= count <= max(layers, 1):
        raise InputError(f"{NEXTN_LAYERS} = {str(count)[:40]!r}", "a number", subject="config.json")
    extra_layers = range(layers, layers + count)
    tensors = {}
    for tensor in stored:
        name = tensor.name
        block = NUMBERED_NAME.match(name) if extra_layers else None
        is_extra_layer = block and int(block[2]) in extra_layers and not TOWER_WORDS.search(name)
        if is_extra_layer or (
            any(keyword in name for keyword in _DRAFT_WORDS) and _DRAFT_NAME.fullmatch(name)
        ):
            tensors[name] = tensor
    router_names = find_routers(config, {name: tensor.shape for name, tensor in tensors.items()})
    return {
        name: name not in router_names and _is_linear(tensor) for name, tensor in tensors.items()
    }


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of layers in a configuration that was not validated; 0 if it has none."""
    layers = next((config[key] for key in LAYER_COUNT_KEYS if key in config), 0)
    return layers if type(layers) is int else 0


def without_draft_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with all counts of draft heads set to zero, in ``text_config`` too."""
    changed_keys: dict[str, Any] = {key: 0 for key in COUNT_KEYS if config.get(key)}
    changed_keys |= {key: False for key in ENABLED_KEYS if config.get(key)}
    nested_config = config.get("text_config")
    if isinstance(nested_config, Mapping):
        changed_keys["text_config"] = without_draft_heads(nested_config)
    return {**config, **changed_keys}


def _is_linear(tensor: StoredTensor) -> bool:
    name = tensor.name
    owner = name.removesuffix(".weight").rpartition(".")[0]
    matrix = name.endswith(".weight") and len(tensor.shape) == 2
    return (
        matrix
        and not _LAYER_CONTAINER.search(owner)
        and not _NOT_LINEAR.search(name.rpartition(".layers.")[2])
        and not is_indexer_weight(name)
    )


def eagle3_stored_names(name: str) -> list[str]:
    """Return the names that EAGLE-3 files may use for a tensor, with and without layer prefix."""
    return [
        f"{prefix}{owner}{name}"
        for prefix in ("", "model.")
        for owner in ("", "midlayer.", "layers.0.")
    ]
