"""EXAONE 4: norms after the halves of a layer as in olmo2, norms over each head of q and k, windows in most layers.

Layers that see everything do not rotate where others have a window.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import HEAD_NORMS, attention, gated_mlp, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama, olmo
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import WITH_TABLE, GgufFamily, Keys

_WINDOWED = 64  # layers of the release with windows


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    It recognizes windows by the number of layers.
    """
    if config["num_hidden_layers"] == _WINDOWED:
        return f"num_hidden_layers = {_WINDOWED} without windows", "another number"
    return None


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe, without windows."""
    usual = keys.usual()
    types = ["full_attention"] * usual["num_hidden_layers"]
    return {**usual, "hidden_act": "silu", "layer_types": types}


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="exaone4",
    kinds=(layer(olmo.NORMS, HEAD_NORMS, attention(norm=None), gated_mlp(norm=None)),),
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "rms_norm_eps": 1e-5},
    graph=DecoderGraph(
        before_attention="",
        after_attention="post_attention_layernorm",
        before_mlp="",
        after_mlp="post_feedforward_layernorm",
        full_rotary="alone",
    ),
    gguf=GgufFamily(
        "exaone4",
        scalings=WITH_TABLE,
        class_name="Exaone4ForCausalLM",
        heads_fill=True,
        graph={"sliding_window": None},
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
    windows=WindowRule(width=4096, period=4, period_key="sliding_window_pattern", idle=True),
)
FAMILIES = {"exaone4": ARCHITECTURE}
