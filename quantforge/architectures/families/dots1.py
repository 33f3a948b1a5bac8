"""dots.llm1: a qwen3 with dense first layers, then experts and shared experts."""

from dataclasses import replace

from quantforge.architectures.declare import attention, gated_mlp
from quantforge.architectures.families import glm, qwen3
from quantforge.architectures.families.deepseek import GGUF_FAMILY, MIXTURE
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.mixtures import dense_or_sparse

ARCHITECTURE = replace(
    glm.GLM4_MOE,
    model_type="dots1",
    kinds=dense_or_sparse(
        qwen3.NORMS, attention("attention_bias"), dense=gated_mlp(), sparse=MIXTURE
    ),
    defaults={
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
    },
    gguf=replace(
        GGUF_FAMILY,
        arch="dots1",
        equal_sizes=(("kv", "q"),),
        required_values={"tie_word_embeddings": False},
    ),
    windows=WindowRule(width=4096, start=("max_window_layers", 62)),
)
FAMILIES = {"dots1": ARCHITECTURE}
