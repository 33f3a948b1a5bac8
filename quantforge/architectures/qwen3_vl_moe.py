"""Qwen 3 VL mixtures: a qwen3_vl with experts, which files hold stacked, ``[experts, in, out]`` in the published ones."""

from dataclasses import replace

from quantforge.architectures import qwen3_moe
from quantforge.architectures.declare import attention, gated_mlp
from quantforge.architectures.mixtures import dense_or_sparse, experts_in_one, router
from quantforge.architectures.qwen3 import NORMS
from quantforge.architectures.tower_names import QWEN_TOWER, within_whole

ARCHITECTURE = replace(
    within_whole(qwen3_moe.ARCHITECTURE, "qwen3_vl_moe", (QWEN_TOWER,)),
    kinds=dense_or_sparse(
        NORMS,
        attention("attention_bias"),
        dense=gated_mlp(),
        sparse=(router("mlp.gate"), experts_in_one("inner")),
    ),
    defaults={
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "num_experts": 60,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
)
