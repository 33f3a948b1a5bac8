"""GPT-OSS: attention with sinks and biases, and stacked experts stored as ``[experts, in, out]``.

Rows of gate and up alternate. The hidden activation of an expert is clamped, so no scale of the input of ``down`` can
be folded. The published files store the experts in MXFP4; this declaration describes files in 16 or 32 bits.
"""

from dataclasses import replace

from quantforge.architectures import Parameter
from quantforge.architectures.declare import attention, compose_layer
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import router_parameters, stacked_experts

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="gpt_oss",
    kinds=(
        compose_layer(
            llama.NORMS,
            (Parameter("self_attn.sinks", ("heads",)),),
            attention("attention_bias"),
            router_parameters("mlp.router", bias=True),
            stacked_experts("ffn", transposed=True, interleaved=True, biases=True),
        ),
    ),
    sizes={"experts": ("num_local_experts", "num_experts")},
    gguf=GgufFamily(
        "gpt-oss",
        has_experts=True,
        bias_suffixes=(
            "attn_q.bias",
            "attn_k.bias",
            "attn_v.bias",
            "attn_output.bias",
            "ffn_gate_inp.bias",
        ),
        window_period=2,
        supports_window=True,
        accepts_unrounded_yarn=True,
        size_keys={"expert_feed_forward_length": "ffn"},
        integer_keys={"attention.sliding_window": "sliding_window"},
        required_values={
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        tensor_names={
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
