"""GPT-NeoX and Pythia: fused q, k, v, interleaved head by head, and a LayerNorm before attention and MLP.

Attention and MLP are computed in parallel or one after the other, but each after its own norm, so the declaration of
their inputs is the same.
"""

from dataclasses import replace

from quantforge.architectures import Architecture, Parameter
from quantforge.architectures.declare import (
    ALWAYS_BIAS,
    LAYER_NORMS,
    compose_layer,
    fused_attention,
    norm_parameters,
    plain_mlp,
)
from quantforge.architectures.decoder_graph import DecoderGraph

QKV = "attention.query_key_value"
ARCHITECTURE = Architecture(
    model_type="gpt_neox",
    blocks="gpt_neox.layers",
    outer_parameters=(
        Parameter("gpt_neox.embed_in.weight", ("vocab", "hidden")),
        *norm_parameters("gpt_neox.final_layer_norm", bias=True),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(
        compose_layer(
            LAYER_NORMS,
            replace(
                fused_attention("attention", ("query_key_value", "dense"), "attention_bias"),
                mlp_activations=4,
            ),
            plain_mlp(ALWAYS_BIAS, names=("dense_h_to_4h", "dense_4h_to_h")),
        ),
    ),
    embedding="gpt_neox.embed_in",
    head="lm_head",
    final_norm="gpt_neox.final_layer_norm",
    prefixes=(("", ""), ("embed_out.", "lm_head.")),
    droppable_patterns=(
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
    slices={QKV: ("head", "head", "head")},
    slice_labels={QKV: ("q", "k", "v")},
    defaults={
        "vocab_size": 50432,
        "attention_bias": True,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    graph=DecoderGraph(
        attention_module="attention",
        output_proj="dense",
        fused_qkv="query_key_value",
        parallel_mlp="use_parallel_residual",
    ),
)
FAMILIES = {"gpt_neox": ARCHITECTURE}
