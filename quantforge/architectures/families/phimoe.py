"""Phi 3.5 MoE: a mixtral with LayerNorms and biases, and another name of the router."""

from dataclasses import replace

from quantforge.architectures.declare import LAYER_NORMS, attention, compose_layer, outer_parameters
from quantforge.architectures.families import llama
from quantforge.architectures.families.mistral import MOE_MODULE, STORED_EXPERT_NAMES
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.mixtures import router_parameters, single_experts

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="phimoe",
    outer_parameters=outer_parameters(bias=True, head_bias="lm_head_bias"),
    kinds=(
        compose_layer(
            LAYER_NORMS,
            attention("attention_bias"),
            router_parameters("mlp.router", stored=f"{MOE_MODULE}.gate.weight"),
            single_experts(
                "ffn", stored_module=f"{MOE_MODULE}.experts", stored=STORED_EXPERT_NAMES
            ),
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
    windows=WindowRule(every_layer=True, uses_layer_types=False),
    gguf=None,
)
FAMILIES = {"phimoe": ARCHITECTURE}
