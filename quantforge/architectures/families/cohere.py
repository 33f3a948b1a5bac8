"""Command R, R7B and A: parallel attention and MLP after one LayerNorm without bias.

Rotary embeddings rotate neighboring channels. In Command R7B and A (``cohere2``), three of four layers have a sliding
window, and the others have no rotary embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantforge.architectures import Parameter
from quantforge.architectures.declare import (
    attention,
    compose_layer,
    gated_mlp,
    norm_parameters,
    parallel_attention_mlp,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, GgufKeys, periodic_layer_types

ATTENTION_AND_MLP = parallel_attention_mlp(attention("attention_bias"), gated_mlp())
HEAD_NORMS = (
    Parameter("self_attn.q_norm.weight", ("heads", "head"), "use_qk_norm"),
    Parameter("self_attn.k_norm.weight", ("kv_heads", "head"), "use_qk_norm"),
)
COHERE = replace(
    llama.ARCHITECTURE,
    model_type="cohere",
    centred_norms=True,
    kinds=(compose_layer(norm_parameters("input_layernorm"), HEAD_NORMS, ATTENTION_AND_MLP),),
    defaults={
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "rope_theta": 500_000.0,
        "vocab_size": 256000,
    },
    graph=DecoderGraph(norm_before_mlp="", parallel_mlp=True, interleaved_rotary=True),
    gguf=GgufFamily(
        "command-r",
        has_output_matrix=False,
        transformers_class="CohereForCausalLM",
        heads_fill_width=True,
        epsilon_keys=("attention.layer_norm_epsilon", "layer_norm_eps"),
        float_keys={"logit_scale": "logit_scale"},
        required_values={"use_qk_norm": False},
    ),
)


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    llama_config = keys.llama_config()
    return {
        **llama_config,
        "sliding_window": keys.get_int("attention.sliding_window"),
        "layer_types": periodic_layer_types(llama_config["num_hidden_layers"], 4),
        "hidden_act": "silu",
    }


COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    kinds=(compose_layer(norm_parameters("input_layernorm"), ATTENTION_AND_MLP),),
    defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "vocab_size": 256000},
    graph=DecoderGraph(
        norm_before_mlp="", parallel_mlp=True, interleaved_rotary=True, full_rotary="never"
    ),
    gguf=GgufFamily(
        "cohere2",
        has_output_matrix=False,
        transformers_class="Cohere2ForCausalLM",
        heads_fill_width=True,
        window_period=4,
        supports_window=True,
        epsilon_keys=("attention.layer_norm_epsilon", "layer_norm_eps"),
        float_keys={"logit_scale": "logit_scale"},
        read_config=read_config,
    ),
    windows=WindowRule(width=4096, period=4, period_key="sliding_window_pattern"),
)


FAMILIES = {"cohere": COHERE, "cohere2": COHERE2}
