"""Hunyuan mixtures: a llama with experts and a shared MLP in every layer, and norms over heads of q and k."""

from dataclasses import replace

from quantforge.architectures import hunyuan_v1_dense, llama
from quantforge.architectures.declare import attention, layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import Family
from quantforge.architectures.mixtures import experts_one_by_one, router, shared_experts

HEAD_NORMS = norms("self_attn.query_layernorm", "self_attn.key_layernorm", dimension="head")
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="hunyuan_v1_moe",
    graph=DecoderGraph(
        head_norms=("query_layernorm", "key_layernorm"), norms_behind=True, experts=True
    ),
    kinds=(
        layer(
            (*llama.NORMS, *HEAD_NORMS),
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
    gguf=Family(
        "hunyuan-moe",
        experts=True,
        base=hunyuan_v1_dense.base,
        used="moe_topk",
        sizes={
            "expert_feed_forward_length": "ffn",
            "expert_shared_feed_forward_length": "ffn",
        },
        numbers={"expert_shared_count": 1},
    ),
)
