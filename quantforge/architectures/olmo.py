"""OLMo 1: a llama whose norms have no weights, so that nothing absorbs a scale of what they make."""

from dataclasses import replace

from quantforge.architectures import Parameter, llama
from quantforge.architectures.declare import attention, gated_mlp, layer

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="olmo",
    outer=(
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(layer(attention("attention_bias", norm=None), gated_mlp(norm=None)),),
    requires={"clip_qkv": None},  # clipped values are not linear in v
    gguf=None,
)
