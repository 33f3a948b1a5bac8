"""Mistral, Ministral, Mixtral and Mistral Small 3.

Mistral and Ministral are a llama without biases, with a sliding window in all or some layers. Mixtral has experts
instead of the MLP, stored one by one under other names. In Ministral 3, queries beyond the original context are scaled
by the logarithm of their position. ``mistral3`` (Mistral Small 3.1 and later, Ministral 3) is one of these with a
vision tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.declare import (
    attention,
    compose_layer,
    gated_mlp,
    multimodal_with_decoder_class,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import (
    LLAMA_BIASES,
    SCALINGS_WITH_TABLE,
    GgufFamily,
    GgufKeys,
    experts_config,
)
from quantforge.architectures.mixtures import router_parameters, single_experts
from quantforge.architectures.projector import (
    CLIP_MEAN,
    CLIP_STD,
    Projector,
    TokenRow,
    TowerConfig,
    TowerSizes,
    block_tensors,
    module_tensors,
    unsupported_setting_error,
    weight_tensor,
)
from quantforge.errors import InputError

MISTRAL = replace(
    llama.ARCHITECTURE,
    model_type="mistral",
    kinds=(compose_layer(llama.NORMS, attention(), gated_mlp()),),
    defaults={"num_key_value_heads": 8},
    model_type_with_layer_types={
        "mistral": "ministral"
    },  # this class supports layers without a window
    graph=DecoderGraph(same_window=True),
    windows=WindowRule(width=4096, every_layer=True),
    gguf=GgufFamily(
        "llama",
        stores_vocabulary_size=True,
        permutes_qk=True,
        bias_suffixes=LLAMA_BIASES,
        config_window_default=4096,
        rope_scalings=SCALINGS_WITH_TABLE,
    ),
)
# llama.cpp has no graph of the family with a window in some layers only.
MISTRAL = replace(MISTRAL, decoders_by_type={"ministral": replace(MISTRAL, gguf=None)})


MOE_MODULE, STORED_EXPERT_NAMES = "block_sparse_moe", ("w1", "w3", "w2")


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    return {**keys.llama_config(), "hidden_act": "silu", **experts_config(keys)}


MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    graph=DecoderGraph(same_window=True, supports_experts=True),
    kinds=(
        compose_layer(
            llama.NORMS,
            attention(),
            router_parameters("mlp.gate", stored=f"{MOE_MODULE}.gate.weight"),
            single_experts(
                "ffn", stored_module=f"{MOE_MODULE}.experts", stored=STORED_EXPERT_NAMES
            ),
        ),
    ),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        **MISTRAL.defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
    windows=WindowRule(every_layer=True, uses_layer_types=False),
    gguf=GgufFamily(
        "llama",
        stores_vocabulary_size=True,
        permutes_qk=True,
        has_experts=True,
        transformers_class="MixtralForCausalLM",
        rope_scalings=SCALINGS_WITH_TABLE,
        read_config=read_config,
    ),
)


_BETA_KEY, _MAX_BETA = "llama_4_scaling_beta", 1e6


def query_growth(config: Mapping[str, Any]) -> float | None:
    """Return the coefficient by which queries grow with the logarithm of their position; None if they do not.

    Raises:
        InputError: it is not a number, or is negative.
    """
    beta = _rope_settings(config).get(_BETA_KEY)
    if beta is None:
        return None
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < _MAX_BETA:
        raise InputError(
            f"{_BETA_KEY} = {str(beta)[:40]!r}", "a number from 0 on", subject="config.json"
        )
    return float(beta) or None


def yarn_log_multiplier(config: Mapping[str, Any]) -> float | None:
    """Return 1 if two equal YaRN factors cancel, which llama.cpp expresses by 1; None if there are none."""
    return 1.0 if _rope_settings(config).get("mscale_all_dim") else None


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None; errors as `query_growth`."""
    rope = _rope_settings(config)
    if config.get("model_type") != "ministral3":  # transformers uses another family then
        return "a decoder without model_type", "model_type = ministral3"
    if not rope:  # transformers' default is YaRN with its own settings
        return "a configuration without rope_parameters", "rope_parameters that are stated"
    if rope.get(_BETA_KEY) is None:
        return f"rope_parameters without {_BETA_KEY}, which transformers needs", "0 for none"
    if query_growth(config) and rope.get("rope_type", rope.get("type")) != "yarn":
        return f"{_BETA_KEY} without yarn", "the original context, a key of yarn"
    return None


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    return settings if isinstance(settings, Mapping) else {}


MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    defaults={**MISTRAL.defaults, "head_dim": 128, "rms_norm_eps": 1e-5},
    windows=WindowRule(every_layer=True, uses_layer_types=False),
    gguf=GgufFamily(
        "mistral3",
        permutes_qk=True,
        float_keys={
            "attention.temperature_scale": query_growth,
            "rope.scaling.yarn_log_multiplier": yarn_log_multiplier,
        },
        unsupported=unsupported_by_llama_cpp,
        reads_yarn_multiplier=True,
        reads_yarn_betas=True,
    ),
)


# Epsilon of the tower's norms in transformers' code; llama.cpp also uses it for the projector
_TOWER_EPSILON = 1e-5
_TOWER_ROPE_THETA = 1e4  # fixed in llama.cpp
_ACTIVATION_KEYS = {"silu": "use_silu", "gelu": "use_gelu"}


def mistral3_projector(config: Mapping[str, Any]) -> Projector:
    """Return the Pixtral tower and the projector of Mistral 3 for a whole configuration.

    Each row of image tokens ends with the embedding of a decoder token, which llama.cpp expects in the projector file.
    Errors as `TowerConfig`.
    """
    top_config, vision = TowerConfig(config, ""), TowerConfig(config["vision_config"])
    decoder_config = text_config(config)
    text = TowerConfig({"rms_norm_eps": 1e-6, **decoder_config}, "text_config")
    activation = vision.values.get("hidden_act", "gelu")
    _check_projector(top_config, vision, text, activation)
    sizes = vision.sizes(TowerSizes(1024, 4096, 24, 16, 14))
    width, _, _, heads, patch = sizes
    vision.require("head_dim", width // heads)
    image = vision.size("image_size", 1540)
    merge_size, decoder_width = (
        top_config.size("spatial_merge_size", 2),
        text.size("hidden_size", 5120),
    )
    has_bias = config.get("multimodal_projector_bias", False) is True
    block = {
        "attention_norm": "ln1", "ffn_norm": "ln2", "attention.q_proj": "attn_q", "attention.k_proj": "attn_k",
        "attention.v_proj": "attn_v", "attention.o_proj": "attn_out", "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down",
    }  # fmt: skip
    layers = block_tensors(
        "vision_tower.transformer.layers", sizes, block, norm_bias=False, bias=False
    )
    projector_module, tower = "multi_modal_projector", "vision_tower"
    return Projector(
        "pixtral",
        {
            _ACTIVATION_KEYS[activation]: True,
            **sizes.keys(image, _TOWER_EPSILON, decoder_width),
            "vision.spatial_merge_size": merge_size,
        },
        (
            weight_tensor(
                f"{tower}.patch_conv", "v.patch_embd", (width, 3, patch, patch), float32=True
            ),
            weight_tensor(f"{tower}.ln_pre", "v.pre_ln", (width,)),
            *(
                replace(tensor, rotary_heads=heads)
                if "q_proj" in tensor.name or "k_proj" in tensor.name
                else tensor
                for tensor in layers
            ),
            weight_tensor(f"{projector_module}.norm", "mm.input_norm", (width,)),
            weight_tensor(
                f"{projector_module}.patch_merger.merging_layer",
                "mm.patch_merger",
                (width, width * merge_size**2),
            ),
            *module_tensors(
                f"{projector_module}.linear_1", "mm.1", (decoder_width, width), bias=has_bias
            ),
            *module_tensors(
                f"{projector_module}.linear_2",
                "mm.2",
                (decoder_width, decoder_width),
                bias=has_bias,
            ),
        ),
        token_row=TokenRow("[IMG_BREAK]", "v.token_embd.img_break", decoder_width),
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


def _check_projector(
    top_config: TowerConfig, vision: TowerConfig, text: TowerConfig, activation: object
) -> None:
    """Refuse settings that llama.cpp supports with one value only."""
    vision.require("model_type", "pixtral")
    vision.require("num_channels", 3)
    top_config.require("projector_hidden_act", "gelu")
    top_config.require("vision_feature_layer", -1)
    text.require("rms_norm_eps", _TOWER_EPSILON)
    if activation not in _ACTIVATION_KEYS:
        raise unsupported_setting_error(
            f"vision_config.hidden_act = {str(activation)[:40]}", "silu or gelu"
        )
    vision.require_rope_theta(_TOWER_ROPE_THETA)


_MULTIMODAL_MISTRAL, _MULTIMODAL_MINISTRAL3 = (
    replace(
        multimodal_with_decoder_class(
            text,
            "mistral3",
            (r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
            (("language_model.", ""), ("model.language_model.", "model.")),
        ),
        graph=None,
        projector={"mistral3": mistral3_projector},
    )
    for text in (MISTRAL, MINISTRAL3)
)
MISTRAL3 = replace(
    _MULTIMODAL_MINISTRAL3, decoders_by_type=dict.fromkeys(("mistral", ""), _MULTIMODAL_MISTRAL)
)


FAMILIES = {
    "ministral": MISTRAL,
    "ministral3": MINISTRAL3,
    "mistral": MISTRAL,
    "mistral3": MISTRAL3,
    "mixtral": MIXTRAL,
}
