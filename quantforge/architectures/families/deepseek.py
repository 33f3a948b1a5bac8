"""DeepSeek 2, 3 and 3.2, and Kimi K2: latent attention, dense first layers, then experts.

Every mixture also has shared experts. DeepSeek 2 has a query latent in the large model only. In DeepSeek 3.2, attention
reads the tokens that an indexer selects. Published files of DeepSeek 3 contain layers after the last one, which predict
further tokens; they are kept unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import LayerKind, latent
from quantforge.architectures.declare import Mixer, gated_mlp
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import (
    SIGMOID_GATING,
    SOFTMAX_GATING,
    GgufFamily,
    unsupported_epsilon,
)
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    kinds_by_first_k_dense,
    kinds_by_mlp_layer_types,
    router_parameters,
    shared_experts,
    single_experts,
)

LITE_LAYER_COUNTS = (26, 27)  # numbers of layers of the released models without a query latent
QUERY_LATENT_PREFIX = "narrow/"  # prefix of the names of layer kinds with a query latent
MIXTURE = (
    router_parameters("mlp.gate", correction="mlp.gate.e_score_correction_bias"),
    single_experts("inner"),
    *shared_experts("shared*inner"),
)


def latent_layer_kinds(
    mixture: tuple[Mixer | tuple[Any, ...], ...], mlp_bias: str = ""
) -> tuple[LayerKind, ...]:
    """Return the layer kinds of a model with experts: dense or sparse, with and without a query latent."""
    return tuple(
        kind
        for query_latent, prefix in ((True, QUERY_LATENT_PREFIX), (False, ""))
        for kind in dense_or_sparse(
            llama.NORMS,
            latent.latent_attention("attention_bias", query_latent=query_latent),
            dense=gated_mlp(mlp_bias),
            sparse=mixture,
            prefix=prefix,
        )
    )


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer; errors as `kinds_by_first_k_dense`."""
    return with_query_latent_prefix(config, kinds_by_first_k_dense(config))


def with_query_latent_prefix(config: Mapping[str, Any], layer_kind_names: list[str]) -> list[str]:
    """Prefix the names of layer kinds with `QUERY_LATENT_PREFIX` if the configuration has a query latent."""
    prefix = QUERY_LATENT_PREFIX if config.get("q_lora_rank") is not None else ""
    return [prefix + kind for kind in layer_kind_names]


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    Also checks `unsupported_latent_attention`.
    """
    if config.get("head_dim") not in {None, rotary_width := config["qk_rope_head_dim"]}:
        return f"head_dim = {str(config['head_dim'])[:40]}", f"qk_rope_head_dim, {rotary_width}"
    return unsupported_latent_attention(config)


def unsupported_latent_attention(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    llama.cpp recognizes models without a query latent by their number of layers, and assumes that YaRN also scales the
    attention scores. Its norms of latents use the same epsilon as all others, whereas transformers uses 1e-6.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if (
        isinstance(scaling, Mapping)
        and scaling.get("rope_type", scaling.get("type")) == "yarn"
        and not scaling.get("mscale_all_dim")
    ):
        return "yarn scaling without mscale_all_dim", "with it"
    if reason := unsupported_epsilon(config):
        return reason
    rank, layers = config.get("q_lora_rank"), " or ".join(map(str, LITE_LAYER_COUNTS))
    if rank is None and config["num_hidden_layers"] not in LITE_LAYER_COUNTS:
        return "q_lora_rank = null", f"with {layers} layers, or a number"
    if rank is not None and config["num_hidden_layers"] in LITE_LAYER_COUNTS:
        return f"q_lora_rank = {str(rank)[:40]}", f"null with {layers} layers"
    return None


def expert_group_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of expert groups: 1 if all groups are used, None if the configuration declares none."""
    count: int | None = config.get("n_group")
    return 1 if count is not None and count == config.get("topk_group") else count


def used_expert_group_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of groups from which experts are chosen; special values as `expert_group_count`."""
    count: int | None = config.get("topk_group")
    return 1 if count is not None and count == config.get("n_group") else count


GGUF_FAMILY = GgufFamily(
    "deepseek2",
    has_experts=True,
    size_keys={
        "expert_feed_forward_length": "inner",
        "expert_shared_feed_forward_length": "shared*inner",
        "expert_shared_count": "shared",
    },
    integer_keys={
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_gating_func": SIGMOID_GATING,
        "expert_group_count": expert_group_count,
        "expert_group_used_count": used_expert_group_count,
    },
    float_keys={"expert_weights_scale": "routed_scaling_factor"},
    bool_keys={"expert_weights_norm": "norm_topk_prob"},
    tensor_names={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
)
LATENT_GGUF_FAMILY = replace(
    GGUF_FAMILY,
    reads_yarn_multiplier=True,
    rope_scalings=("yarn",),
    size_keys={
        **GGUF_FAMILY.size_keys,
        "attention.head_count_kv": "heads",  # whatever num_key_value_heads says
        "attention.kv_lora_rank": "kv_rank",
        "attention.key_length": "nope+rope",
        "attention.value_length": "v_head",
        "rope.dimension_count": "rope",
        "vocab_size": "vocab",
    },
    integer_keys={**GGUF_FAMILY.integer_keys, "attention.q_lora_rank": "q_lora_rank"},
    required_values={
        "rope_interleave": True,
        "attention_bias": False,
        "mlp_bias": False,
        "scoring_func": "sigmoid",
    },
    unsupported=unsupported_by_llama_cpp,
)


DEEPSEEK_V3 = replace(
    llama.ARCHITECTURE,
    model_type="deepseek_v3",
    kinds=latent_layer_kinds(MIXTURE),
    layer_kind_names=layer_kind_names,
    sizes={
        **latent.SIZES,
        "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("n_shared_experts",),
    },
    slices=latent.SLICES,
    slice_labels=latent.SLICE_LABELS,
    defaults={
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "rope_interleave": True,
    },
    gguf=LATENT_GGUF_FAMILY,
    unmapped_prefixes={"kimi_k2": ""},  # transformers has no such model_type
)


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    kinds=latent_layer_kinds(
        (
            router_parameters("mlp.gate"),
            single_experts("inner"),
            *shared_experts("shared*inner", bias="mlp_bias"),
        ),
        mlp_bias="mlp_bias",
    ),
    gguf=replace(
        LATENT_GGUF_FAMILY,
        integer_keys={  # transformers chooses among all experts and ignores groups
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_gating_func": SOFTMAX_GATING,
            "attention.q_lora_rank": "q_lora_rank",
        },
        required_values={
            **LATENT_GGUF_FAMILY.required_values,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "norm_topk_prob": False,
        },
        unsupported=unsupported_latent_attention,
    ),
    defaults={
        **DEEPSEEK_V3.defaults,
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


INDEXED_PREFIX = "indexed_attention/"


def indexed_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer; errors as `kinds_by_mlp_layer_types`."""
    return [INDEXED_PREFIX + kind for kind in kinds_by_mlp_layer_types(config)]


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    kinds=dense_or_sparse(
        llama.NORMS,
        latent.latent_attention("attention_bias", indexer=True),
        dense=gated_mlp(),
        sparse=MIXTURE,
        prefix=INDEXED_PREFIX,
    ),
    layer_kind_names=indexed_kind_names,
    gguf=None,
    sizes={**DEEPSEEK_V3.sizes, **latent.INDEXER_SIZES},
    defaults={
        **DEEPSEEK_V3.defaults,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
)


FAMILIES = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "kimi_k2": DEEPSEEK_V3,
}
