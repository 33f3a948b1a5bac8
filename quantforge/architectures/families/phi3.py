"""Phi 3, 3.5 and 4 (mini): a llama with fused q, k, v and fused gate and up."""

from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import (
    GATE_UP_LABELS,
    GATE_UP_SLICES,
    compose_layer,
    fused_attention,
    fused_mlp,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, GgufKeys

QKV = "self_attn.qkv_proj"


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    window = keys.get_int("attention.sliding_window", 0) or None
    return {**keys.llama_config(), "hidden_act": "silu", "sliding_window": window}


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="phi3",
    kinds=(
        compose_layer(
            llama.NORMS, fused_attention("self_attn", ("qkv_proj", "o_proj")), fused_mlp()
        ),
    ),
    slices={QKV: ("q", "kv", "kv"), **GATE_UP_SLICES},
    slice_labels={QKV: ("q", "k", "v"), **GATE_UP_LABELS},
    defaults={
        **llama.ARCHITECTURE.defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
    graph=DecoderGraph(fused_qkv="qkv_proj", same_window=True),
    windows=WindowRule(every_layer=True, uses_layer_types=False),
    gguf=GgufFamily(
        "phi3",
        transformers_class="Phi3ForCausalLM",
        heads_fill_width=True,
        rope_scalings=("longrope",),
        stores_original_context=True,
        file_window_default=0,
        read_config=read_config,
    ),
)
FAMILIES = {"phi3": ARCHITECTURE}
