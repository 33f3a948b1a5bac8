"""Gemma 2: norms multiply by 1 + w, four of them per block, soft-capped scores and logits, tied head.

Activations outgrow float16, so that engines have to compute the family in bfloat16 or float32.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Absorber, Absorbs, llama
from quantforge.architectures.declare import attention, gated_mlp, layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dimensions import dimensions_of
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family, Keys, types_of_period

NORMS = norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
MIXERS = (
    attention("attention_bias", norm=Absorber(Absorbs.NORM_PLUS_ONE, "input_layernorm")),
    gated_mlp(norm=Absorber(Absorbs.NORM_PLUS_ONE, "pre_feedforward_layernorm")),
)
_LAYERS_27B = 46  # of the one release whose attention scale is another


def beyond_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what llama.cpp does not compute and what it does, or None: it tells the attention scale by the layers."""
    sizes = dimensions_of(config)
    is_27b = sizes.layers == _LAYERS_27B
    return other_scale(config, sizes.hidden / sizes.heads if is_27b else sizes.head)


def other_scale(config: Mapping[str, Any], computed: float) -> tuple[str, str] | None:
    """Return the scale of attention scores that a configuration states, and llama.cpp's; None where they are equal."""
    scale = config.get("query_pre_attn_scalar", 256)
    if scale == computed:
        return None
    return f"query_pre_attn_scalar = {scale}", f"llama.cpp divides by sqrt({computed:g})"


def restated(keys: Keys) -> dict[str, Any]:
    """Return what the keys of a file say in ``config.json``."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**sliding(keys, period=2), **{key: keys.real(key) for key in caps}}


def sliding(keys: Keys, period: int) -> dict[str, Any]:
    """Return what ``config.json`` of a gemma says, in which the last layer of each ``period`` sees everything."""
    usual = keys.usual()
    return {
        **usual,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": types_of_period(usual["num_hidden_layers"], period),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": usual["head_dim"],
    }


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="gemma2",
    kinds=(layer(NORMS, *MIXERS),),
    requires={"use_bidirectional_attention": None},
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "tie_word_embeddings": True,
    },
    float16=False,
    fused_attention=False,
    graph=DecoderGraph(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    windows=WindowRule(width=4096, period=2),
    gguf=Family(
        "gemma2",
        norm_plus_one=True,
        head=False,
        class_name="Gemma2ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        period=2,
        windowed=True,
        obstacle=beyond_llama_cpp,
        restated=restated,
    ),
)
