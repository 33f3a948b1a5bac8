"""Seed-OSS: a llama whose q, k and v have biases, with an explicit head size."""

from dataclasses import replace

from quantforge.architectures.declare import attention, gated_mlp, layer
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import QKV_BIASES, GgufFamily

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="seed_oss",
    kinds=(
        layer(
            llama.NORMS,
            attention("attention_bias", output_bias="attention_out_bias"),
            gated_mlp("mlp_bias"),
        ),
    ),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    gguf=GgufFamily("seed_oss", biases=QKV_BIASES, class_name="SeedOssForCausalLM"),
)
FAMILIES = {"seed_oss": ARCHITECTURE}
