"""GLM 4 (2024, 2025) and its mixtures, GLM 4.5 to 4.7.

``glm`` is a llama with gate and up in one matrix, which rotates every other value of the first half of a head;
``glm4`` has further norms after attention and after the MLP. ``glm4_moe`` is a llama with dense first layers, then
experts with shared ones, and optional norms over heads. ``glm4_moe_lite`` (Flash) is a deepseek_v3 with sizes of its
own, whose dense layers may be listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import (
    GATE_UP_LABELS,
    GATE_UP_SLICES,
    HEAD_NORMS,
    attention,
    compose_layer,
    fused_mlp,
    gated_mlp,
    norm_parameters,
    only_when,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import deepseek, llama
from quantforge.architectures.families.deepseek import GGUF_FAMILY, MIXTURE
from quantforge.architectures.llama_cpp import QKV_BIASES, GgufFamily
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    kinds_by_first_k_dense,
    kinds_by_mlp_layer_types,
)

MIXERS = (attention("attention_bias", output_bias=""), fused_mlp())
GLM = replace(
    llama.ARCHITECTURE,
    model_type="glm",
    kinds=(compose_layer(llama.NORMS, *MIXERS),),
    slices=GATE_UP_SLICES,
    slice_labels=GATE_UP_LABELS,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    graph=DecoderGraph(interleaved_rotary=True),
    gguf=GgufFamily(
        "chatglm",
        bias_suffixes=QKV_BIASES,
        transformers_class="GlmForCausalLM",
        heads_fill_width=True,
    ),
)


AFTER = norm_parameters("post_self_attn_layernorm", "post_mlp_layernorm")
GLM4 = replace(
    GLM,
    model_type="glm4",
    kinds=(compose_layer(llama.NORMS, AFTER, *MIXERS),),
    graph=DecoderGraph(
        norm_after_attention="post_self_attn_layernorm",
        norm_after_mlp="post_mlp_layernorm",
        interleaved_rotary=True,
    ),
    gguf=GgufFamily("glm4", bias_suffixes=QKV_BIASES, transformers_class="Glm4ForCausalLM"),
)


GLM4_MOE = replace(
    llama.ARCHITECTURE,
    model_type="glm4_moe",
    graph=DecoderGraph(supports_experts=True),
    kinds=dense_or_sparse(
        llama.NORMS,
        only_when("use_qk_norm", HEAD_NORMS),
        attention("attention_bias", output_bias=""),
        dense=gated_mlp(),
        sparse=MIXTURE,
    ),
    layer_kind_names=kinds_by_first_k_dense,
    sizes={
        "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("n_shared_experts",),
    },
    defaults={
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
    },
    gguf=replace(GGUF_FAMILY, arch="glm4moe", bias_suffixes=QKV_BIASES),
)


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `kinds_by_mlp_layer_types`."""
    return deepseek.with_query_latent_prefix(config, kinds_by_mlp_layer_types(config))


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None."""
    if kinds_by_mlp_layer_types(config) != kinds_by_first_k_dense(config):
        return "mlp_layer_types", "dense layers first, as many as first_k_dense_replace says"
    return deepseek.unsupported_by_llama_cpp(config)


GLM4_MOE_LITE = replace(
    deepseek.DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    layer_kind_names=layer_kind_names,
    gguf=replace(deepseek.LATENT_GGUF_FAMILY, unsupported=unsupported_by_llama_cpp),
    defaults={
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": True,
    },
)


FAMILIES = {
    "glm": GLM,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
}
