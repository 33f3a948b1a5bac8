"""StableLM: a llama with LayerNorms, rotating a quarter of each head.

The 12B model computes attention and MLP side by side, and has a norm of its own for every head of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Parameter
from quantforge.architectures.declare import (
    LAYER_NORMS,
    attention,
    gated_mlp,
    layer,
    norms,
    outer,
    side_by_side,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import NORM_BIASES, QKV_BIASES, GgufFamily

ATTENTION, MLP = attention("use_qkv_bias", output_bias=""), gated_mlp()
HEAD_NORMS = tuple(
    Parameter(f"self_attn.{name}_layernorm.norms.{{}}.weight", ("head",), "qk_layernorm", count)
    for name, count in (("q", "heads"), ("k", "kv_heads"))
)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer, which is the same for all."""
    layers = int(config.get("num_hidden_layers", ARCHITECTURE.defaults["num_hidden_layers"]))
    kind = "side by side" if config.get("use_parallel_residual") else "one after the other"
    return [kind] * layers


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="stablelm",
    outer=outer(bias=True),
    kinds=(
        layer(LAYER_NORMS, HEAD_NORMS, ATTENTION, MLP, name="one after the other"),
        layer(
            norms("input_layernorm", bias=True),
            HEAD_NORMS,
            side_by_side(ATTENTION, MLP),
            name="side by side",
        ),
    ),
    kind_of=kinds,
    defaults={
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
    },
    graph=DecoderGraph(
        side_by_side="use_parallel_residual", head_norms=("q_layernorm", "k_layernorm")
    ),
    gguf=GgufFamily(
        "stablelm",
        biases=(*QKV_BIASES, *NORM_BIASES),
        class_name="StableLmForCausalLM",
        heads_fill=True,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        graph={
            "use_parallel_residual": False,
            "qk_layernorm": False,
            "tie_word_embeddings": False,
        },
        bias_keys={"use_qkv_bias": "attn_q.bias"},
    ),
)
FAMILIES = {"stablelm": ARCHITECTURE}
