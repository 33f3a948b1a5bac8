"""StableLM: a llama with LayerNorms and rotary embeddings of a quarter of each head.

The 12B model computes attention and MLP in parallel, and has a separate norm for every head of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Parameter
from quantforge.architectures.declare import (
    LAYER_NORMS,
    attention,
    compose_layer,
    gated_mlp,
    norm_parameters,
    outer_parameters,
    parallel_attention_mlp,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import NORM_BIASES, QKV_BIASES, GgufFamily

ATTENTION, MLP = attention("use_qkv_bias", output_bias=""), gated_mlp()
HEAD_NORMS = tuple(
    Parameter(f"self_attn.{name}_layernorm.norms.{{}}.weight", ("head",), "qk_layernorm", count)
    for name, count in (("q", "heads"), ("k", "kv_heads"))
)


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer, the same for all layers."""
    layers = int(config.get("num_hidden_layers", ARCHITECTURE.defaults["num_hidden_layers"]))
    kind = "side by side" if config.get("use_parallel_residual") else "one after the other"
    return [kind] * layers


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="stablelm",
    outer_parameters=outer_parameters(bias=True),
    kinds=(
        compose_layer(LAYER_NORMS, HEAD_NORMS, ATTENTION, MLP, name="one after the other"),
        compose_layer(
            norm_parameters("input_layernorm", bias=True),
            HEAD_NORMS,
            parallel_attention_mlp(ATTENTION, MLP),
            name="side by side",
        ),
    ),
    layer_kind_names=layer_kind_names,
    defaults={
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
    },
    graph=DecoderGraph(
        parallel_mlp="use_parallel_residual", head_norms=("q_layernorm", "k_layernorm")
    ),
    gguf=GgufFamily(
        "stablelm",
        bias_suffixes=(*QKV_BIASES, *NORM_BIASES),
        transformers_class="StableLmForCausalLM",
        heads_fill_width=True,
        epsilon_keys=("attention.layer_norm_epsilon", "layer_norm_eps"),
        required_values={
            "use_parallel_residual": False,
            "qk_layernorm": False,
            "tie_word_embeddings": False,
        },
        bias_keys={"use_qkv_bias": "attn_q.bias"},
    ),
)
FAMILIES = {"stablelm": ARCHITECTURE}
