"""MiniMax M2: a mixtral with a correction of the router's scores, and norms over all heads of q, and of k, at once."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dense_parts import NORMS_OF_ALL
from quantforge.architectures.llama_cpp import SIGMOID, Family
from quantforge.architectures.mixtral import STORED, STORED_NAMES
from quantforge.architectures.mixtures import experts_one_by_one, router

CORRECTION = "e_score_correction_bias"
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="minimax_m2",
    graph=DecoderGraph(norms_of_all=True, experts=True),
    kinds=(
        layer(
            llama.NORMS,
            NORMS_OF_ALL,
            attention(),
            router(
                "mlp.gate",
                stored=f"{STORED}.gate.weight",
                correction=f"mlp.{CORRECTION}",
                stored_correction=f"{STORED}.{CORRECTION}",
            ),
            experts_one_by_one("ffn", stored_module=f"{STORED}.experts", stored=STORED_NAMES),
        ),
    ),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    gguf=Family(
        "minimax-m2",
        experts=True,
        sizes={"expert_feed_forward_length": "ffn"},
        numbers={"expert_gating_func": SIGMOID, "rope.dimension_count": "rotary_dim"},
        names={f"mlp.{CORRECTION}": "exp_probs_b.bias"},
    ),
)
