"""Hunyuan: a llama with an RMSNorm over each head of q and k, after the rotation.

Mixtures have experts and a shared MLP in every layer. Published models call the scaling of their positions dynamic, and
state an ``alpha``: it changes the base alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import attention, gated_mlp, layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dimensions import dimensions_of
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import experts_one_by_one, router, shared_experts
from quantforge.errors import InputError

HEAD_NORMS = norms("self_attn.query_layernorm", "self_attn.key_layernorm", dimension="head")
GRAPH = DecoderGraph(head_norms=("query_layernorm", "key_layernorm"), norms_after_rotation=True)


def base(config: Mapping[str, Any]) -> float | None:
    """Return the base of the frequencies that ``alpha`` makes; None where there is none.

    Raises:
        InputError: a value is no positive number.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or not scaling.get("alpha"):
        return None
    if scaling.get("rope_type", scaling.get("type")) != "dynamic":
        return None
    width = dimensions_of(config).head
    values = (scaling.get("rope_theta", config.get("rope_theta", 1e4)), scaling["alpha"])
    if width < 4 or not all(type(one) in {int, float} and 0 < one < 1e30 for one in values):
        raise InputError(
            f"config.json: base and alpha of the rope scaling are {values}", "two positive numbers"
        )
    theta, alpha = values
    return float(theta * alpha ** (width / (width - 2)))


HUNYUAN_V1_DENSE = replace(
    llama.ARCHITECTURE,
    model_type="hunyuan_v1_dense",
    kinds=(layer(llama.NORMS, HEAD_NORMS, attention("attention_bias"), gated_mlp()),),
    defaults={"rms_norm_eps": 1e-5},
    graph=GRAPH,
    gguf=GgufFamily("hunyuan-dense", class_name="HunYuanDenseV1ForCausalLM", base=base),
)


HUNYUAN_V1_MOE = replace(
    llama.ARCHITECTURE,
    model_type="hunyuan_v1_moe",
    graph=replace(GRAPH, experts=True),
    kinds=(
        layer(
            llama.NORMS,
            HEAD_NORMS,
            attention("attention_bias"),
            router("mlp.gate.wg"),
            experts_one_by_one("ffn"),
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
        experts=True,
        base=base,
        used="moe_topk",
        sizes={
            "expert_feed_forward_length": "ffn",
            "expert_shared_feed_forward_length": "ffn",
        },
        numbers={"expert_shared_count": 1},
    ),
)


FAMILIES = {
    "hunyuan_v1_dense": HUNYUAN_V1_DENSE,
    "hunyuan_v1_moe": HUNYUAN_V1_MOE,
}
