"""Phi 3.5 MoE: a mixtral with LayerNorms, biases, and a router of another name."""

from dataclasses import replace

from quantforge.architectures.declare import LAYER_NORMS, attention, layer, outer
from quantforge.architectures.families import llama
from quantforge.architectures.families.mistral import STORED, STORED_NAMES
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.mixtures import experts_one_by_one, router

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="phimoe",
    outer=outer(bias=True, head_bias="lm_head_bias"),
    kinds=(
        layer(
            LAYER_NORMS,
            attention("attention_bias"),
            router("mlp.router", stored=f"{STORED}.gate.weight"),
            experts_one_by_one("ffn", stored_module=f"{STORED}.experts", stored=STORED_NAMES),
        ),
    ),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 6400,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    windows=WindowRule(every=True, listed=False),
    gguf=None,
)
FAMILIES = {"phimoe": ARCHITECTURE}
