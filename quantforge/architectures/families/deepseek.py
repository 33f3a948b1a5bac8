"""DeepSeek 2, 3 and 3.2, and Kimi K2: latent attention; dense first layers, then experts with shared ones beside them.

DeepSeek 2 has a latent for queries in the large model only. In DeepSeek 3.2 attention reads the tokens that an indexer
chooses. Published files of DeepSeek 3 hold layers after the last one, which predict further tokens; they are kept as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import LayerKind, latent
from quantforge.architectures.declare import Mixer, gated_mlp
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import SIGMOID, SOFTMAX, GgufFamily, own_epsilon
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_one_by_one,
    listed,
    replaced_first,
    router,
    shared_experts,
)

LITE = (26, 27)  # layers of the released models without a latent for queries
NARROW = "narrow/"  # prefix of kinds of layers whose queries are made of a latent
MIXTURE = (
    router("mlp.gate", correction="mlp.gate.e_score_correction_bias"),
    experts_one_by_one("inner"),
    *shared_experts("shared*inner"),
)


def layer_kinds(
    mixture: tuple[Mixer | tuple[Any, ...], ...], mlp_bias: str = ""
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers with a mixture: dense or sparse, with and without a latent for queries."""
    return tuple(
        kind
        for queries, prefix in ((True, NARROW), (False, ""))
        for kind in dense_or_sparse(
            llama.NORMS,
            latent.latent_attention("attention_bias", queries=queries),
            dense=gated_mlp(mlp_bias),
            sparse=mixture,
            prefix=prefix,
        )
    )


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `replaced_first`."""
    return by_queries(config, replaced_first(config))


def by_queries(config: Mapping[str, Any], kinds: list[str]) -> list[str]:
    """Return kinds of layers, dense or sparse, as those with or without a latent for queries."""
    prefix = NARROW if config.get("q_lora_rank") is not None else ""
    return [prefix + kind for kind in kinds]


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None; see `unsupported_latents`."""
    if config.get("head_dim") not in {None, turning := config["qk_rope_head_dim"]}:
        return f"head_dim = {str(config['head_dim'])[:40]}", f"qk_rope_head_dim, {turning}"
    return unsupported_latents(config)


def unsupported_latents(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    It recognises models without a latent for queries by their number of layers, and takes for granted that YaRN also
    multiplies the scores of attention. Its norms of latents have the epsilon of all others, where that of transformers
    is 1e-6.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if (
        isinstance(scaling, Mapping)
        and scaling.get("rope_type", scaling.get("type")) == "yarn"
        and not scaling.get("mscale_all_dim")
    ):
        return "yarn scaling without mscale_all_dim", "with it"
    if why := own_epsilon(config):
        return why
    rank, layers = config.get("q_lora_rank"), " or ".join(map(str, LITE))
    if rank is None and config["num_hidden_layers"] not in LITE:
        return "q_lora_rank = null", f"with {layers} layers, or a number"
    if rank is not None and config["num_hidden_layers"] in LITE:
        return f"q_lora_rank = {str(rank)[:40]}", f"null with {layers} layers"
    return None


def groups(config: Mapping[str, Any]) -> int | None:
    """Return into how many groups experts fall, 1 where all groups are used; None where nothing is said."""
    found: int | None = config.get("n_group")
    return 1 if found is not None and found == config.get("topk_group") else found


def used_groups(config: Mapping[str, Any]) -> int | None:
    """Return of how many groups the experts of a token are; as `groups`."""
    found: int | None = config.get("topk_group")
    return 1 if found is not None and found == config.get("n_group") else found


GGUF = GgufFamily(
    "deepseek2",
    experts=True,
    sizes={
        "expert_feed_forward_length": "inner",
        "expert_shared_feed_forward_length": "shared*inner",
        "expert_shared_count": "shared",
    },
    numbers={
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_gating_func": SIGMOID,
        "expert_group_count": groups,
        "expert_group_used_count": used_groups,
    },
    reals={"expert_weights_scale": "routed_scaling_factor"},
    flags={"expert_weights_norm": "norm_topk_prob"},
    names={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
)
LATENT_GGUF = replace(
    GGUF,
    yarn_multiplier=True,
    scalings=("yarn",),
    sizes={
        **GGUF.sizes,
        "attention.head_count_kv": "heads",  # whatever num_key_value_heads says
        "attention.kv_lora_rank": "kv_rank",
        "attention.key_length": "nope+rope",
        "attention.value_length": "v_head",
        "rope.dimension_count": "rope",
        "vocab_size": "vocab",
    },
    numbers={**GGUF.numbers, "attention.q_lora_rank": "q_lora_rank"},
    graph={
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
    kinds=layer_kinds(MIXTURE),
    kind_of=kinds,
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
    gguf=LATENT_GGUF,
    unmapped={"kimi_k2": ""},  # transformers has no such model_type
)


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    kinds=layer_kinds(
        (
            router("mlp.gate"),
            experts_one_by_one("inner"),
            *shared_experts("shared*inner", bias="mlp_bias"),
        ),
        mlp_bias="mlp_bias",
    ),
    gguf=replace(
        LATENT_GGUF,
        numbers={  # transformers chooses among all experts, whatever their groups are
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_gating_func": SOFTMAX,
            "attention.q_lora_rank": "q_lora_rank",
        },
        graph={
            **LATENT_GGUF.graph,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "norm_topk_prob": False,
        },
        unsupported=unsupported_latents,
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


INDEXED = "indexed_attention/"


def indexed_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `listed`."""
    return [INDEXED + kind for kind in listed(config)]


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    kinds=dense_or_sparse(
        llama.NORMS,
        latent.latent_attention("attention_bias", indexer=True),
        dense=gated_mlp(),
        sparse=MIXTURE,
        prefix=INDEXED,
    ),
    kind_of=indexed_kinds,
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
