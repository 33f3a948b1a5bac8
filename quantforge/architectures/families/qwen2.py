"""Qwen 1.5 to 2.5: a llama with biases of q, k and v, but not of the output projection.

Mixtures have experts and a shared expert, whose output is multiplied by a gate.
"""

from __future__ import annotations

from dataclasses import replace

from quantforge.architectures.declare import ALWAYS_BIAS, attention, compose_layer, gated_mlp
from quantforge.architectures.families import llama, qwen3
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import QKV_BIASES, GgufFamily
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    router_parameters,
    shared_experts,
    single_experts,
)

QWEN2 = replace(
    llama.ARCHITECTURE,
    model_type="qwen2",
    kinds=(compose_layer(llama.NORMS, attention(ALWAYS_BIAS, output_bias=""), gated_mlp()),),
    defaults={"num_key_value_heads": 32},
    windows=WindowRule(width=4096, needs_use_sliding_window=True, start=("max_window_layers", 28)),
    gguf=GgufFamily(
        "qwen2",
        bias_suffixes=QKV_BIASES,
        transformers_class="Qwen2ForCausalLM",
        heads_fill_width=True,
        config_window_default=4096,
    ),
)


QWEN2_MOE = replace(
    qwen3.QWEN3_MOE,
    model_type="qwen2_moe",
    kinds=dense_or_sparse(
        llama.NORMS,
        attention("qkv_bias", output_bias=""),
        dense=gated_mlp(),
        sparse=(
            router_parameters("mlp.gate"),
            single_experts("inner"),
            *shared_experts("shared", module="mlp.shared_expert", gate="mlp.shared_expert_gate"),
        ),
    ),
    sizes={**qwen3.QWEN3_MOE.sizes, "shared": ("shared_expert_intermediate_size",)},
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
    gguf=GgufFamily(
        "qwen2moe",
        has_experts=True,
        bias_suffixes=QKV_BIASES,
        heads_fill_width=True,
        size_keys={
            "expert_feed_forward_length": "inner",
            "expert_shared_feed_forward_length": "shared",
        },
        required_values={
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    windows=WindowRule(
        width=4096, needs_use_sliding_window=True, period=2, stop=("max_window_layers", 28)
    ),
)


FAMILIES = {"qwen2": QWEN2, "qwen2_moe": QWEN2_MOE}
