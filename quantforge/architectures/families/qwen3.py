"""Qwen 3: a llama with an RMSNorm over each head of q and k, and an explicit head size.

In most layers of mixtures experts, stored one by one, are in the place of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.declare import HEAD_NORMS, attention, gated_mlp, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, Keys, experts_config
from quantforge.architectures.mixtures import (
    DENSE,
    SPARSE,
    dense_or_sparse,
    experts_one_by_one,
    router,
)
from quantforge.errors import InputError

NORMS = (*llama.NORMS, *HEAD_NORMS)
QWEN3 = replace(
    llama.ARCHITECTURE,
    model_type="qwen3",
    kinds=(layer(NORMS, attention("attention_bias"), gated_mlp()),),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    windows=WindowRule(width=4096, asked=True, start=("max_window_layers", 28)),
    gguf=GgufFamily("qwen3", class_name="Qwen3ForCausalLM", window=4096),
)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: experts in each ``decoder_sparse_step``-th that is not in ``mlp_only_layers``.

    Raises:
        InputError: ``mlp_only_layers`` is no list, or ``decoder_sparse_step`` no positive number.
    """
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if not isinstance(dense, list) or type(step) is not int or step < 1:
        raise InputError(
            f"config.json: mlp_only_layers = {str(dense)[:60]}, decoder_sparse_step = {str(step)[:40]}",
            "a list of layers, and a positive number",
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


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    return {
        **keys.usual(),
        "hidden_act": "silu",
        **experts_config(keys),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    graph=DecoderGraph(experts=True),
    kinds=dense_or_sparse(
        NORMS,
        attention("attention_bias"),
        dense=gated_mlp(),
        sparse=(router("mlp.gate"), experts_one_by_one("inner")),
    ),
    kind_of=kinds,
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
    windows=WindowRule(width=4096, asked=True, every=True, listed=False),
    gguf=GgufFamily(
        "qwen3moe",
        experts=True,
        class_name="Qwen3MoeForCausalLM",
        window=4096,
        sizes={"expert_feed_forward_length": "inner"},
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
)


FAMILIES = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
