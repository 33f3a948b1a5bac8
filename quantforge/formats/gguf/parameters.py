"""Convert hyperparameters from ``config.json`` to the metadata keys of llama.cpp.

llama.cpp knows most of a family by heart (activation, order of norms, attention scale, which layers slide) and reads
the rest from keys. What it knows by heart has to be what the configuration says, and anything else would load and
compute something different: it is refused here, because no key could carry it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.architectures import Architecture, architecture_of
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, ValueFunction, periodic_layer_types
from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.formats.gguf import unsupported_in_gguf
from quantforge.formats.gguf.container import (
    GgufTensor,
    MetadataValue,
    ValueType,
    bool_value,
    f32_value,
    u32_value,
)
from quantforge.formats.gguf.families import family_of
from quantforge.formats.gguf.rope import (
    RopeParameters,
    read_rope,
    rope_keys,
    rope_tensors,
    yarn_rounding,
)

_DEFAULT_WINDOW = 4096  # of families with a sliding window, where a configuration states none
# Keys that change what is computed, whose default is the family's.
_DEFAULTED_KEYS = (
    "rope_theta",
    "rms_norm_eps",
    "num_experts_per_tok",
    "norm_topk_prob",
    "partial_rotary_factor",
    "rope_parameters",
    "original_max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """Hyperparameters of a model as GGUF stores them.

    Attributes:
        family: llama.cpp's name of it, and what is done to its tensors.
        keys: of the file.
        dimensions: of the model.
        computed: tensors that are computed from its configuration.
        experts: of each block, 0 for none.
        events: what llama.cpp computes otherwise.
    """

    family: GgufFamily
    keys: dict[str, MetadataValue]
    dimensions: Dimensions
    computed: tuple[GgufTensor, ...] = ()
    experts: int = 0
    events: tuple[Event, ...] = ()


def translate_parameters(config: Mapping[str, Any]) -> HyperParameters:
    """Translate the configuration of a text model to GGUF keys.

    Raises:
        RefusedError: GGUF holds no such family, or the configuration asks for something that llama.cpp's graph of it
            does not do.
        InputError: a size is missing or impossible.
    """
    family = family_of(config)
    declared = architecture_of(config)
    assert declared is not None  # it has declared the family
    sizes = declared.dimensions(config)
    config = _with_defaults(config, declared.defaults)
    full_config = {**declared.defaults, **config}
    mixed = (
        family.has_experts
        if isinstance(family.has_experts, bool)
        else config.get(family.has_experts)
    )
    experts = _expert_count(sizes) if mixed else 0
    _check_heads(config, family, sizes)
    _check_graph(full_config, declared, family, sizes)
    metadata: dict[str, MetadataValue] = {
        "block_count": u32_value(sizes.layers),
        "context_length": u32_value(sizes.positions),
        "embedding_length": u32_value(sizes.hidden),
        "feed_forward_length": u32_value(sizes.ffn),
        "attention.head_count": u32_value(sizes.heads),
    }
    key, config_key = family.epsilon_keys
    epsilon = f32_value(
        _epsilon(config, config_key, 1e-6 if config_key == "rms_norm_eps" else 1e-5)
    )
    if not family.uses_rotary:
        return HyperParameters(family, _prefix_keys(family, metadata | {key: epsilon}), sizes)
    metadata["attention.head_count_kv"] = u32_value(sizes.kv_heads)
    metadata[key] = epsilon
    metadata["attention.key_length"] = u32_value(sizes.head)
    metadata["attention.value_length"] = u32_value(sizes.head)
    rope = read_rope(config, family, sizes)
    _check_partial_rotary(rope, family, sizes, declared.defaults)
    metadata |= rope_keys(rope, family)
    metadata |= _leading_keys(config, family, sizes, rope)
    if experts:
        metadata["expert_count"] = u32_value(experts)
        metadata["expert_used_count"] = u32_value(_used_experts(full_config, family, experts))
    metadata |= _family_keys(full_config, family, sizes)
    return HyperParameters(
        family,
        _prefix_keys(family, metadata),
        sizes,
        rope_tensors(rope),
        experts,
        _difference_events(full_config, declared.windows, family, sizes, rope),
    )


def _with_defaults(config: Mapping[str, Any], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Return the configuration with the family's defaults for missing keys that change what is computed."""
    model_defaults = {key: defaults[key] for key in _DEFAULTED_KEYS if key in defaults}
    if config.get("rope_parameters") is None:  # null, too, asks for those of the family
        config = {key: value for key, value in config.items() if key != "rope_parameters"}
        if config.get("rope_scaling"):
            model_defaults.pop("rope_parameters", None)
    return {**model_defaults, **config}


def _prefix_keys(
    family: GgufFamily, metadata: Mapping[str, MetadataValue]
) -> dict[str, MetadataValue]:
    return {f"{family.arch}.{key}": value for key, value in metadata.items()}


def _leading_keys(
    config: Mapping[str, Any], family: GgufFamily, sizes: Dimensions, rope: RopeParameters
) -> dict[str, MetadataValue]:
    """Return the keys of a family that precede those of its experts."""
    keys = {"vocab_size": u32_value(sizes.vocab)} if family.stores_vocabulary_size else {}
    if family.stores_original_context:
        keys["rope.scaling.original_context_length"] = u32_value(rope.original or sizes.positions)
    for key, usual in family.softcaps.items():
        keys[key] = f32_value(_softcap(config, key, usual))
    window = _DEFAULT_WINDOW if family.supports_window else family.file_window_default
    if window is not None:
        keys["attention.sliding_window"] = u32_value(
            _integer_or_default(config, "sliding_window", window)
        )
    return keys


def _family_keys(
    config: Mapping[str, Any], family: GgufFamily, sizes: Dimensions
) -> dict[str, MetadataValue]:
    """Return the keys that the family declares, for a configuration with defaults filled in."""
    keys = {key: u32_value(sizes.size(size)) for key, size in family.size_keys.items()}
    for key, config_source in family.integer_keys.items():
        number = config_source if isinstance(config_source, int) else _lookup(config_source, config)
        if number is not None:
            keys[key] = u32_value(
                _number(config_source if isinstance(config_source, str) else key, number, int)
            )
    for key, config_source in family.float_keys.items():
        if (real := _lookup(config_source, config)) is not None:
            if not real and config_source in config:  # to llama.cpp, 0 is as good as none
                raise unsupported_in_gguf(f"{config_source} = {real}", "a number above 0")
            keys[key] = f32_value(
                _number(config_source if isinstance(config_source, str) else key, real, float)
            )
    for key, config_source in family.bool_keys.items():
        config_value = (
            config_source if isinstance(config_source, bool) else config.get(config_source)
        )
        if config_value is not None:
            keys[key] = bool_value(bool(config_value))
    for key, listing in family.per_layer_keys.items():
        value_list = list(listing(config))
        kind = ValueType.BOOL if all(type(item) is bool for item in value_list) else ValueType.U32
        keys[key] = MetadataValue(ValueType.ARRAY, value_list, kind)
    return keys


def _lookup(config_source: str | ValueFunction, config: Mapping[str, Any]) -> Any:
    return config.get(config_source) if isinstance(config_source, str) else config_source(config)


def _number(key: object, value: object, kind: type) -> Any:
    is_number = type(value) is int or (kind is float and isinstance(value, float))
    if not is_number or not 0 <= float(str(value)) < 1 << 31:
        raise InputError(f"{key} = {str(value)[:40]!r}", "a number", subject="config.json")
    return value


def _softcap(config: Mapping[str, Any], key: str, otherwise: float) -> float:
    value = config.get(key, otherwise)
    if not isinstance(value, int | float) or value <= 0:
        raise unsupported_in_gguf(f"{key} = {value!r}", "a soft cap above 0")
    return float(value)


def _epsilon(config: Mapping[str, Any], key: str, otherwise: float) -> float:
    value = config.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(
            f"{key} = {str(value)[:40]!r}", "a number from 0 to 1", subject="config.json"
        )
    return float(value)


def _integer_or_default(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    value = config.get(key)
    if value is None:
        return otherwise
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise unsupported_in_gguf(f"{key} = {value!r}", "an integer")
    return value


def _expert_count(sizes: Dimensions) -> int:
    count = sizes.family_sizes.get("experts", 0)
    if not 1 < count <= 4096:
        raise unsupported_in_gguf(f"{count} experts", "2 to 4096")
    return count


def _used_experts(config: Mapping[str, Any], family: GgufFamily, experts: int) -> int:
    count = _integer_or_default(config, family.used_experts_key, 2)
    groups, used_groups = config.get("n_group"), config.get("topk_group")
    max_used = experts
    if "expert_group_count" in family.integer_keys and groups and used_groups:
        max_used = experts // groups * used_groups
    if not 1 <= count <= max_used:
        raise unsupported_in_gguf(f"{family.used_experts_key} = {count}", f"1 to {max_used}")
    return count


def _check_heads(config: Mapping[str, Any], family: GgufFamily, sizes: Dimensions) -> None:
    """Raise `RefusedError` for activations and head sizes that llama.cpp does not compute for the family."""
    supported_values = family.activations
    keys = ("hidden_activation", "hidden_act", "activation_function")
    for config_value in (config[key] for key in keys if config.get(key)):
        if config_value not in supported_values:
            raise unsupported_in_gguf(
                f"activation {config_value!r}", f"{family.arch} computes {supported_values[0]}"
            )
    if family.permutes_qk and sizes.head % 2:
        raise unsupported_in_gguf(f"head_dim = {sizes.head}", "an even number")
    if family.heads_fill_width and sizes.head * sizes.heads != sizes.hidden:
        raise unsupported_in_gguf(
            f"head_dim {sizes.head}", f"{sizes.heads} heads of {family.arch} fill {sizes.hidden}"
        )


def _check_graph(
    config: Mapping[str, Any], declared: Architecture, family: GgufFamily, sizes: Dimensions
) -> None:
    """Raise `RefusedError` for settings that llama.cpp's graph of the family does not compute."""
    if not config.get("is_causal", True):
        raise unsupported_in_gguf(f"is_causal = {str(config['is_causal'])[:40]}", "true")
    for key, value in declared.required_values.items():
        if (config.get(key, value) or None) != (value or None):
            raise unsupported_in_gguf(f"{key} = {str(config[key])[:40]}", f"{key} = {value}")
    for key, value in family.required_values.items():
        config_value = config.get(key, value)
        if config_value != value and (config_value is not None or value):
            raise unsupported_in_gguf(f"{key} = {str(config[key])[:40]}", f"{key} = {value}")
    if family.unsupported and (unsupported := family.unsupported(config)):
        raise unsupported_in_gguf(*unsupported)
    for first, other in family.equal_sizes:
        if sizes.size(first) != sizes.size(other):
            raise unsupported_in_gguf(
                f"{first} of {sizes.size(first)}", f"{other}, {sizes.size(other)}"
            )
    if family.window_period:
        _check_windows(config, family.window_period, sizes.layers)


def _check_partial_rotary(
    rope: RopeParameters, family: GgufFamily, sizes: Dimensions, defaults: Mapping[str, object]
) -> None:
    """Raise `RefusedError` for partial rotary embeddings in a family whose heads always rotate fully."""
    is_supported = (
        "partial_rotary_factor" in defaults
        or "rope.dimension_count" in family.size_keys
        or family.rope_divisors_head
    )
    if rope.width != sizes.head and not is_supported:
        rotated_share = rope.width / sizes.head
        raise unsupported_in_gguf(
            f"partial_rotary_factor = {rotated_share:g}", f"{family.arch} rotates whole heads"
        )


def _check_windows(config: Mapping[str, Any], period: int, layers: int) -> None:
    """Raise `RefusedError` unless exactly the last of every ``period`` layers has full attention."""
    expected, layer_types = periodic_layer_types(layers, period), config.get("layer_types")
    if isinstance(layer_types, list) and layer_types[:layers] != expected:
        raise unsupported_in_gguf(
            f"layer_types = {layer_types[:8]}...", f"llama.cpp assumes {expected[:8]}..."
        )
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if config.get(key, period) != period:
            raise unsupported_in_gguf(f"{key} = {config[key]}", f"{period}")


def _difference_events(
    config: Mapping[str, Any],
    windows: WindowRule,
    family: GgufFamily,
    sizes: Dimensions,
    rope: RopeParameters,
) -> tuple[Event, ...]:
    """Return events for rounded rope frequencies and for a sliding window that llama.cpp lacks.

    ``config`` is with the family's defaults.
    """
    message = yarn_rounding(rope)
    rounding_events = (
        (Event("rope-approximated", "config.json", f"truncate = false: {message}"),)
        if message
        else ()
    )
    window = config.get("sliding_window", family.config_window_default)
    if window is None or sizes.positions <= window or family.supports_window:
        return rounding_events
    if not any(windows.of_layers(config, sizes.layers)):
        return rounding_events
    text = f"llama.cpp's {family.arch} has no sliding window: equal up to {window} tokens"
    return (*rounding_events, Event("sliding-window-dropped", "config.json", text))
