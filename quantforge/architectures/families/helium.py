"""Helium: a llama with interleaved rotary embeddings and an explicit head size."""

from dataclasses import replace

from quantforge.architectures.declare import attention, compose_layer, gated_mlp
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="helium",
    kinds=(
        compose_layer(
            llama.NORMS, attention("attention_bias", output_bias=""), gated_mlp("mlp_bias")
        ),
    ),
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0,
    },
    graph=DecoderGraph(interleaved_rotary=True),
    gguf=None,
)
FAMILIES = {"helium": ARCHITECTURE}
