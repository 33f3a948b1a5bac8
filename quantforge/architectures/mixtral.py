"""Mixtral: a mistral with experts, stored one by one under names of their own, in place of the MLP."""

from dataclasses import replace

from quantforge.architectures import llama, mistral
from quantforge.architectures.declare import attention, experts_one_by_one, layer, router

STORED = "block_sparse_moe"
ARCHITECTURE = replace(
    mistral.ARCHITECTURE,
    model_type="mixtral",
    kinds=(
        layer(
            llama.NORMS,
            attention(),
            router("mlp.gate", stored=f"{STORED}.gate.weight"),
            experts_one_by_one("ffn", stored_module=f"{STORED}.experts", stored=("w1", "w3", "w2")),
        ),
    ),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        **mistral.ARCHITECTURE.defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
)
