"""Gemma 1 to 3: a llama whose norms multiply by 1 + w, with a tied head.

Gemma 2 has four norms per block, windows in every other layer, and soft-capped scores and logits; its activations
outgrow float16, so that engines have to compute it, and Gemma 3, in bfloat16 or float32. Gemma 3 has norms over the
heads of q and k in the place of the caps. Its larger models are multimodal: their text tower lies under a prefix, its
configuration under ``text_config`` (with most keys left at their defaults), and the vision tower with its projector is
kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

from quantforge.architectures import FoldKind, ScaleFold, text_config
from quantforge.architectures.declare import (
    ALONE,
    HEAD_NORMS,
    WITHIN_TOWERS,
    attention,
    gated_mlp,
    layer,
    norms,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dimensions import dimensions_of
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import NONE, WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, Keys, types_of_period
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

NORMS = norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
MIXERS = (
    attention("attention_bias", norm=ScaleFold(FoldKind.NORM_PLUS_ONE, "input_layernorm")),
    gated_mlp(norm=ScaleFold(FoldKind.NORM_PLUS_ONE, "pre_feedforward_layernorm")),
)
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # of the releases whose attention scale is another


def other_scale(layers_27b: int, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the scale of attention scores that a configuration states, and llama.cpp's; None where they are equal.

    llama.cpp recognizes the 27B model, which divides by another number, by its layers.
    """
    sizes, scale = dimensions_of(config), config.get("query_pre_attn_scalar", 256)
    computed = sizes.hidden / sizes.heads if sizes.layers == layers_27b else sizes.head
    if scale == computed:
        return None
    return f"query_pre_attn_scalar = {scale}", f"llama.cpp divides by sqrt({computed:g})"


def gemma2_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**sliding(keys, period=2), **{key: keys.real(key) for key in caps}}


def sliding(keys: Keys, period: int) -> dict[str, Any]:
    """Return what ``config.json`` of a gemma says, in which the last layer of each ``period`` sees everything."""
    usual = keys.usual()
    return {
        **usual,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": types_of_period(usual["num_hidden_layers"], period),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": usual["head_dim"],
    }


GEMMA2 = replace(
    llama.ARCHITECTURE,
    model_type="gemma2",
    kinds=(layer(NORMS, *MIXERS),),
    requires={"use_bidirectional_attention": None},
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "tie_word_embeddings": True,
    },
    float16=False,
    fused_attention=False,
    graph=DecoderGraph(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    windows=WindowRule(width=4096, period=2),
    gguf=GgufFamily(
        "gemma2",
        norm_plus_one=True,
        head=False,
        class_name="Gemma2ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        period=2,
        windowed=True,
        softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        unsupported=partial(other_scale, _LAYERS_27B["gemma2"]),
        read_config=gemma2_config,
    ),
)


BEFORE = tuple(
    ScaleFold(FoldKind.NORM_PLUS_ONE, name)
    for name in ("input_layernorm", "post_attention_layernorm")
)
GEMMA = replace(
    GEMMA2,
    model_type="gemma",
    kinds=(
        layer(llama.NORMS, attention("attention_bias", norm=BEFORE[0]), gated_mlp(norm=BEFORE[1])),
    ),
    defaults={**GEMMA2.defaults, "num_attention_heads": 16, "num_key_value_heads": 16},
    fused_attention=True,
    graph=llama.ARCHITECTURE.graph,
    gguf=GgufFamily(
        "gemma",
        norm_plus_one=True,
        head=False,
        class_name="GemmaForCausalLM",
        activations=("gelu_pytorch_tanh", "gelu"),  # to transformers one, as in the first releases
    ),
    windows=NONE,
)


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None."""
    if other := other_scale(_LAYERS_27B["gemma3"], config):
        return other
    if config.get("attn_logit_softcapping") or config.get("final_logit_softcapping"):
        return "soft-capping", "gemma3 has none"
    return None


def gemma3_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    base = keys.real("rope.freq_base_swa", 10_000.0)
    full: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": keys.real("rope.freq_base", 1e6),
    }
    if keys.text("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": keys.real("rope.scaling.factor", 1.0)}
    local = {"rope_type": "default", "rope_theta": base}
    rope = {"full_attention": full, "sliding_attention": local}
    return {**sliding(keys, period=6), "rope_parameters": rope}


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


GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3",
    kinds=(layer(NORMS, HEAD_NORMS, *MIXERS),),
    prefixes=(("", ""), ("language_model.", ""), ("model.language_model.", "model.")),
    unmapped={"gemma3": ALONE, "gemma3_text": WITHIN_TOWERS},
    foreign=(*GEMMA2.foreign, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    requires={"use_bidirectional_attention": False},
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    text_config="text_config",
    fused_attention=True,
    windows=WindowRule(width=4096, period=6, period_key="sliding_window_pattern"),
    gguf=GgufFamily(
        "gemma3",
        norm_plus_one=True,
        class_name="Gemma3ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        period=6,
        windowed=True,
        rope_base=1e6,
        sliding_base=True,
        unsupported=unsupported_by_llama_cpp,
        read_config=gemma3_config,
    ),
    projector={"gemma3": projector},
)


FAMILIES = {"gemma": GEMMA, "gemma2": GEMMA2, "gemma3": GEMMA3, "gemma3_text": GEMMA3}
