"""Gemma 2: norms multiply by 1 + w, four of them per block, soft-capped scores and logits, tied head.

Activations outgrow float16, so that engines have to compute the family in bfloat16 or float32.
"""

from dataclasses import replace

from quantforge.architectures import Absorbs, llama
from quantforge.architectures.declare import attention, gated_inputs, gated_mlp, norms

NORMS = norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="gemma2",
    block=(*NORMS, *attention("attention_bias"), *gated_mlp()),
    inputs=gated_inputs(Absorbs.NORM_PLUS_ONE, "pre_feedforward_layernorm"),
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
)
