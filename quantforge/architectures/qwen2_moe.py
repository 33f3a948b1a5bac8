"""Qwen 1.5 and 2 mixtures: a qwen2 with experts and a shared expert, whose output a gate weighs."""

from dataclasses import replace

from quantforge.architectures import llama, qwen3_moe
from quantforge.architectures.declare import attention, gated_mlp
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_one_by_one,
    router,
    shared_experts,
)

ARCHITECTURE = replace(
    qwen3_moe.ARCHITECTURE,
    model_type="qwen2_moe",
    kinds=dense_or_sparse(
        llama.NORMS,
        attention("qkv_bias", output_bias=""),
        dense=gated_mlp(),
        sparse=(
            router("mlp.gate"),
            experts_one_by_one("inner"),
            *shared_experts("shared", module="mlp.shared_expert", gate="mlp.shared_expert_gate"),
        ),
    ),
    sizes={**qwen3_moe.ARCHITECTURE.sizes, "shared": ("shared_expert_intermediate_size",)},
    defaults={
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "qkv_bias": True,
        "num_experts": 60,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    gguf=Family(
        "qwen2moe",
        experts=True,
        biases=("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        heads_fill=True,
        sizes={
            "expert_feed_forward_length": "inner",
            "expert_shared_feed_forward_length": "shared",
        },
        graph={
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    windows=WindowRule(width=4096, asked=True, period=2, stop=("max_window_layers", 28)),
)
