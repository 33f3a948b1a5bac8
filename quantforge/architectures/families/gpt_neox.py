"""GPT-NeoX and Pythia: q, k, v of one head after another in one matrix, a LayerNorm before each half of a layer.

The halves are side by side or one after the other, each after a norm of its own: what they read is declared alike.
"""

from dataclasses import replace

from quantforge.architectures import Architecture, Parameter
from quantforge.architectures.declare import (
    ALWAYS,
    LAYER_NORMS,
    fused_attention,
    layer,
    norms,
    plain_mlp,
)
from quantforge.architectures.decoder_graph import DecoderGraph

QKV = "attention.query_key_value"
ARCHITECTURE = Architecture(
    model_type="gpt_neox",
    blocks="gpt_neox.layers",
    outer=(
        Parameter("gpt_neox.embed_in.weight", ("vocab", "hidden")),
        *norms("gpt_neox.final_layer_norm", bias=True),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(
        layer(
            LAYER_NORMS,
            replace(
                fused_attention("attention", ("query_key_value", "dense"), "attention_bias"),
                inner_copies=4,
            ),
            plain_mlp(ALWAYS, names=("dense_h_to_4h", "dense_4h_to_h")),
        ),
    ),
    embedding="gpt_neox.embed_in",
    head="lm_head",
    final_norm="gpt_neox.final_layer_norm",
    prefixes=(("", ""), ("embed_out.", "lm_head.")),
    droppable=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    slices={QKV: ("head", "head", "head")},
    slice_labels={QKV: ("q", "k", "v")},
    defaults={
        "vocab_size": 50432,
        "attention_bias": True,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    graph=DecoderGraph(
        attention="attention",
        output="dense",
        fused="query_key_value",
        side_by_side="use_parallel_residual",
    ),
)
FAMILIES = {"gpt_neox": ARCHITECTURE}
