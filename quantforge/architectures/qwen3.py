"""Qwen 3: a llama with an RMSNorm over each head of q and k, and an explicit head size."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, gated_mlp, layer, norms
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family

NORMS = (*llama.NORMS, *norms("self_attn.q_norm", "self_attn.k_norm", dimension="head"))
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="qwen3",
    kinds=(layer(NORMS, attention("attention_bias"), gated_mlp()),),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    windows=WindowRule(width=4096, asked=True, start=("max_window_layers", 28)),
    gguf=Family("qwen3", class_name="Qwen3ForCausalLM", window=4096),
)
