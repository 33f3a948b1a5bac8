"""Gemma 4: wider heads in full-attention layers; the last layers reuse keys and values of earlier ones.

Norms multiply by w. Values are normalized too, without a weight, so no scale of the input of the output projection can
be folded. In some models, the full-attention layers use the keys as values (``attention_k_eq_v``). A third part of each
block multiplies a gate by a small vector per token and layer, which is computed from an embedding and the first hidden
states. In models with a mixture, the experts run in parallel to the MLP, and the router reads the hidden states before
the norms of both.

Files of transformers list the settings of the full-attention layers by layer index (``per_layer_config``), published
files under keys of their own. This file contains, in this order: parts, kinds and sizes of layers; the values that
llama.cpp assumes; the configuration described by a GGUF file; the vision tower; and the declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quantforge.architectures import (
    Architecture,
    FoldKind,
    Parameter,
    ScaleFold,
    SharedInput,
    text_config,
)
from quantforge.architectures.declare import (
    NESTED_DECODER_NAMES,
    STANDALONE_DECODER_NAMES,
    Mixer,
    compose_layer,
    gated_mlp,
    linear_parameters,
    norm_parameters,
    only_when,
)
from quantforge.architectures.dimensions import listed_layer_types
from quantforge.architectures.layer_kind import keys_and_values
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, GgufKeys
from quantforge.architectures.mixtures import stacked_experts
from quantforge.architectures.projector import (
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    block_tensors,
    weight_tensor,
)
from quantforge.errors import InputError

SHARED_KV_LAYERS_KEY = "num_kv_shared_layers"
PER_LAYER_CONFIG_KEY = "per_layer_config"
SLIDING, FULL, SHARED_KV = "sliding_attention", "full_attention", "shared"
FULL_LAYER_PERIOD = 6  # of layers, whose last sees everything, where they are not listed
DEFAULT_ROPE: Mapping[str, Mapping[str, Any]] = {  # rotary positions, where none are stated
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
MOE_KEY, KEYS_AS_VALUES_KEY = "enable_moe_block", "attention_k_eq_v"
PER_LAYER_INPUT_KEY = "hidden_size_per_layer_input"  # 0 where there are none
_PER_LAYER_GATE, _PER_LAYER_OUT = "per_layer_input_gate", "per_layer_projection"
PER_LAYER_INPUT = Mixer(
    (
        *linear_parameters(_PER_LAYER_GATE, "each_layer", "hidden"),
        *linear_parameters(_PER_LAYER_OUT, "hidden", "each_layer"),
        *norm_parameters("post_per_layer_input_norm"),
    ),
    (
        SharedInput((_PER_LAYER_GATE,), _PER_LAYER_GATE),
        SharedInput((_PER_LAYER_OUT,), _PER_LAYER_OUT),
    ),
)
PER_LAYER_EMBEDDINGS = (
    Parameter("model.embed_tokens_per_layer.weight", ("each_vocab", "layers*each_layer")),
    *linear_parameters("model.per_layer_model_projection", "layers*each_layer", "hidden"),
    *norm_parameters("model.per_layer_projection_norm", dimension="each_layer"),
)
NORMS = (
    Parameter("layer_scalar", ("1",)),
    *norm_parameters(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)
ROUTER_AND_NORMS = (
    Parameter("router.scale", ("hidden",)),
    Parameter("router.per_expert_scale", ("experts",)),
    Parameter("router.proj.weight", ("experts", "hidden")),
    *norm_parameters(
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
        "pre_feedforward_layernorm_2",
    ),
)


def attention(head: str, kv_heads: str, values_when: str = "", *, shared: bool = False) -> Mixer:
    """Declare attention with its own head size.

    Args:
        head: the dimension that is the width of a head.
        kv_heads: the dimension that counts key/value heads.
        values_when: the configuration key that decides whether there is a value projection; "" for always.
        shared: whether the layer has no keys and values but reuses those of an earlier layer.
    """
    q, k, v, out = (f"self_attn.{name}_proj" for name in ("q", "k", "v", "o"))
    bias, rows = "attention_bias", f"{kv_heads}*{head}"
    key_value_parameters = (
        *linear_parameters(k, rows, "hidden", bias),
        *only_when(values_when, linear_parameters(v, rows, "hidden", bias)),
        *norm_parameters("self_attn.k_norm", dimension=head),
    )
    return Mixer(
        (
            *linear_parameters(q, f"heads*{head}", "hidden", bias),
            *norm_parameters("self_attn.q_norm", dimension=head),
            *(() if shared else key_value_parameters),
            *linear_parameters(out, "hidden", f"heads*{head}", bias),
        ),
        (
            SharedInput(
                (q,) if shared else (q, k, v),
                "self_attn",
                ScaleFold(FoldKind.NORM, "input_layernorm"),
            ),
            SharedInput((out,), out),
        ),
        states=() if shared else keys_and_values(kv_heads, head),
    )


FOLD_INTO_MLP_NORM = ScaleFold(FoldKind.NORM, "pre_feedforward_layernorm")
OPTIONAL_PARTS = (
    only_when(MOE_KEY, ROUTER_AND_NORMS),
    only_when(MOE_KEY, stacked_experts("inner", module="experts")),
    only_when(PER_LAYER_INPUT_KEY, PER_LAYER_INPUT),
)
HEAD_SIZES = {
    SLIDING: ("head", "kv_heads"),
    FULL: ("full_head", "full_kv_heads", f"!{KEYS_AS_VALUES_KEY}"),
}


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer.

    Raises:
        InputError: layers share keys and values in a model without per-layer inputs, which transformers does not
            support; or as `first_shared_kv_layer` and `rope_settings`.
    """
    types = attention_types(config)
    first = first_shared_kv_layer(config, types)
    rope_settings(config)
    if first < len(types) and not config.get(PER_LAYER_INPUT_KEY):
        raise InputError(
            f"{SHARED_KV_LAYERS_KEY} = {config[SHARED_KV_LAYERS_KEY]}"
            f" with {PER_LAYER_INPUT_KEY} = {config.get(PER_LAYER_INPUT_KEY)}",
            f"a positive {PER_LAYER_INPUT_KEY}, or {SHARED_KV_LAYERS_KEY} = 0; transformers does not run such a model",
            subject="config.json",
        )
    return [
        f"{attention_type}/{SHARED_KV}" if index >= first else attention_type
        for index, attention_type in enumerate(types)
    ]


def attention_types(config: Mapping[str, Any]) -> list[str]:
    """Return the attention type of every layer, sliding or full; transformers makes the last layer full in any case."""
    types = listed_layer_types(config)
    if types is None:
        layers = range(_size(config, "num_hidden_layers", 0))
        types = [SLIDING if (index + 1) % FULL_LAYER_PERIOD else FULL for index in layers]
    return [*types[:-1], FULL]


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the rotary settings of every attention type that the model has.

    Raises:
        InputError: they are missing for a type, or have no base, for which transformers has no default.
    """
    configured = config.get("rope_parameters")
    configured = DEFAULT_ROPE if configured is None else configured
    by_type = {
        attention_type: configured.get(attention_type) if isinstance(configured, Mapping) else None
        for attention_type in attention_types(config)
    }
    for attention_type, settings in by_type.items():
        if not isinstance(settings, Mapping) or settings.get("rope_theta") is None:
            raise InputError(
                f"rope_parameters of {attention_type} = {str(settings)[:60]}",
                "rope_parameters = null, or a rope_theta for each type of layers",
                subject="config.json",
            )
    return {
        attention_type: settings
        for attention_type, settings in by_type.items()
        if settings is not None
    }


def unsupported_setting(config: Mapping[str, Any]) -> str:
    """Return a setting that these declarations do not support; "" if they support all."""
    bidirectional = config.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):  # "vision" applies to image tokens only
        return f"use_bidirectional_attention = {str(bidirectional)[:40]!r}"
    overrides = layer_overrides(config, _full_attention_layers(config))
    if overrides is None or overrides.keys() - {"head_dim", "num_key_value_heads"}:
        values = str(config[PER_LAYER_CONFIG_KEY])[:60]
        return f"{PER_LAYER_CONFIG_KEY} = {values}, which is not heads of full layers alone"
    return ""


def full_attention_head(config: Mapping[str, Any]) -> int:
    """Return the head width of full-attention layers; errors as `layer_overrides`."""
    if PER_LAYER_CONFIG_KEY in config:
        return _size(
            layer_overrides(config, _full_attention_layers(config)) or {},
            "head_dim",
            config["head_dim"],
        )
    return _size(config, "global_head_dim", 512)


def full_attention_kv_heads(config: Mapping[str, Any]) -> int:
    """Return the number of key/value heads of full-attention layers; errors as `layer_overrides`."""
    name, default = "num_key_value_heads", config["num_key_value_heads"]
    if PER_LAYER_CONFIG_KEY in config:
        kv_heads = _size(
            layer_overrides(config, _full_attention_layers(config)) or {}, name, default
        )
    else:
        configured = (
            config.get("num_global_key_value_heads") if config.get(KEYS_AS_VALUES_KEY) else None
        )
        kv_heads = default if configured is None else _size({name: configured}, name, default)
    heads = _size(config, "num_attention_heads", 0)
    if heads % kv_heads:
        raise InputError(
            f"{heads} attention heads are not a multiple of"
            f" {kv_heads} key/value heads of full layers",
            "compare them with the model's publication",
            subject="config.json",
        )
    return kv_heads


def shared_kv_mlp_width(config: Mapping[str, Any]) -> int:
    """Return the width of the MLP in layers that reuse keys and values."""
    width = _size(config, "intermediate_size", 0)
    return 2 * width if config.get("use_double_wide_mlp") else width


def per_layer_input_width(config: Mapping[str, Any]) -> int:
    """Return the width of the vector that a token has for every layer; 1 if there is none."""
    return _size(config, PER_LAYER_INPUT_KEY, 0) if config.get(PER_LAYER_INPUT_KEY) else 1


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts, 1 without a mixture."""
    if not config.get(MOE_KEY):
        return 1
    count = _size(config, "num_experts", 0)
    if _size(config, "top_k_experts", 0) > count:
        raise InputError(
            f"top_k_experts = {config['top_k_experts']} of {count} experts",
            "compare it with the model's publication",
            subject="config.json",
        )
    return count


def expert_width(config: Mapping[str, Any]) -> int:
    """Return the width of an expert, 1 without a mixture."""
    return _size(config, "moe_intermediate_size", 0) if config.get(MOE_KEY) else 1


def _full_attention_layers(config: Mapping[str, Any]) -> list[int]:
    return [index for index, kind in enumerate(attention_types(config)) if kind == FULL]


def _size(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 0 < value <= 1 << 22:
        raise InputError(
            f"{key} = {str(value)[:40]!r}", "a positive integer", subject="config.json"
        )
    return value


def first_shared_kv_layer(config: Mapping[str, Any], types: Sequence[str]) -> int:
    """Return the index of the first layer that reuses keys and values; the number of layers if there is none.

    Args:
        config: configuration of the text model.
        types: the attention type of every layer.

    Raises:
        InputError: ``num_kv_shared_layers`` is not a number of layers, or no earlier layer of the same type has keys
            and values.
    """
    count = config.get(SHARED_KV_LAYERS_KEY) or 0
    if type(count) is not int or not 0 <= count < max(len(types), 1):
        raise InputError(
            f"{SHARED_KV_LAYERS_KEY} = {str(count)[:40]!r}",
            "a number of layers",
            subject="config.json",
        )
    first = len(types) - count
    if {*types[first:]} - {*types[:first]}:
        raise InputError(
            f"{SHARED_KV_LAYERS_KEY} = {count}: no earlier layer makes keys for all of these",
            "compare it with the model's publication",
            subject="config.json",
        )
    return first


def layer_overrides(config: Mapping[str, Any], layers: Iterable[int]) -> Mapping[str, Any] | None:
    """Return the configuration values that some layers override, all in the same way.

    Args:
        config: configuration of the text model, with the family's defaults.
        layers: indices of the layers that may override values.

    Returns:
        The overrides; None if other layers have any, or if they differ between the layers.

    Raises:
        InputError: the configuration does not map layers to values.
    """
    overrides = {index: dict(values) for index, values in _all_overrides(config).items()}
    for values in overrides.values():
        for name in [name for name, value in values.items() if config.get(name) == value]:
            del values[name]
    first, *other_overrides = ([overrides.pop(index, {}) for index in layers]) or [{}]
    is_uniform = not any(overrides.values()) and all(values == first for values in other_overrides)
    return first if is_uniform else None


def _all_overrides(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    configured = config.get(PER_LAYER_CONFIG_KEY) or {}
    is_valid = isinstance(configured, Mapping) and all(
        isinstance(values, Mapping) and str(index).isdecimal()
        for index, values in configured.items()
    )
    if not is_valid:
        raise InputError(
            f"{PER_LAYER_CONFIG_KEY} = {str(configured)[:60]}",
            "values by number of layer",
            subject="config.json",
        )
    return {int(index): values for index, values in configured.items()}


_DEFAULT_SOFTCAP = 30.0  # softcap of logits if a file has no key for it
_ROPE_TYPES = {SLIDING: ("default",), FULL: ("default", "proportional")}


def kv_head_counts(config: Mapping[str, Any]) -> list[int]:
    """Return the number of key/value heads of every layer."""
    sliding, full = config["num_key_value_heads"], full_attention_kv_heads(config)
    return [
        full if attention_type == FULL else sliding for attention_type in attention_types(config)
    ]


def sliding_flags(config: Mapping[str, Any]) -> list[bool]:
    """Return for every layer whether it has a sliding window."""
    return [attention_type == SLIDING for attention_type in attention_types(config)]


def mlp_widths(config: Mapping[str, Any]) -> list[int]:
    """Return the width of the MLP of every layer."""
    shared_width, types = shared_kv_mlp_width(config), attention_types(config)
    first = first_shared_kv_layer(config, types)
    width = config["intermediate_size"]
    return [shared_width if index >= first else width for index in range(len(types))]


def final_softcap(config: Mapping[str, Any]) -> Any:
    """Return the softcap of logits, 0 for none; llama.cpp uses `_DEFAULT_SOFTCAP` if a file has no value."""
    return config.get("final_logit_softcapping") or 0.0


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None."""
    types = attention_types(config)
    if setting := unsupported_setting(config):
        return setting, "attention to earlier tokens, heads of full layers that are alike"
    if SLIDING not in types:
        return "layers that are all full", "some with a window"
    first = first_shared_kv_layer(config, types)
    sources = {FULL: first - 1, SLIDING: first - 2}  # layers whose keys and values llama.cpp reuses
    for attention_type in {*types[first:]}:
        last = max(index for index in range(first) if types[index] == attention_type)
        if last != sources[attention_type]:
            return (
                f"{attention_type} that reads keys of layer {last}",
                f"those of layer {sources[attention_type]}",
            )
    if (
        config.get(PER_LAYER_INPUT_KEY)
        and config["vocab_size_per_layer_input"] != config["vocab_size"]
    ):
        return (
            f"vocab_size_per_layer_input = {config['vocab_size_per_layer_input']}",
            f"vocab_size, {config['vocab_size']}",
        )
    for attention_type, rope in rope_settings(config).items():
        rope_type = rope.get("rope_type", "default")
        if rope_type not in _ROPE_TYPES[attention_type]:
            return f"rope_type = {str(rope_type)[:40]!r} of {attention_type}", " or ".join(
                _ROPE_TYPES[attention_type]
            )
    return None


_DISABLING_DIVISOR = 1e30  # makes a frequency negligible


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe.

    Refuses a file that no configuration describes.
    """
    sizes = keys.common_config()
    sliding_flags = [
        bool(item) for item in keys.per_layer("attention.sliding_window_pattern", bool)
    ]
    if not sliding_flags or sliding_flags[-1] or not any(sliding_flags):
        raise keys.not_read_error(
            "attention.sliding_window_pattern", "a full layer at the end, windows before"
        )
    first = len(sliding_flags) - keys.get_int("attention.shared_kv_layers", 0)
    if first <= 0:
        raise keys.not_read_error("attention.shared_kv_layers", "fewer than there are layers")
    softcap = keys.get_float("final_logit_softcapping", _DEFAULT_SOFTCAP)
    return {
        **sizes,
        "layer_types": [SLIDING if is_sliding else FULL for is_sliding in sliding_flags],
        "sliding_window": keys.get_int("attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": softcap or None,
        SHARED_KV_LAYERS_KEY: len(sliding_flags) - first,
        PER_LAYER_INPUT_KEY: keys.get_int("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": _per_layer_vocabulary(keys),
        **_head_config(keys, sliding_flags, first),
        **_mlp_config(keys, first),
        **_expert_config(keys),
        "rope_parameters": {
            SLIDING: {
                "rope_type": "default",
                "rope_theta": keys.get_float("rope.freq_base_swa", 1e4),
            },
            FULL: _full_attention_rope(keys),
        },
    }


def _per_layer_vocabulary(keys: GgufKeys) -> int:
    """Return the vocabulary size of the per-layer embedding."""
    table = keys.shape("per_layer_token_embd.weight") or keys.shape("token_embd.weight")
    return next(iter(table), 0)


def _head_config(keys: GgufKeys, sliding_flags: Sequence[bool], first: int) -> dict[str, Any]:
    """Return the head settings of both attention types.

    The keys of full-attention layers are their values if these layers have no value projection.
    """
    counts = keys.per_layer("attention.head_count_kv")
    sliding, full = (
        {count for count, flag in zip(counts, sliding_flags, strict=True) if flag is is_sliding}
        for is_sliding in (True, False)
    )
    if len(sliding) > 1 or len(full) > 1:
        raise keys.not_read_error(
            f"attention.head_count_kv = {str(counts)[:40]}", "one number for each type"
        )
    (sliding_count,), (full_count,) = sliding, full
    width, full_width = (
        keys.get_int("attention.key_length_swa"),
        keys.get_int("attention.key_length"),
    )
    layers = [index for index, flag in enumerate(sliding_flags) if not flag]
    equal = not any(keys.shape(f"blk.{index}.attn_v.weight") for index in layers if index < first)
    config = {"head_dim": width, "num_key_value_heads": sliding_count, KEYS_AS_VALUES_KEY: equal}
    if equal or full_count == sliding_count:
        published = {"num_global_key_value_heads": full_count} if equal else {}
        return {**config, "global_head_dim": full_width, **published}
    full_config = {"head_dim": full_width, "num_key_value_heads": full_count}
    return {**config, PER_LAYER_CONFIG_KEY: {str(index): full_config for index in layers}}


def _mlp_config(keys: GgufKeys, first: int) -> dict[str, Any]:
    """Return the width of the MLP, and whether the layers that reuse keys and values have twice this width."""
    mlp_widths = keys.per_layer("feed_forward_length")
    regular, shared = {*mlp_widths[:first]}, {*mlp_widths[first:]}
    is_doubled = shared == {2 * mlp_widths[0]}
    if len(regular) > 1 or not (is_doubled or shared <= regular):
        raise keys.not_read_error(
            f"feed_forward_length = {str(mlp_widths)[:40]}",
            "one, or twice that where keys are shared",
        )
    return {"intermediate_size": mlp_widths[0], "use_double_wide_mlp": is_doubled}


def _expert_config(keys: GgufKeys) -> dict[str, Any]:
    expert_count = keys.get_int("expert_count", 0)
    if not expert_count:
        return {MOE_KEY: False}
    return {
        MOE_KEY: True,
        "num_experts": expert_count,
        "top_k_experts": keys.get_int("expert_used_count"),
        "moe_intermediate_size": keys.get_int("expert_feed_forward_length"),
    }


def _full_attention_rope(keys: GgufKeys) -> dict[str, Any]:
    """Return the rotary settings of full-attention layers.

    Only a part of a head is rotated: the other frequencies have divisors that make them negligible.
    """
    default_rope = {"rope_type": "default", "rope_theta": keys.get_float("rope.freq_base", 1e4)}
    divisors = keys.rope_divisors()
    active_divisors = [value for value in divisors if value < _DISABLING_DIVISOR]
    if not divisors or {*divisors} == {1.0}:
        return default_rope
    if {*divisors[: len(active_divisors)]} != {*active_divisors} or len({*active_divisors}) != 1:
        raise keys.not_read_error(
            "rope_freqs.weight", "one divisor, then those that stop what does not turn"
        )
    width = 2 * len(divisors)
    rotated_share = 2 * len(active_divisors) / width
    if int(rotated_share * width // 2) != len(active_divisors):  # rounded downwards
        rotated_share = (2 * len(active_divisors) + 1) / width
    extra = {} if active_divisors[0] == 1 else {"factor": active_divisors[0]}
    return {
        **default_rope,
        "rope_type": "proportional",
        "partial_rotary_factor": rotated_share,
        **extra,
    }


_TOWER_ROPE_THETA = 100.0  # fixed in llama.cpp
_DEFAULT_POOLED_SIDE = 16  # pooled patches per side of an image: 256 tokens
# Widths of decoders in which llama.cpp gives image tokens causal attention.
_CAUSAL_WIDTHS = (1536, 2560)
_CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_TOWER, _PATCH_EMBEDDER = "vision_tower", "vision_tower.patch_embedder"


def gemma4_projector(config: Mapping[str, Any]) -> Projector:
    """Return the vision tower and its projector for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_activation", "gelu_pytorch_tanh")
    vision.require_rope_theta(_TOWER_ROPE_THETA)
    sizes = vision.sizes(TowerSizes(768, 3072, 16, 12, 16))
    width, _, _, heads, patch = sizes
    vision.require("head_dim", width // heads, default=64)
    vision.require("num_key_value_heads", heads, default=12)
    pool_size = vision.size("pooling_kernel_size", 3)
    positions = vision.size("position_embedding_size", 10240)
    clips = vision.values.get("use_clipped_linears", False) is True
    standardizes = vision.values.get("standardize", False) is True  # the pooled patches
    decoder_width = _check_decoder_width(text_config(config))
    return Projector(
        "gemma4v",
        {
            "use_gelu": True,
            **sizes.keys(
                patch * pool_size * _DEFAULT_POOLED_SIDE,
                vision.fraction("rms_norm_eps", 1e-6),
                decoder_width,
            ),
            "vision.projector.scale_factor": pool_size,
        },
        (
            weight_tensor(
                f"{_PATCH_EMBEDDER}.input_proj",
                "v.patch_embd",
                (width, 3 * patch**2),
                float32=True,
                patch_size=patch,
            ),
            TowerTensor(
                f"{_PATCH_EMBEDDER}.position_embedding_table",
                ("v.position_embd.weight",),
                (2, positions, width),
                float32=True,
            ),
            *_tower_tensors(sizes, clips=clips),
            *(
                TowerTensor(f"{_TOWER}.{name}", (f"v.{name}",), (width,))
                for name in ("std_bias", "std_scale")
                if standardizes
            ),
            weight_tensor(
                "embed_vision.embedding_projection", "mm.input_projection", (decoder_width, width)
            ),
        ),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        normalizes_by_default=False,
        omitted_towers=(r"(audio_tower|embed_audio)\..*",),
    )


def _check_decoder_width(config: Mapping[str, Any]) -> int:
    """Return the width of the decoder; refuse settings for which llama.cpp assumes another value."""
    text = TowerConfig(config, "text_config")
    width = text.size("hidden_size", 2304)
    text.require(
        "use_bidirectional_attention", None if width in _CAUSAL_WIDTHS else "vision", default=None
    )
    if config.get(
        PER_LAYER_INPUT_KEY, 256
    ):  # llama.cpp uses the per-layer vector of token 0 for image tokens
        text.require("pad_token_id", 0)
    return width


def _tower_tensors(sizes: TowerSizes, *, clips: bool) -> Iterator[TowerTensor]:
    """Yield the tensors of all tower blocks; if linears clip, their four bounds follow each weight."""
    block = {
        "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj.linear": "attn_q", "self_attn.k_proj.linear": "attn_k",
        "self_attn.v_proj.linear": "attn_v", "self_attn.o_proj.linear": "attn_out", "mlp.gate_proj.linear": "ffn_gate",
        "mlp.up_proj.linear": "ffn_up", "mlp.down_proj.linear": "ffn_down",
    }  # fmt: skip
    layers = f"{_TOWER}.encoder.layers"
    for tensor in block_tensors(layers, sizes, block, norm_bias=False, bias=False):
        yield tensor
        name, module, _ = tensor.name.partition(".linear.")
        for bound in _CLIP_BOUNDS if clips and module else ():
            gguf_name = tensor.gguf_names[0].removesuffix("weight") + bound
            yield TowerTensor(f"{name}.{bound}", (gguf_name,), ())


ARCHITECTURE = Architecture(
    model_type="gemma4_text",
    blocks="model.layers",
    outer_parameters=(
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        *only_when(PER_LAYER_INPUT_KEY, PER_LAYER_EMBEDDINGS),
        *norm_parameters("model.norm"),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=tuple(
        compose_layer(
            NORMS,
            attention(*place, shared=bool(sharing)),
            gated_mlp(norm=FOLD_INTO_MLP_NORM, width="shared_ffn" if sharing else "ffn"),
            *OPTIONAL_PARTS,
            name=f"{name}/{sharing}" if sharing else name,
        )
        for name, place in HEAD_SIZES.items()
        for sharing in ("", SHARED_KV)
    ),
    layer_kind_names=layer_kind_names,
    sizes={
        "full_head": full_attention_head,
        "full_kv_heads": full_attention_kv_heads,
        "shared_ffn": shared_kv_mlp_width,
        "each_layer": per_layer_input_width,
        "each_vocab": ("vocab_size_per_layer_input",),
        "experts": expert_count,
        "inner": expert_width,
    },
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.norm",
    prefixes=(("", ""), ("language_model.", ""), ("model.language_model.", "model.")),
    unmapped_prefixes={
        "gemma4": rf"{STANDALONE_DECODER_NAMES}|language_model\.",
        "gemma4_text": NESTED_DECODER_NAMES,
    },
    # Published files contain keys and values for layers that reuse those of earlier layers.
    droppable_patterns=(
        r".*rotary_emb\.inv_freq",
        r".*\.self_attn\.[kv]_scale",
        r"(model\.|language_model\.)*layers\.\d+\.self_attn\.([kv]_proj|[kv]_norm)\.(weight|bias)",
    ),
    foreign_patterns=(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
    unsupported_setting=unsupported_setting,
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": 262144,
        PER_LAYER_INPUT_KEY: 256,
        SHARED_KV_LAYERS_KEY: 0,
        "sliding_window": 512,
        "rope_parameters": DEFAULT_ROPE,
    },
    allows_float16=False,
    gguf=GgufFamily(
        "gemma4",
        transformers_class="Gemma4ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        supports_window=True,
        rope_divisors_head="full_head",
        has_sliding_rope_base=True,
        rope_scalings=("proportional",),
        has_experts=MOE_KEY,
        used_experts_key="top_k_experts",
        size_keys={
            "attention.key_length": "full_head",
            "attention.value_length": "full_head",
            "attention.key_length_swa": "head",
            "attention.value_length_swa": "head",
            "rope.dimension_count_swa": "head",
        },
        integer_keys={
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": SHARED_KV_LAYERS_KEY,
            "embedding_length_per_layer_input": PER_LAYER_INPUT_KEY,
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        float_keys={"final_logit_softcapping": final_softcap},
        per_layer_keys={
            "attention.head_count_kv": kv_head_counts,
            "attention.sliding_window_pattern": sliding_flags,
            "feed_forward_length": mlp_widths,
        },
        tensor_names={
            "layer_scalar": "layer_output_scale.weight",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            **{
                f"experts.{name}_proj.weight": f"ffn_{name}_exps.weight"
                for name in ("gate", "up", "down")
            },
        },
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
    text_config="text_config",
    projector={"gemma4": gemma4_projector},
    needs_model_replay=(PER_LAYER_INPUT_KEY, SHARED_KV_LAYERS_KEY),
    windows=WindowRule(width=512, period=FULL_LAYER_PERIOD, full_last=True),
)
FAMILIES = {"gemma4": ARCHITECTURE, "gemma4_text": ARCHITECTURE}
