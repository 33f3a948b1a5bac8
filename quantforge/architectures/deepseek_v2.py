"""DeepSeek 2: latent attention, with a latent for queries in the large model; experts with shared ones beside them."""

from dataclasses import replace

from quantforge.architectures import deepseek_v3
from quantforge.architectures.llama_cpp import SOFTMAX
from quantforge.architectures.mixtures import experts_one_by_one, router, shared_experts

ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    model_type="deepseek_v2",
    kinds=deepseek_v3.layer_kinds(
        (
            router("mlp.gate"),
            experts_one_by_one("inner"),
            *shared_experts("shared*inner", bias="mlp_bias"),
        ),
        mlp_bias="mlp_bias",
    ),
    gguf=replace(
        deepseek_v3.LATENT_GGUF,
        numbers={  # transformers chooses among all experts, whatever their groups are
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_gating_func": SOFTMAX,
            "attention.q_lora_rank": "q_lora_rank",
        },
        graph={
            **deepseek_v3.LATENT_GGUF.graph,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "norm_topk_prob": False,
        },
        obstacle=deepseek_v3.of_latents,
    ),
    defaults={
        **deepseek_v3.ARCHITECTURE.defaults,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "num_experts_per_tok": None,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "n_group": None,
        "topk_group": None,
    },
)
