"""GPT-OSS: attention with sinks and biases, and experts that are stored stacked, ``[experts, in, out]``.

Rows of gate and up alternate. What an expert computes is clamped, so that nothing absorbs a scale of what its ``down``
reads. The published files hold the experts in MXFP4; these are files in 16 or 32 bits.
"""

from dataclasses import replace

from quantforge.architectures import Parameter, llama
from quantforge.architectures.declare import attention, experts_in_one, layer, router

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="gpt_oss",
    kinds=(
        layer(
            llama.NORMS,
            (Parameter("self_attn.sinks", ("heads",)),),
            attention("attention_bias"),
            router("mlp.router", bias=True),
            experts_in_one("ffn", transposed=True, interleaved=True),
        ),
    ),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "attention_bias": True,
    },
    fused_attention=False,
)
