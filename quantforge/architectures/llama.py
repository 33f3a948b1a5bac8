"""Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP."""

from quantforge.architectures import Absorbs, Architecture, Parameter
from quantforge.architectures.declare import EXTRA_HEADS, attention, gated_inputs, gated_mlp, norms

ARCHITECTURE = Architecture(
    model_type="llama",
    blocks="model.layers",
    outer=(
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        *norms("model.norm"),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    block=(
        *norms("input_layernorm", "post_attention_layernorm"),
        *attention("attention_bias"),
        *gated_mlp("mlp_bias"),
    ),
    inputs=gated_inputs(Absorbs.NORM, "post_attention_layernorm"),
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.norm",
    foreign=(EXTRA_HEADS,),
)
