"""Qwen 3.5 mixtures: a qwen3_5 with experts and a shared one in every layer; files hold them one by one or stacked."""

from dataclasses import replace

from quantforge.architectures import llama, qwen3, qwen3_5, qwen3_next
from quantforge.architectures.declare import QWEN_TOWER, beside_towers, layer
from quantforge.architectures.delta_net import DEFAULTS
from quantforge.architectures.mixtures import experts_in_one, router, shared_experts

MIXTURE = (
    router("mlp.gate"),
    *shared_experts("shared", module="mlp.shared_expert", gate="mlp.shared_expert_gate"),
    experts_in_one("inner"),
)
TEXT = replace(
    qwen3_5.TEXT,
    kinds=(
        layer(llama.NORMS, qwen3_5.TOKENS, *MIXTURE, name=qwen3_next.LINEAR),
        layer(qwen3.NORMS, qwen3_next.ATTENTION, *MIXTURE, name=qwen3_next.FULL),
    ),
    joins_experts=True,
    sizes=qwen3_next.ARCHITECTURE.sizes,
    defaults={
        **DEFAULTS,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 1,  # there is no dense layer
        "num_experts": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    },
)
ARCHITECTURE = beside_towers(TEXT, "qwen3_5_moe", (QWEN_TOWER,))
