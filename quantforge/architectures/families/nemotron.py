"""Nemotron 3 and 4, Minitron: LayerNorms that multiply by 1 + w, and an ungated MLP with squared ReLU."""

from dataclasses import replace

from quantforge.architectures import FoldKind, ScaleFold
from quantforge.architectures.declare import (
    LAYER_NORMS,
    attention,
    compose_layer,
    outer_parameters,
    plain_mlp,
)
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import LLAMA_BIASES, NORM_BIASES, GgufFamily

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="nemotron",
    outer_parameters=outer_parameters(bias=True),
    kinds=(
        compose_layer(
            LAYER_NORMS,
            attention("attention_bias", norm=ScaleFold(FoldKind.NORM_PLUS_ONE, "input_layernorm")),
            plain_mlp(
                "mlp_bias", norm=ScaleFold(FoldKind.NORM_PLUS_ONE, "post_attention_layernorm")
            ),
        ),
    ),
    defaults={"vocab_size": 256000, "partial_rotary_factor": 0.5},
    gguf=GgufFamily(
        "nemotron",
        norm_plus_one=True,
        bias_suffixes=(*LLAMA_BIASES, *NORM_BIASES),
        transformers_class="NemotronForCausalLM",
        activations=("relu2",),
        heads_fill_width=True,
        epsilon_keys=("attention.layer_norm_epsilon", "norm_eps"),
        required_values={"tie_word_embeddings": False},
    ),
)
FAMILIES = {"nemotron": ARCHITECTURE}
