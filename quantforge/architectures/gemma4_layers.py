"""Layers of Gemma 4: of which kind each is, and the sizes of its parts, as a configuration says them.

Files of transformers state what full layers have of their own by number of layer, published ones by keys of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures.dimensions import layer_types
from quantforge.architectures.layer_inputs import WIDTH
from quantforge.architectures.layer_overrides import KEY, own_values
from quantforge.architectures.shared_keys import COUNT, first_shared
from quantforge.errors import InputError

SLIDING, FULL, SHARED = "sliding_attention", "full_attention", "shared"
PERIOD = 6  # of layers, whose last sees everything, where they are not listed
TURNS: Mapping[str, Mapping[str, Any]] = {  # rotary positions, where none are stated
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
MIXTURE, K_EQ_V = "enable_moe_block", "attention_k_eq_v"


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer.

    Raises:
        InputError: layers share keys where tokens have no vector for every layer, which transformers does not run; or
            as `first_shared` and `turns`.
    """
    words = words_of(config)
    first = first_shared(config, words)
    turns(config)
    if first < len(words) and not config.get(WIDTH):
        raise InputError(
            f"config.json: {COUNT} = {config[COUNT]} with {WIDTH} = {config.get(WIDTH)}",
            f"a positive {WIDTH}, or {COUNT} = 0; transformers does not run such a model",
        )
    return [f"{word}/{SHARED}" if index >= first else word for index, word in enumerate(words)]


def words_of(config: Mapping[str, Any]) -> list[str]:
    """Return whether each layer slides or is full; transformers makes the last one full whatever is listed."""
    words = layer_types(config)
    if words is None:
        layers = range(_size(config, "num_hidden_layers", 0))
        words = [SLIDING if (index + 1) % PERIOD else FULL for index in layers]
    return [*words[:-1], FULL]


def turns(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the rotary positions of every type of layers that there is.

    Raises:
        InputError: they are not stated for each, or without a base, which transformers has no default for then.
    """
    stated = config.get("rope_parameters")
    stated = TURNS if stated is None else stated
    found = {
        word: stated.get(word) if isinstance(stated, Mapping) else None for word in words_of(config)
    }
    for word, own in found.items():
        if not isinstance(own, Mapping) or own.get("rope_theta") is None:
            raise InputError(
                f"config.json: rope_parameters of {word} = {str(own)[:60]}",
                "rope_parameters = null, or a rope_theta for each type of layers",
            )
    return {word: own for word, own in found.items() if own is not None}


def uncovered(config: Mapping[str, Any]) -> str:
    """Return what a configuration asks for beyond these declarations; "" where they cover it."""
    attends = config.get("use_bidirectional_attention")
    if attends not in (None, False, "vision"):  # the last is of pictures
        return f"use_bidirectional_attention = {str(attends)[:40]!r}"
    own = own_values(config, _full(config))
    if own is None or own.keys() - {"head_dim", "num_key_value_heads"}:
        return f"{KEY} = {str(config[KEY])[:60]}, which is not heads of full layers alone"
    return ""


def full_head(config: Mapping[str, Any]) -> int:
    """Return the width of a head of full layers; as `own_values`."""
    if KEY in config:
        return _size(own_values(config, _full(config)) or {}, "head_dim", config["head_dim"])
    return _size(config, "global_head_dim", 512)


def full_kv_heads(config: Mapping[str, Any]) -> int:
    """Return how many heads of keys full layers have; as `own_values`."""
    name, usual = "num_key_value_heads", config["num_key_value_heads"]
    if KEY in config:
        found = _size(own_values(config, _full(config)) or {}, name, usual)
    else:
        stated = config.get("num_global_key_value_heads") if config.get(K_EQ_V) else None
        found = usual if stated is None else _size({name: stated}, name, usual)
    heads = _size(config, "num_attention_heads", 0)
    if heads % found:
        raise InputError(
            f"config.json: {heads} attention heads are not a multiple of"
            f" {found} key/value heads of full layers",
            "compare them with the model's publication",
        )
    return found


def shared_width(config: Mapping[str, Any]) -> int:
    """Return the width of the MLP of layers without keys and values of their own."""
    width = _size(config, "intermediate_size", 0)
    return 2 * width if config.get("use_double_wide_mlp") else width


def each_layer(config: Mapping[str, Any]) -> int:
    """Return the width of the vector that a token has for every layer; 1 where it has none."""
    return _size(config, WIDTH, 0) if config.get(WIDTH) else 1


def experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts, 1 without a mixture."""
    if not config.get(MIXTURE):
        return 1
    count = _size(config, "num_experts", 0)
    if _size(config, "top_k_experts", 0) > count:
        raise InputError(
            f"config.json: top_k_experts = {config['top_k_experts']} of {count} experts",
            "compare it with the model's publication",
        )
    return count


def inner_width(config: Mapping[str, Any]) -> int:
    """Return the width of an expert, 1 without a mixture."""
    return _size(config, "moe_intermediate_size", 0) if config.get(MIXTURE) else 1


def _full(config: Mapping[str, Any]) -> list[int]:
    return [index for index, word in enumerate(words_of(config)) if word == FULL]


def _size(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    value = config.get(key, otherwise)
    if type(value) is not int or not 0 < value <= 1 << 22:
        raise InputError(f"config.json: {key} = {str(value)[:40]!r}", "a positive integer")
    return value
