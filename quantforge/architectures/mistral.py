"""Mistral and Ministral: a llama without biases, with a sliding window in all layers or in some."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, gated_mlp, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import LLAMA_BIASES, WITH_TABLE, Family

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="mistral",
    kinds=(layer(llama.NORMS, attention(), gated_mlp()),),
    defaults={"num_key_value_heads": 8},
    with_layer_types={"mistral": "ministral"},  # where alone layers without a window are obeyed,
    graph=DecoderGraph(one_window=True),
    windows=WindowRule(width=4096, every=True),
    gguf=Family("llama", interleaved=True, biases=LLAMA_BIASES, window=4096, scalings=WITH_TABLE),
)
# llama.cpp has no graph in which some layers have a window and others none.
ARCHITECTURE = replace(ARCHITECTURE, decoders={"ministral": replace(ARCHITECTURE, gguf=None)})
