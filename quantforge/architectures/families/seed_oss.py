"""Seed-OSS: a llama with biases of q, k and v, and an explicit head size."""

from dataclasses import replace

from quantforge.architectures.declare import attention, compose_layer, gated_mlp
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import QKV_BIASES, GgufFamily

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="seed_oss",
    kinds=(
        compose_layer(
            llama.NORMS,
            attention("attention_bias", output_bias="attention_out_bias"),
            gated_mlp("mlp_bias"),
        ),
    ),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    gguf=GgufFamily("seed_oss", bias_suffixes=QKV_BIASES, transformers_class="SeedOssForCausalLM"),
)
FAMILIES = {"seed_oss": ARCHITECTURE}
