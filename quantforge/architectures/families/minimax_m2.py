"""MiniMax M2: a mixtral with corrected router scores, and norms over all heads of q and of k."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import WHOLE_QK_NORMS, attention, compose_layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.families.mistral import MOE_MODULE, STORED_EXPERT_NAMES
from quantforge.architectures.llama_cpp import SIGMOID_GATING, GgufFamily
from quantforge.architectures.mixtures import router_parameters, single_experts
from quantforge.errors import InputError

SCORE_CORRECTION = "e_score_correction_bias"


def rotary_width(config: Mapping[str, Any]) -> Any:
    """Return the number of rotated dimensions of a head, from ``rotary_dim``; None if it is missing.

    Raises:
        InputError: ``partial_rotary_factor`` contradicts it.
    """
    rotary_dim = config.get("rotary_dim")
    rope = config.get("rope_parameters")
    factor = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    if (
        rotary_dim is not None
        and factor is not None
        and rotary_dim != int(config["head_dim"] * factor)
    ):
        raise InputError(
            f"rotary_dim = {str(rotary_dim)[:40]}, partial_rotary_factor = {factor}",
            "keep the one that is right",
            subject="config.json",
        )
    return rotary_dim


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="minimax_m2",
    graph=DecoderGraph(qk_norms_over_all_heads=True, supports_experts=True),
    kinds=(
        compose_layer(
            llama.NORMS,
            WHOLE_QK_NORMS,
            attention(),
            router_parameters(
                "mlp.gate",
                stored=f"{MOE_MODULE}.gate.weight",
                correction=f"mlp.{SCORE_CORRECTION}",
                stored_correction=f"{MOE_MODULE}.{SCORE_CORRECTION}",
            ),
            single_experts(
                "ffn", stored_module=f"{MOE_MODULE}.experts", stored=STORED_EXPERT_NAMES
            ),
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
        has_experts=True,
        size_keys={"expert_feed_forward_length": "ffn"},
        integer_keys={"expert_gating_func": SIGMOID_GATING, "rope.dimension_count": rotary_width},
        required_values={"tie_word_embeddings": False},
        tensor_names={f"mlp.{SCORE_CORRECTION}": "exp_probs_b.bias"},
    ),
)
FAMILIES = {"minimax_m2": ARCHITECTURE}
