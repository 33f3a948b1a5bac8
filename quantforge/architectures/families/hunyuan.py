"""Hunyuan: a llama with per-head RMSNorms of q and k, after the rotary embedding.

Mixtures have experts and a shared MLP in every layer. Published models declare dynamic rotary scaling with an
``alpha``, which only changes the base of the frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import attention, compose_layer, gated_mlp, norm_parameters
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dimensions import read_dimensions
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import router_parameters, shared_experts, single_experts
from quantforge.errors import InputError

HEAD_NORMS = norm_parameters(
    "self_attn.query_layernorm", "self_attn.key_layernorm", dimension="head"
)
DECODER_GRAPH = DecoderGraph(
    head_norms=("query_layernorm", "key_layernorm"), qk_norms_after_rotation=True
)


def scaled_rope_base(config: Mapping[str, Any]) -> float | None:
    """Return the rotary base that results from ``alpha``; None if there is no ``alpha``.

    Raises:
        InputError: a value is not a positive number.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or not scaling.get("alpha"):
        return None
    if scaling.get("rope_type", scaling.get("type")) != "dynamic":
        return None
    width = read_dimensions(config).head
    values = (scaling.get("rope_theta", config.get("rope_theta", 1e4)), scaling["alpha"])
    if width < 4 or not all(type(value) in {int, float} and 0 < value < 1e30 for value in values):
        raise InputError(
            f"base and alpha of the rope scaling are {values}",
            "two positive numbers",
            subject="config.json",
        )
    theta, alpha = values
    return float(theta * alpha ** (width / (width - 2)))


HUNYUAN_V1_DENSE = replace(
    llama.ARCHITECTURE,
    model_type="hunyuan_v1_dense",
    kinds=(compose_layer(llama.NORMS, HEAD_NORMS, attention("attention_bias"), gated_mlp()),),
    defaults={"rms_norm_eps": 1e-5},
    graph=DECODER_GRAPH,
    gguf=GgufFamily(
        "hunyuan-dense",
        transformers_class="HunYuanDenseV1ForCausalLM",
        scaled_rope_base=scaled_rope_base,
    ),
)


HUNYUAN_V1_MOE = replace(
    llama.ARCHITECTURE,
    model_type="hunyuan_v1_moe",
    graph=replace(DECODER_GRAPH, supports_experts=True),
    kinds=(
        compose_layer(
            llama.NORMS,
            HEAD_NORMS,
            attention("attention_bias"),
            router_parameters("mlp.gate.wg"),
            single_experts("ffn"),
            *shared_experts("ffn", module="mlp.shared_mlp"),
        ),
    ),
    sizes={"experts": ("num_experts", "num_local_experts")},
    defaults={
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "num_experts": 1,
        "moe_topk": 1,
    },
    gguf=GgufFamily(
        "hunyuan-moe",
        has_experts=True,
        scaled_rope_base=scaled_rope_base,
        used_experts_key="moe_topk",
        size_keys={
            "expert_feed_forward_length": "ffn",
            "expert_shared_feed_forward_length": "ffn",
        },
        integer_keys={"expert_shared_count": 1},
    ),
)


FAMILIES = {
    "hunyuan_v1_dense": HUNYUAN_V1_DENSE,
    "hunyuan_v1_moe": HUNYUAN_V1_MOE,
}
