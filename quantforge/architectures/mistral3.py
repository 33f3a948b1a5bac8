"""Mistral Small 3.1 and later, and Ministral 3: a mistral or a ministral3 beside a vision tower."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import ministral3, mistral, text_config
from quantforge.architectures.declare import beside_towers
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


_MISTRAL, _MINISTRAL = (
    replace(
        beside_towers(
            text.ARCHITECTURE,
            "mistral3",
            (r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
            (("language_model.", ""), ("model.language_model.", "model.")),
        ),
        graph=None,
        projector={"mistral3": projector},
    )
    for text in (mistral, ministral3)
)
ARCHITECTURE = replace(
    _MINISTRAL, decoders=dict.fromkeys((mistral.ARCHITECTURE.model_type, ""), _MISTRAL)
)
