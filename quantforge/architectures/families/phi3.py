"""Phi 3, 3.5 and 4 (mini): a llama with q, k, v in one matrix and gate, up in another."""

from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import (
    FUSED_LABELS,
    FUSED_SLICES,
    fused_attention,
    fused_mlp,
    layer,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, Keys

QKV = "self_attn.qkv_proj"


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    window = keys.integer("attention.sliding_window", 0) or None
    return {**keys.usual(), "hidden_act": "silu", "sliding_window": window}


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="phi3",
    kinds=(layer(llama.NORMS, fused_attention("self_attn", ("qkv_proj", "o_proj")), fused_mlp()),),
    slices={QKV: ("q", "kv", "kv"), **FUSED_SLICES},
    slice_labels={QKV: ("q", "k", "v"), **FUSED_LABELS},
    defaults={
        **llama.ARCHITECTURE.defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
    graph=DecoderGraph(fused="qkv_proj", one_window=True),
    windows=WindowRule(every=True, listed=False),
    gguf=GgufFamily(
        "phi3",
        class_name="Phi3ForCausalLM",
        heads_fill=True,
        scalings=("longrope",),
        original_context=True,
        window_key=0,
        read_config=read_config,
    ),
)
FAMILIES = {"phi3": ARCHITECTURE}
