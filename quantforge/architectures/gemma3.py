"""Gemma 3: gemma 2 without soft-capping, with norms over the heads of q and k.

The larger models are multimodal: their text tower lies under a prefix, its configuration under ``text_config`` (with
most keys left at their defaults), and the vision tower with its projector is kept as it is.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from quantforge.architectures import gemma2, text_config
from quantforge.architectures.declare import ALONE, WITHIN_TOWERS, layer, norms
from quantforge.architectures.dimensions import dimensions_of
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family, Keys
from quantforge.architectures.projector import (
    SWAPPED,
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    module,
    not_carried,
    stack,
    weight,
)

HEAD_NORMS = norms("self_attn.q_norm", "self_attn.k_norm", dimension="head")
_LAYERS_27B = 62  # of the one release whose attention scale is another


def beyond_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what llama.cpp does not compute and what it does, or None: it tells the attention scale by the layers."""
    sizes = dimensions_of(config)
    is_27b = sizes.layers == _LAYERS_27B
    if other := gemma2.other_scale(config, sizes.hidden / sizes.heads if is_27b else sizes.head):
        return other
    if config.get("attn_logit_softcapping") or config.get("final_logit_softcapping"):
        return "soft-capping", "gemma3 has none"
    return None


def restated(keys: Keys) -> dict[str, Any]:
    """Return what the keys of a file say in ``config.json``."""
    base = keys.real("rope.freq_base_swa", 10_000.0)
    full: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": keys.real("rope.freq_base", 1e6),
    }
    if keys.text("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": keys.real("rope.scaling.factor", 1.0)}
    local = {"rope_type": "default", "rope_theta": base}
    rope = {"full_attention": full, "sliding_attention": local}
    return {**gemma2.sliding(keys, period=6), "rope_parameters": rope}


def projector(config: Mapping[str, Any]) -> Projector:
    """Return SigLIP with the projector of Gemma 3, for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_act", "gelu_pytorch_tanh")
    sizes = vision.sizes(TowerSizes(1152, 4304, 27, 16, 14))
    width, ffn, _, _, patch = sizes
    if ffn == width:
        raise not_carried(f"intermediate_size = hidden_size = {ffn}", SWAPPED)
    image = vision.size("image_size", 896)
    out = TowerConfig(text_config(config), "text_config").size("hidden_size", 2304)
    tokens = TowerConfig(config, "").size("mm_tokens_per_image", 256)
    side = image // patch
    pooled = side // isqrt(tokens) if isqrt(tokens) ** 2 == tokens else 0
    if not pooled or pooled * isqrt(tokens) != side:
        raise not_carried(
            f"mm_tokens_per_image = {tokens} of {side} x {side} patches",
            "a square that divides them",
        )
    block = {
        "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    }  # fmt: skip
    embeddings, projected = "vision_tower.embeddings", "multi_modal_projector"
    return Projector(
        "gemma3",
        {
            "use_gelu": True,
            **sizes.keys(image, vision.real("layer_norm_eps", 1e-6), out),
            "vision.projector.scale_factor": pooled,
        },
        (
            *module(
                f"{embeddings}.patch_embedding", "v.patch_embd", (width, 3, patch, patch), wide=True
            ),
            weight(
                f"{embeddings}.position_embedding",
                "v.position_embd",
                (side * side, width),
                wide=True,
            ),
            *stack("vision_tower.encoder.layers", sizes, block),
            *module("vision_tower.post_layernorm", "v.post_ln", (width,)),
            weight(f"{projected}.mm_soft_emb_norm", "mm.soft_emb_norm", (width,), plus_one=True),
            TowerTensor(
                f"{projected}.mm_input_projection_weight",
                ("mm.input_projection.weight",),
                (width, out),
            ),
        ),
        renamed=(("model.", ""), ("vision_tower.vision_model.", "vision_tower.")),
        unread=(r"vision_tower\.head\..*",),
    )


ARCHITECTURE = replace(
    gemma2.ARCHITECTURE,
    model_type="gemma3",
    kinds=(layer(gemma2.NORMS, HEAD_NORMS, *gemma2.MIXERS),),
    prefixes=(("", ""), ("language_model.", ""), ("model.language_model.", "model.")),
    unmapped={"gemma3": ALONE, "gemma3_text": WITHIN_TOWERS},
    foreign=(*gemma2.ARCHITECTURE.foreign, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    requires={"use_bidirectional_attention": False},
    defaults={
        **gemma2.ARCHITECTURE.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    text_config="text_config",
    fused_attention=True,
    windows=WindowRule(width=4096, period=6, period_key="sliding_window_pattern"),
    gguf=Family(
        "gemma3",
        norm_plus_one=True,
        class_name="Gemma3ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        period=6,
        windowed=True,
        obstacle=beyond_llama_cpp,
        restated=restated,
    ),
    projector={"gemma3": projector},
)
