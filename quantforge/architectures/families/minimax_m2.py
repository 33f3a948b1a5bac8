"""MiniMax M2: a mixtral with a correction of the router's scores, and norms over all heads of q, and of k, at once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import NORMS_OF_ALL, attention, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.families.mistral import STORED, STORED_NAMES
from quantforge.architectures.llama_cpp import SIGMOID, GgufFamily
from quantforge.architectures.mixtures import experts_one_by_one, router
from quantforge.errors import InputError

CORRECTION = "e_score_correction_bias"


def rotating(config: Mapping[str, Any]) -> Any:
    """Return how many dimensions of a head rotate, as ``rotary_dim`` says; None where it is not stated.

    Raises:
        InputError: ``partial_rotary_factor`` says something else.
    """
    stated = config.get("rotary_dim")
    rope = config.get("rope_parameters")
    share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    if stated is not None and share is not None and stated != int(config["head_dim"] * share):
        raise InputError(
            f"config.json: rotary_dim = {str(stated)[:40]}, partial_rotary_factor = {share}",
            "keep the one that is right",
        )
    return stated


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
        "rope_theta": 5_000_000.0,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "partial_rotary_factor": 1.0,
    },
    gguf=GgufFamily(
        "minimax-m2",
        experts=True,
        sizes={"expert_feed_forward_length": "ffn"},
        numbers={"expert_gating_func": SIGMOID, "rope.dimension_count": rotating},
        graph={"tie_word_embeddings": False},
        names={f"mlp.{CORRECTION}": "exp_probs_b.bias"},
    ),
)
FAMILIES = {"minimax_m2": ARCHITECTURE}
