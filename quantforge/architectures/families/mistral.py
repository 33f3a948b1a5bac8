"""Mistral, Ministral, Mixtral and Mistral Small 3.

Mistral and Ministral are a llama without biases, with a sliding window in all layers or in some. Mixtral has experts in
place of the MLP, stored one by one under names of their own. In Ministral 3 queries grow with the logarithm of their
position, beyond the original context. ``mistral3``, Mistral Small 3.1 and later and Ministral 3, is one of these beside
a vision tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.declare import attention, beside_towers, gated_mlp, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import (
    LLAMA_BIASES,
    WITH_TABLE,
    GgufFamily,
    Keys,
    experts_config,
)
from quantforge.architectures.mixtures import experts_one_by_one, router
from quantforge.architectures.projector import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    Projector,
    TokenRow,
    TowerConfig,
    TowerSizes,
    module,
    not_carried,
    stack,
    weight,
)
from quantforge.errors import InputError

MISTRAL = replace(
    llama.ARCHITECTURE,
    model_type="mistral",
    kinds=(layer(llama.NORMS, attention(), gated_mlp()),),
    defaults={"num_key_value_heads": 8},
    with_layer_types={"mistral": "ministral"},  # the one that obeys layers without a window
    graph=DecoderGraph(one_window=True),
    windows=WindowRule(width=4096, every=True),
    gguf=GgufFamily(
        "llama",
        counts_vocabulary=True,
        interleaved=True,
        biases=LLAMA_BIASES,
        window=4096,
        scalings=WITH_TABLE,
    ),
)
# llama.cpp has no graph in which some layers have a window and others none.
MISTRAL = replace(MISTRAL, decoders={"ministral": replace(MISTRAL, gguf=None)})


STORED, STORED_NAMES = "block_sparse_moe", ("w1", "w3", "w2")


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    return {**keys.usual(), "hidden_act": "silu", **experts_config(keys)}


MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    graph=DecoderGraph(one_window=True, experts=True),
    kinds=(
        layer(
            llama.NORMS,
            attention(),
            router("mlp.gate", stored=f"{STORED}.gate.weight"),
            experts_one_by_one("ffn", stored_module=f"{STORED}.experts", stored=STORED_NAMES),
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
    windows=WindowRule(every=True, listed=False),
    gguf=GgufFamily(
        "llama",
        counts_vocabulary=True,
        interleaved=True,
        experts=True,
        class_name="MixtralForCausalLM",
        scalings=WITH_TABLE,
        read_config=read_config,
    ),
)


_BETA, _MOST = "llama_4_scaling_beta", 1e6


def growth(config: Mapping[str, Any]) -> float | None:
    """Return by how much queries grow with the logarithm of their position; None where they do not.

    Raises:
        InputError: it is no number, or below 0.
    """
    beta = _rope(config).get(_BETA)
    if beta is None:
        return None
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < _MOST:
        raise InputError(f"config.json: {_BETA} = {str(beta)[:40]!r}", "a number from 0 on")
    return float(beta) or None


def multiplier(config: Mapping[str, Any]) -> float | None:
    """Return 1 where two equal factors of YaRN cancel, as 1 does in llama.cpp; None where there are none."""
    return 1.0 if _rope(config).get("mscale_all_dim") else None


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None; errors as `growth`."""
    rope = _rope(config)
    if config.get("model_type") != "ministral3":  # transformers takes another family then
        return "a decoder without model_type", "model_type = ministral3"
    if not rope:  # transformers' own default is YaRN with all that belongs to it
        return "a configuration without rope_parameters", "rope_parameters that are stated"
    if rope.get(_BETA) is None:
        return f"rope_parameters without {_BETA}, which transformers needs", "0 for none"
    if growth(config) and rope.get("rope_type", rope.get("type")) != "yarn":
        return f"{_BETA} without yarn", "the original context, a key of yarn"
    return None


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    return stated if isinstance(stated, Mapping) else {}


MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    defaults={**MISTRAL.defaults, "head_dim": 128, "rms_norm_eps": 1e-5},
    windows=WindowRule(every=True, listed=False),
    gguf=GgufFamily(
        "mistral3",
        interleaved=True,
        reals={
            "attention.temperature_scale": growth,
            "rope.scaling.yarn_log_multiplier": multiplier,
        },
        unsupported=unsupported_by_llama_cpp,
        yarn_multiplier=True,
        yarn_betas=True,
    ),
)


_EPS = 1e-5  # of the tower's norms, in transformers' code; llama.cpp has one for the projector, too
_THETA = 1e4  # llama.cpp has it built in
_ACTIVATIONS = {"silu": "use_silu", "gelu": "use_gelu"}


def projector(config: Mapping[str, Any]) -> Projector:
    """Return Pixtral's tower with the projector of Mistral 3, for a whole configuration; errors as `TowerConfig`.

    Rows of a picture's tokens end with the embedding of a token of the decoder, which llama.cpp wants beside the tower.
    """
    whole, vision = TowerConfig(config, ""), TowerConfig(config["vision_config"])
    words = text_config(config)
    text = TowerConfig({"rms_norm_eps": 1e-6, **words}, "text_config")
    activation = vision.values.get("hidden_act", "gelu")
    _check(whole, vision, text, activation)
    sizes = vision.sizes(TowerSizes(1024, 4096, 24, 16, 14))
    width, _, _, heads, patch = sizes
    vision.require("head_dim", width // heads)
    image = vision.size("image_size", 1540)
    merged, out = whole.size("spatial_merge_size", 2), text.size("hidden_size", 5120)
    biased = config.get("multimodal_projector_bias", False) is True
    block = {
        "attention_norm": "ln1", "ffn_norm": "ln2", "attention.q_proj": "attn_q", "attention.k_proj": "attn_k",
        "attention.v_proj": "attn_v", "attention.o_proj": "attn_out", "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down",
    }  # fmt: skip
    layers = stack("vision_tower.transformer.layers", sizes, block, norm_bias=False, bias=False)
    joined, tower = "multi_modal_projector", "vision_tower"
    return Projector(
        "pixtral",
        {
            _ACTIVATIONS[activation]: True,
            **sizes.keys(image, _EPS, out),
            "vision.spatial_merge_size": merged,
        },
        (
            weight(f"{tower}.patch_conv", "v.patch_embd", (width, 3, patch, patch), wide=True),
            weight(f"{tower}.ln_pre", "v.pre_ln", (width,)),
            *(
                replace(tensor, heads=heads)
                if "q_proj" in tensor.name or "k_proj" in tensor.name
                else tensor
                for tensor in layers
            ),
            weight(f"{joined}.norm", "mm.input_norm", (width,)),
            weight(
                f"{joined}.patch_merger.merging_layer",
                "mm.patch_merger",
                (width, width * merged**2),
            ),
            *module(f"{joined}.linear_1", "mm.1", (out, width), bias=biased),
            *module(f"{joined}.linear_2", "mm.2", (out, out), bias=biased),
        ),
        row=TokenRow("[IMG_BREAK]", "v.token_embd.img_break", out),
        mean=CLIP_MEAN,
        deviation=CLIP_DEVIATION,
    )


def _check(whole: TowerConfig, vision: TowerConfig, text: TowerConfig, activation: object) -> None:
    """Refuse what llama.cpp computes in one way alone."""
    vision.require("model_type", "pixtral")
    vision.require("num_channels", 3)
    whole.require("projector_hidden_act", "gelu")
    whole.require("vision_feature_layer", -1)
    text.require("rms_norm_eps", _EPS)
    if activation not in _ACTIVATIONS:
        raise not_carried(f"vision_config.hidden_act = {str(activation)[:40]}", "silu or gelu")
    vision.require_theta(_THETA)


_OF_MISTRAL, _OF_MINISTRAL3 = (
    replace(
        beside_towers(
            text,
            "mistral3",
            (r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
            (("language_model.", ""), ("model.language_model.", "model.")),
        ),
        graph=None,
        projector={"mistral3": projector},
    )
    for text in (MISTRAL, MINISTRAL3)
)
MISTRAL3 = replace(_OF_MINISTRAL3, decoders=dict.fromkeys(("mistral", ""), _OF_MISTRAL))


FAMILIES = {
    "ministral": MISTRAL,
    "ministral3": MINISTRAL3,
    "mistral": MISTRAL,
    "mistral3": MISTRAL3,
    "mixtral": MIXTRAL,
}
