"""Gemma 1: a llama whose norms multiply by 1 + w, with a tied head."""

from dataclasses import replace

from quantforge.architectures import Absorber, Absorbs, gemma2, llama
from quantforge.architectures.declare import attention, gated_mlp, layer
from quantforge.architectures.layer_windows import NONE
from quantforge.architectures.llama_cpp import Family

BEFORE = tuple(
    Absorber(Absorbs.NORM_PLUS_ONE, name)
    for name in ("input_layernorm", "post_attention_layernorm")
)
ARCHITECTURE = replace(
    gemma2.ARCHITECTURE,
    model_type="gemma",
    kinds=(
        layer(llama.NORMS, attention("attention_bias", norm=BEFORE[0]), gated_mlp(norm=BEFORE[1])),
    ),
    defaults={**gemma2.ARCHITECTURE.defaults, "num_attention_heads": 16, "num_key_value_heads": 16},
    fused_attention=True,
    graph=llama.ARCHITECTURE.graph,
    gguf=Family(
        "gemma",
        norm_plus_one=True,
        head=False,
        class_name="GemmaForCausalLM",
        activations=("gelu_pytorch_tanh", "gelu"),  # to transformers one, as in the first releases
    ),
    windows=NONE,
)
