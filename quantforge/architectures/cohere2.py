"""Command R7B and A: a cohere in which three layers of four have a window, and the others no rotary positions."""

from dataclasses import replace

from quantforge.architectures import cohere
from quantforge.architectures.declare import layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family

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
    ),
    windows=WindowRule(width=4096, period=4, period_key="sliding_window_pattern"),
)
