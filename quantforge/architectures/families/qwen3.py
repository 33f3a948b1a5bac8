"""Qwen 3: a llama with per-head RMSNorms of q and k, and an explicit head size.

Most layers of the mixtures have experts, stored one by one, instead of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import HEAD_NORMS, attention, compose_layer, gated_mlp
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, GgufKeys, experts_config
from quantforge.architectures.mixtures import (
    DENSE,
    SPARSE,
    dense_or_sparse,
    router_parameters,
    single_experts,
)
from quantforge.errors import InputError

NORMS = (*llama.NORMS, *HEAD_NORMS)
QWEN3 = replace(
    llama.ARCHITECTURE,
    model_type="qwen3",
    kinds=(compose_layer(NORMS, attention("attention_bias"), gated_mlp()),),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    windows=WindowRule(width=4096, needs_use_sliding_window=True, start=("max_window_layers", 28)),
    gguf=GgufFamily("qwen3", transformers_class="Qwen3ForCausalLM", config_window_default=4096),
)


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer: with experts or dense.

    Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``.

    Raises:
        InputError: ``mlp_only_layers`` is not a list, or ``decoder_sparse_step`` is not a positive number.
    """
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if not isinstance(dense, list) or type(step) is not int or step < 1:
        raise InputError(
            f"mlp_only_layers = {str(dense)[:60]}, decoder_sparse_step = {str(step)[:40]}",
            "a list of layers, and a positive number",
            subject="config.json",
        )
    return [
        DENSE if index in dense or (index + 1) % step else SPARSE
        for index in range(config["num_hidden_layers"])
    ]


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return "dense layers among those with experts", "experts in every layer"
    if config.get("norm_topk_prob") is False:
        return "norm_topk_prob = false", "llama.cpp normalises the weights of qwen3moe's experts"
    return None


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    return {
        **keys.llama_config(),
        "hidden_act": "silu",
        **experts_config(keys),
        "moe_intermediate_size": keys.get_int("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    graph=DecoderGraph(supports_experts=True),
    kinds=dense_or_sparse(
        NORMS,
        attention("attention_bias"),
        dense=gated_mlp(),
        sparse=(router_parameters("mlp.gate"), single_experts("inner")),
    ),
    layer_kind_names=layer_kind_names,
    sizes={
        "experts": ("num_experts", "num_local_experts"),
        "inner": ("moe_intermediate_size",),
    },
    defaults={
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    windows=WindowRule(
        width=4096, needs_use_sliding_window=True, every_layer=True, uses_layer_types=False
    ),
    gguf=GgufFamily(
        "qwen3moe",
        has_experts=True,
        transformers_class="Qwen3MoeForCausalLM",
        config_window_default=4096,
        size_keys={"expert_feed_forward_length": "inner"},
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
)


FAMILIES = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
