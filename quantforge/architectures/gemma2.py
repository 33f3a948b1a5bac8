"""Gemma 2: norms multiply by 1 + w, four of them per block, soft-capped scores and logits, tied head.

Activations outgrow float16, so that engines have to compute the family in bfloat16 or float32.
"""

from dataclasses import replace

from quantforge.architectures import Absorber, Absorbs, llama
from quantforge.architectures.declare import attention, gated_mlp, layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.layer_windows import WindowRule

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
)
