"""Qwen 2 and 2.5: a llama whose q, k and v always have a bias, and o never."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import ALWAYS, attention, gated_mlp, layer

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="qwen2",
    kinds=(layer(llama.NORMS, attention(ALWAYS, output_bias=""), gated_mlp()),),
    defaults={"num_key_value_heads": 32},
)
