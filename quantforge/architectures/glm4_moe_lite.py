"""GLM 4.7 Flash: a deepseek_v3 with sizes of its own, whose dense layers may be listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import deepseek_v3
from quantforge.architectures.mixtures import listed, replaced_first


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `listed`."""
    return deepseek_v3.by_queries(config, listed(config))


def beyond_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what llama.cpp does not compute and what it does, or None."""
    if listed(config) != replaced_first(config):
        return "mlp_layer_types", "dense layers first, as many as first_k_dense_replace says"
    return deepseek_v3.beyond_llama_cpp(config)


ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    model_type="glm4_moe_lite",
    kind_of=kinds,
    gguf=replace(deepseek_v3.LATENT_GGUF, obstacle=beyond_llama_cpp),
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
