"""GPT-OSS: attention with sinks and biases, and experts that are stored stacked, ``[experts, in, out]``.

Rows of gate and up alternate. What an expert computes is clamped, so that nothing absorbs a scale of what its ``down``
reads. The published files hold the experts in MXFP4; these are files in 16 or 32 bits.
"""

from dataclasses import replace

from quantforge.architectures import Parameter
from quantforge.architectures.declare import attention, layer
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import experts_in_one, router

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="gpt_oss",
    kinds=(
        layer(
            llama.NORMS,
            (Parameter("self_attn.sinks", ("heads",)),),
            attention("attention_bias"),
            router("mlp.router", bias=True),
            experts_in_one("ffn", transposed=True, interleaved=True, biases=True),
        ),
    ),
    sizes={"experts": ("num_local_experts", "num_experts")},
    gguf=GgufFamily(
        "gpt-oss",
        experts=True,
        biases=(
            "attn_q.bias",
            "attn_k.bias",
            "attn_v.bias",
            "attn_output.bias",
            "ffn_gate_inp.bias",
        ),
        period=2,
        windowed=True,
        yarn_rounded=True,
        sizes={"expert_feed_forward_length": "ffn"},
        numbers={"attention.sliding_window": "sliding_window"},
        graph={
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        names={
            "self_attn.sinks": "attn_sinks.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "mlp.experts.gate_up_proj_bias": "ffn_gate_exps.bias ffn_up_exps.bias",
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
    ),
    defaults={
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "attention_bias": True,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    fused_attention=False,
    windows=WindowRule(width=128, period=2),
)
FAMILIES = {"gpt_oss": ARCHITECTURE}
