"""Read and check the sizes of a model from its configuration, under all key names that families use.

A configuration is untrusted input: a size may be a string, negative, NaN or 10^12. Every value is checked here before
anything is allocated or looped over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.errors import InputError

_SIZE_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head": ("head_dim",),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx"),
}
_MAX_SIZES: Mapping[str, int] = {
    "hidden": 1 << 20,
    "ffn": 1 << 22,
    "layers": 10_000,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "head": 1 << 16,
    "vocab": 1 << 26,
    "positions": 1 << 30,
}
# Types of layers of the declared families
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of one decoder.

    ``head`` is the width of one attention head; ``family_sizes`` holds sizes that only some families have.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    positions: int
    family_sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def q(self) -> int:
        """Return the number of rows of the query projection."""
        return self.heads * self.head

    @property
    def kv(self) -> int:
        """Return the number of rows of the key (or value) projection."""
        return self.kv_heads * self.head

    @property
    def qkv(self) -> int:
        """Return the number of rows of a fused query-key-value projection."""
        return self.q + 2 * self.kv

    @property
    def gate_up(self) -> int:
        """Return the number of rows of a fused gate-up projection."""
        return 2 * self.ffn

    def size(self, text: str) -> int:
        """Evaluate an expression in dimensions, such as ``hidden``, ``positions+2``, ``3*hidden`` or ``3``."""
        return sum(math.prod(map(self._factor, term.split("*"))) for term in text.split("+"))

    def _factor(self, symbol: str) -> int:
        if symbol.isdigit():
            return int(symbol)
        return (
            self.family_sizes[symbol] if symbol in self.family_sizes else int(getattr(self, symbol))
        )

    def shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Evaluate the shape of a declared parameter."""
        return tuple(self.size(name) for name in names)


def read_dimensions(
    config: Mapping[str, Any],
    defaults: Mapping[str, object] | None = None,
    family_sizes: Mapping[str, tuple[str, ...] | int] | None = None,
    extra_layer_types: frozenset[str] = frozenset(),
) -> Dimensions:
    """Read and check the sizes of a (text) configuration.

    Args:
        config: the configuration.
        defaults: values of the family for missing keys.
        family_sizes: sizes specific to the family, each with the keys that may hold it, or its value; ``ffn`` and
            ``layers`` replace the common ones.
        extra_layer_types: values that ``layer_types`` may have besides attention types.

    Raises:
        InputError: a size is missing, not a positive integer, implausibly large, or contradicts another.
    """
    hidden = _read_size(config, defaults, "hidden")
    heads = _read_size(config, defaults, "heads")
    kv_heads = _read_size(config, defaults, "kv_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"{heads} attention heads are not a multiple of {kv_heads} key/value heads",
            "compare num_attention_heads and num_key_value_heads with the model's publication",
            subject="config.json",
        )
    extra_sizes = {
        name: _family_size(config, defaults or {}, name, value)
        for name, value in (family_sizes or {}).items()
    }
    layers = extra_sizes.pop("layers", 0) or _read_size(config, defaults, "layers")
    _check_layer_types(config, layers, _ATTENTION_TYPES | extra_layer_types)
    _check_routing({**(defaults or {}), **config}, config, extra_sizes.get("experts", 1))
    return Dimensions(
        hidden=hidden,
        ffn=extra_sizes.pop("ffn", 0) or _read_size(config, defaults, "ffn", 4 * hidden),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head=_read_size(config, defaults, "head", hidden // heads),
        vocab=_read_size(config, defaults, "vocab"),
        positions=_read_size(config, defaults, "positions", _MAX_SIZES["positions"]),
        family_sizes=extra_sizes,
    )


def _family_size(
    config: Mapping[str, Any],
    defaults: Mapping[str, object],
    name: str,
    keys: tuple[str, ...] | int,
) -> int:
    if isinstance(keys, int):
        return _checked_size(name, keys, _MAX_SIZES["ffn"])
    values = {**defaults, **config}
    present_keys = [key for key in keys if config.get(key) is not None]
    if len({config[key] for key in present_keys if isinstance(config[key], int)}) > 1:
        raise InputError(
            f"{' and '.join(f'{key} = {config[key]}' for key in present_keys)} contradict each other",
            "remove the one that is wrong",
            subject="config.json",
        )
    key = present_keys[0] if present_keys else keys[0]
    return _checked_size(key, values.get(key), _MAX_SIZES["ffn"])


def listed_layer_types(config: Mapping[str, Any]) -> list[str] | None:
    """Return the type of every layer from ``layer_types``; None if the configuration has no such list.

    Raises:
        InputError: it is not a list.
    """
    kinds = config.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise InputError(
            f"layer_types = {str(kinds)[:60]}", "a list, or null", subject="config.json"
        )
    return None if kinds is None else [str(kind) for kind in kinds]


def _check_layer_types(
    config: Mapping[str, Any], layers: int, allowed_types: frozenset[str]
) -> None:
    """Refuse ``layer_types`` of the wrong length or with unknown words, and windows that are not integers in range.

    Raises:
        InputError: naming the key.
    """
    types = config.get("layer_types")
    if types is not None:
        is_valid = (
            isinstance(types, list) and len(types) == layers and {*map(str, types)} <= allowed_types
        )
        if not is_valid:
            raise InputError(
                f"layer_types = {str(types)[:60]}",
                f"a list of {layers}, each of them {' or '.join(sorted(allowed_types - {''}))}",
                subject="config.json",
            )
    for key, minimum in (
        ("sliding_window", 1),
        ("attention_chunk_size", 1),
        ("max_window_layers", 0),
    ):
        value, maximum = config.get(key), _MAX_SIZES["positions"]
        if value == 0 and config.get("use_sliding_window") is False:
            continue  # what transformers writes of a window that is not used
        if value is not None and (type(value) is not int or not minimum <= value <= maximum):
            raise InputError(
                f"{key} = {value!r:.40} ({type(value).__name__})",
                f"{key} has to be an integer from {minimum} to {maximum}, or null",
                subject="config.json",
            )


def _check_routing(values: Mapping[str, Any], config: Mapping[str, Any], experts: int) -> None:
    """Refuse numbers of chosen experts or expert groups that do not fit the number of experts.

    Raises:
        InputError: naming the key.
    """
    used_key, groups = "num_experts_per_tok", values.get("n_group")
    if experts > 1 and (used_key in config or values.get(used_key) is not None):
        _checked_size(used_key, values[used_key], experts)
    if experts > 1 and groups is not None and experts % _checked_size("n_group", groups, experts):
        message = f"n_group = {groups}: {experts} experts do not fall into so many groups"
        raise InputError(message, "compare with the model's publication", subject="config.json")
    if experts > 1 and groups is not None and values.get("topk_group") is not None:
        _checked_size("topk_group", values["topk_group"], groups)


def _read_size(
    config: Mapping[str, Any],
    defaults: Mapping[str, object] | None,
    name: str,
    fallback: int | None = None,
) -> int:
    keys = _SIZE_KEYS[name]
    for source in (config, defaults or {}):
        for key in keys:
            if key in source:
                # null asks for the derived value, whatever the family's default
                if source[key] is None and fallback is not None:
                    return fallback
                return _checked_size(key, source[key], _MAX_SIZES[name])
    if fallback is None:
        raise InputError(
            f"{' or '.join(keys)} is missing",
            "is this the directory of a decoder model?",
            subject="config.json",
        )
    return fallback


def _checked_size(key: str, value: object, limit: int) -> int:
    if type(value) is not int or not 0 < value <= limit:
        raise InputError(
            f"{key} = {value!r:.40} ({type(value).__name__})",
            f"{key} has to be an integer from 1 to {limit}",
            subject="config.json",
        )
    return value
