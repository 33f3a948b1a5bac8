"""Gemma 1 to 3: a llama whose norms multiply by 1 + w, with a tied head.

Gemma 2 has four norms per block, sliding windows in every other layer, and soft-capped attention scores and logits. Its
activations overflow float16, so engines have to compute Gemma 2 and 3 in bfloat16 or float32. Gemma 3 has per-head
norms of q and k instead of the caps. Its larger models are multimodal: the text decoder has a name prefix, its
configuration is nested under ``text_config`` (most keys keep their defaults), and the vision tower and its projector
are kept unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

from quantforge.architectures import FoldKind, ScaleFold, text_config
from quantforge.architectures.declare import (
    HEAD_NORMS,
    NESTED_DECODER_NAMES,
    STANDALONE_DECODER_NAMES,
    attention,
    compose_layer,
    gated_mlp,
    norm_parameters,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dimensions import read_dimensions
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import NO_WINDOWS, WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, GgufKeys, periodic_layer_types
from quantforge.architectures.projector import (
    SWAPPED_MLP_HINT,
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    block_tensors,
    module_tensors,
    unsupported_setting_error,
    weight_tensor,
)

NORMS = norm_parameters(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
MIXERS = (
    attention("attention_bias", norm=ScaleFold(FoldKind.NORM_PLUS_ONE, "input_layernorm")),
    gated_mlp(norm=ScaleFold(FoldKind.NORM_PLUS_ONE, "pre_feedforward_layernorm")),
)
# Numbers of layers of the released models with another attention scale
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def unsupported_attention_scale(
    layers_27b: int, config: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return the configured scale of attention scores and llama.cpp's; None if they are equal.

    llama.cpp recognizes the 27B model, which uses another scale, by its number of layers.
    """
    sizes, scale = read_dimensions(config), config.get("query_pre_attn_scalar", 256)
    expected_width = sizes.hidden / sizes.heads if sizes.layers == layers_27b else sizes.head
    if scale == expected_width:
        return None
    return f"query_pre_attn_scalar = {scale}", f"llama.cpp divides by sqrt({expected_width:g})"


def gemma2_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**sliding_window_config(keys, period=2), **{key: keys.get_float(key) for key in caps}}


def sliding_window_config(keys: GgufKeys, period: int) -> dict[str, Any]:
    """Return the ``config.json`` of a gemma in which the last layer of each ``period`` has full attention."""
    llama_config = keys.llama_config()
    return {
        **llama_config,
        "sliding_window": keys.get_int("attention.sliding_window"),
        "layer_types": periodic_layer_types(llama_config["num_hidden_layers"], period),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": llama_config["head_dim"],
    }


GEMMA2 = replace(
    llama.ARCHITECTURE,
    model_type="gemma2",
    kinds=(compose_layer(NORMS, *MIXERS),),
    required_values={"use_bidirectional_attention": None},
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "tie_word_embeddings": True,
    },
    allows_float16=False,
    fused_attention=False,
    graph=DecoderGraph(
        norm_after_attention="post_attention_layernorm",
        norm_before_mlp="pre_feedforward_layernorm",
        norm_after_mlp="post_feedforward_layernorm",
    ),
    windows=WindowRule(width=4096, period=2),
    gguf=GgufFamily(
        "gemma2",
        norm_plus_one=True,
        has_output_matrix=False,
        transformers_class="Gemma2ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        window_period=2,
        supports_window=True,
        softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        unsupported=partial(unsupported_attention_scale, _LAYERS_OF_27B["gemma2"]),
        read_config=gemma2_config,
    ),
)


FOLDS_INTO_NORMS = tuple(
    ScaleFold(FoldKind.NORM_PLUS_ONE, name)
    for name in ("input_layernorm", "post_attention_layernorm")
)
GEMMA = replace(
    GEMMA2,
    model_type="gemma",
    kinds=(
        compose_layer(
            llama.NORMS,
            attention("attention_bias", norm=FOLDS_INTO_NORMS[0]),
            gated_mlp(norm=FOLDS_INTO_NORMS[1]),
        ),
    ),
    defaults={**GEMMA2.defaults, "num_attention_heads": 16, "num_key_value_heads": 16},
    fused_attention=True,
    graph=llama.ARCHITECTURE.graph,
    gguf=GgufFamily(
        "gemma",
        norm_plus_one=True,
        has_output_matrix=False,
        transformers_class="GemmaForCausalLM",
        activations=(
            "gelu_pytorch_tanh",
            "gelu",
        ),  # transformers treats both alike, as in the first releases
    ),
    windows=NO_WINDOWS,
)


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None."""
    if other := unsupported_attention_scale(_LAYERS_OF_27B["gemma3"], config):
        return other
    if config.get("attn_logit_softcapping") or config.get("final_logit_softcapping"):
        return "soft-capping", "gemma3 has none"
    return None


def gemma3_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    sliding_base = keys.get_float("rope.freq_base_swa", 10_000.0)
    full_rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": keys.get_float("rope.freq_base", 1e6),
    }
    if keys.get_str("rope.scaling.type") == "linear":
        full_rope |= {"rope_type": "linear", "factor": keys.get_float("rope.scaling.factor", 1.0)}
    sliding_rope = {"rope_type": "default", "rope_theta": sliding_base}
    rope = {"full_attention": full_rope, "sliding_attention": sliding_rope}
    return {**sliding_window_config(keys, period=6), "rope_parameters": rope}


def gemma3_projector(config: Mapping[str, Any]) -> Projector:
    """Return SigLIP and the projector of Gemma 3 for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_act", "gelu_pytorch_tanh")
    sizes = vision.sizes(TowerSizes(1152, 4304, 27, 16, 14))
    width, ffn, _, _, patch = sizes
    if ffn == width:
        raise unsupported_setting_error(
            f"intermediate_size = hidden_size = {ffn}", SWAPPED_MLP_HINT
        )
    image = vision.size("image_size", 896)
    decoder_width = TowerConfig(text_config(config), "text_config").size("hidden_size", 2304)
    image_tokens = TowerConfig(config, "").size("mm_tokens_per_image", 256)
    patches_per_side = image // patch
    pool_size = (
        patches_per_side // isqrt(image_tokens) if isqrt(image_tokens) ** 2 == image_tokens else 0
    )
    if not pool_size or pool_size * isqrt(image_tokens) != patches_per_side:
        raise unsupported_setting_error(
            f"mm_tokens_per_image = {image_tokens} of {patches_per_side} x {patches_per_side} patches",
            "a square that divides them",
        )
    block = {
        "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    }  # fmt: skip
    embeddings, projector_module = "vision_tower.embeddings", "multi_modal_projector"
    return Projector(
        "gemma3",
        {
            "use_gelu": True,
            **sizes.keys(image, vision.fraction("layer_norm_eps", 1e-6), decoder_width),
            "vision.projector.scale_factor": pool_size,
        },
        (
            *module_tensors(
                f"{embeddings}.patch_embedding",
                "v.patch_embd",
                (width, 3, patch, patch),
                float32=True,
            ),
            weight_tensor(
                f"{embeddings}.position_embedding",
                "v.position_embd",
                (patches_per_side * patches_per_side, width),
                float32=True,
            ),
            *block_tensors("vision_tower.encoder.layers", sizes, block),
            *module_tensors("vision_tower.post_layernorm", "v.post_ln", (width,)),
            weight_tensor(
                f"{projector_module}.mm_soft_emb_norm", "mm.soft_emb_norm", (width,), plus_one=True
            ),
            TowerTensor(
                f"{projector_module}.mm_input_projection_weight",
                ("mm.input_projection.weight",),
                (width, decoder_width),
            ),
        ),
        renamed_prefixes=(("model.", ""), ("vision_tower.vision_model.", "vision_tower.")),
        unused_tensors=(r"vision_tower\.head\..*",),
    )


GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3",
    kinds=(compose_layer(NORMS, HEAD_NORMS, *MIXERS),),
    prefixes=(("", ""), ("language_model.", ""), ("model.language_model.", "model.")),
    unmapped_prefixes={"gemma3": STANDALONE_DECODER_NAMES, "gemma3_text": NESTED_DECODER_NAMES},
    foreign_patterns=(
        *GEMMA2.foreign_patterns,
        r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    ),
    required_values={"use_bidirectional_attention": False},
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
        transformers_class="Gemma3ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        window_period=6,
        supports_window=True,
        default_rope_base=1e6,
        has_sliding_rope_base=True,
        unsupported=unsupported_by_llama_cpp,
        read_config=gemma3_config,
    ),
    projector={"gemma3": gemma3_projector},
)


FAMILIES = {"gemma": GEMMA, "gemma2": GEMMA2, "gemma3": GEMMA3, "gemma3_text": GEMMA3}
