"""EXAONE 4: norms after attention and MLP as in olmo2, per-head norms of q and k, sliding windows.

In models with windows, the layers with full attention have no rotary embeddings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import HEAD_NORMS, attention, compose_layer, gated_mlp
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama, olmo
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import SCALINGS_WITH_TABLE, GgufFamily, GgufKeys

_LAYERS_WITH_WINDOWS = 64  # number of layers of the released model with windows


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    llama.cpp recognizes models with sliding windows by their number of layers.
    """
    if config["num_hidden_layers"] == _LAYERS_WITH_WINDOWS:
        return f"num_hidden_layers = {_LAYERS_WITH_WINDOWS} without windows", "another number"
    return None


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe, without windows."""
    llama_config = keys.llama_config()
    layer_types = ["full_attention"] * llama_config["num_hidden_layers"]
    return {**llama_config, "hidden_act": "silu", "layer_types": layer_types}


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="exaone4",
    kinds=(compose_layer(olmo.NORMS, HEAD_NORMS, attention(norm=None), gated_mlp(norm=None)),),
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "rms_norm_eps": 1e-5},
    graph=DecoderGraph(
        norm_before_attention="",
        norm_after_attention="post_attention_layernorm",
        norm_before_mlp="",
        norm_after_mlp="post_feedforward_layernorm",
        full_rotary="alone",
    ),
    gguf=GgufFamily(
        "exaone4",
        rope_scalings=SCALINGS_WITH_TABLE,
        transformers_class="Exaone4ForCausalLM",
        heads_fill_width=True,
        required_values={"sliding_window": None},
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
    windows=WindowRule(
        width=4096, period=4, period_key="sliding_window_pattern", accepts_null_width=True
    ),
)
FAMILIES = {"exaone4": ARCHITECTURE}
