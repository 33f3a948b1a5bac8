"""GLM 4.5 to 4.7: a llama with dense first layers, then experts with shared ones; norms over heads are optional."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, gated_mlp, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.deepseek_v3 import GGUF, MIXTURE
from quantforge.architectures.mixtures import dense_or_sparse, replaced_first

HEAD_NORMS = tuple(
    replace(item, when="use_qk_norm")
    for item in norms("self_attn.q_norm", "self_attn.k_norm", dimension="head")
)
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="glm4_moe",
    graph=DecoderGraph(experts=True),
    kinds=dense_or_sparse(
        (*llama.NORMS, *HEAD_NORMS),
        attention("attention_bias", output_bias=""),
        dense=gated_mlp(),
        sparse=MIXTURE,
    ),
    kind_of=replaced_first,
    sizes={
        "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("n_shared_experts",),
    },
    defaults={
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
    },
    gguf=replace(GGUF, arch="glm4moe", biases=("attn_q.bias", "attn_k.bias", "attn_v.bias")),
)
