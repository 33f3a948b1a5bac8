"""Command R, R7B and A: attention and MLP side by side after one LayerNorm without bias, neighbours rotated.

In Command R7B and A (``cohere2``) three layers of four have a window, and the others no rotary positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantforge.architectures import Parameter
from quantforge.architectures.declare import attention, gated_mlp, layer, norms, side_by_side
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, Keys, types_of_period

BOTH = side_by_side(attention("attention_bias"), gated_mlp())
HEAD_NORMS = (
    Parameter("self_attn.q_norm.weight", ("heads", "head"), "use_qk_norm"),
    Parameter("self_attn.k_norm.weight", ("kv_heads", "head"), "use_qk_norm"),
)
COHERE = replace(
    llama.ARCHITECTURE,
    model_type="cohere",
    centred_norms=True,
    kinds=(layer(norms("input_layernorm"), HEAD_NORMS, BOTH),),
    defaults={
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "rope_theta": 500_000.0,
        "vocab_size": 256000,
    },
    graph=DecoderGraph(before_mlp="", side_by_side=True, neighbours=True),
    gguf=GgufFamily(
        "command-r",
        head=False,
        class_name="CohereForCausalLM",
        heads_fill=True,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        reals={"logit_scale": "logit_scale"},
        graph={"use_qk_norm": False},
    ),
)


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    usual = keys.usual()
    return {
        **usual,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": types_of_period(usual["num_hidden_layers"], 4),
        "hidden_act": "silu",
    }


COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    kinds=(layer(norms("input_layernorm"), BOTH),),
    defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "vocab_size": 256000},
    graph=DecoderGraph(before_mlp="", side_by_side=True, neighbours=True, full_rotary="never"),
    gguf=GgufFamily(
        "cohere2",
        head=False,
        class_name="Cohere2ForCausalLM",
        heads_fill=True,
        period=4,
        windowed=True,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        reals={"logit_scale": "logit_scale"},
        read_config=read_config,
    ),
    windows=WindowRule(width=4096, period=4, period_key="sliding_window_pattern"),
)


FAMILIES = {"cohere": COHERE, "cohere2": COHERE2}
