"""Mistral: a llama without biases, with a sliding window."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, gated_mlp, layer

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="mistral",
    kinds=(layer(llama.NORMS, attention(), gated_mlp()),),
    defaults={"num_key_value_heads": 8},
)
