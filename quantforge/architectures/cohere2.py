"""Command R7B and A: a cohere in which three layers of four have a window, and the others no rotary positions."""

from dataclasses import replace
from typing import Any

from quantforge.architectures import cohere
from quantforge.architectures.declare import layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family, Keys, types_of_period


def restated(keys: Keys) -> dict[str, Any]:
    """Return what the keys of a file say in ``config.json``."""
    usual = keys.usual()
    return {
        **usual,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": types_of_period(usual["num_hidden_layers"], 4),
        "hidden_act": "silu",
    }


ARCHITECTURE = replace(
    cohere.ARCHITECTURE,
    model_type="cohere2",
    kinds=(layer(norms("input_layernorm"), cohere.BOTH),),
    defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "vocab_size": 256000},
    graph=DecoderGraph(before_mlp="", side_by_side=True, neighbours=True, full_rotary="never"),
    gguf=Family(
        "cohere2",
        head=False,
        class_name="Cohere2ForCausalLM",
        heads_fill=True,
        period=4,
        windowed=True,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        reals={"logit_scale": "logit_scale"},
        restated=restated,
    ),
    windows=WindowRule(width=4096, period=4, period_key="sliding_window_pattern"),
)
