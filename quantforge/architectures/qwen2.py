"""Qwen 2 and 2.5: a llama whose q, k and v always have a bias, and o never."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import ALWAYS, attention, gated_mlp, layer
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import QKV_BIASES, Family

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="qwen2",
    kinds=(layer(llama.NORMS, attention(ALWAYS, output_bias=""), gated_mlp()),),
    defaults={"num_key_value_heads": 32},
    windows=WindowRule(width=4096, asked=True, start=("max_window_layers", 28)),
    gguf=Family(
        "qwen2", biases=QKV_BIASES, class_name="Qwen2ForCausalLM", heads_fill=True, window=4096
    ),
)
