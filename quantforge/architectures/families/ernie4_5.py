"""ERNIE 4.5: a llama with interleaved rotary embeddings, one key for all biases, and a tied head.

Mixtures have experts in a range of their layers, with or without shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Parameter
from quantforge.architectures.declare import attention, compose_layer, gated_mlp, outer_parameters
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import (
    DENSE,
    SPARSE,
    dense_or_sparse,
    router_parameters,
    shared_experts,
    single_experts,
)
from quantforge.errors import InputError

ERNIE4_5 = replace(
    llama.ARCHITECTURE,
    model_type="ernie4_5",
    kinds=(compose_layer(llama.NORMS, attention("use_bias"), gated_mlp("use_bias")),),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
    graph=DecoderGraph(interleaved_rotary=True),
    gguf=GgufFamily(
        "ernie4_5", transformers_class="Ernie4_5ForCausalLM", bias_keys={"use_bias": "attn_q.bias"}
    ),
)


SPARSE_WITH_SHARED = "sharing"  # layer kind with routed and shared experts
CORRECTION = "moe_statics.e_score_correction_bias"
COMMON_PARTS = (llama.NORMS, attention("use_bias"))
MIXTURE = (
    router_parameters("mlp.gate"),
    (Parameter(f"mlp.gate.{CORRECTION}", ("1", "experts"), stored=f"mlp.{CORRECTION}"),),
    single_experts("inner"),
)


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer: experts in every n-th layer of a range.

    Raises:
        InputError: a key that determines the range or n is not an integer.
    """
    keys = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    first, last, step = (config[key] for key in keys)
    if not all(type(value) is int for value in (first, last, step)) or step < 1:
        settings = ", ".join(f"{key} = {str(config[key])[:20]}" for key in keys)
        raise InputError(f"{settings}", "numbers of layers", subject="config.json")
    layers = range(config["num_hidden_layers"])
    last = last if last >= 0 else len(layers) - 1
    sparse = SPARSE_WITH_SHARED if config["moe_num_shared_experts"] else SPARSE
    return [
        sparse if first <= index <= last and (index + 1) % step == 0 else DENSE for index in layers
    ]


def shared_expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of shared experts; 1 if there are none.

    Raises:
        InputError: the configured value is not a number.
    """
    count = config["moe_num_shared_experts"]
    if type(count) is not int or count < 0:
        raise InputError(
            f"moe_num_shared_experts = {str(count)[:40]!r}", "a number", subject="config.json"
        )
    return max(count, 1)


def shared_expert_width(config: Mapping[str, Any]) -> int | None:
    """Return the total width of the shared experts, None if there are none; errors as `shared_expert_count`."""
    width: int = config["moe_intermediate_size"]
    return shared_expert_count(config) * width if config["moe_num_shared_experts"] else None


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None."""
    last = config["moe_layer_end_index"]
    if 0 <= last < config["num_hidden_layers"] - 1:
        return f"moe_layer_end_index = {last}", "experts up to the last layer"
    min_score_sum, experts_per_token, experts = (
        config[key] for key in ("moe_norm_min", "moe_k", "moe_num_experts")
    )
    are_numbers = all(
        isinstance(value, int | float) for value in (min_score_sum, experts_per_token, experts)
    )
    if (
        not are_numbers or min_score_sum * experts > experts_per_token
    ):  # the scores of the used experts sum to at least used / experts
        return f"moe_norm_min = {str(min_score_sum)[:40]}", "at most moe_k / moe_num_experts"
    return None


ERNIE4_5_MOE = replace(
    llama.ARCHITECTURE,
    model_type="ernie4_5_moe",
    graph=DecoderGraph(interleaved_rotary=True, supports_experts=True),
    outer_parameters=outer_parameters(head_bias="use_bias"),
    kinds=(
        *dense_or_sparse(*COMMON_PARTS, dense=gated_mlp("use_bias"), sparse=MIXTURE),
        compose_layer(
            *COMMON_PARTS,
            *MIXTURE,
            *shared_experts("shared*inner", bias="use_bias"),
            name=SPARSE_WITH_SHARED,
        ),
    ),
    layer_kind_names=layer_kind_names,
    sizes={
        "experts": ("moe_num_experts", "num_experts", "num_local_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": shared_expert_count,
    },
    defaults={
        "rope_theta": 500_000.0,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "moe_num_experts": 64,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_k": 6,
        "moe_norm_min": 1e-12,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
    },
    gguf=GgufFamily(
        "ernie4_5-moe",
        has_experts=True,
        used_experts_key="moe_k",
        size_keys={"expert_feed_forward_length": "inner"},
        integer_keys={
            "expert_shared_count": "moe_num_shared_experts",
            "expert_shared_feed_forward_length": shared_expert_width,
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        required_values={"use_bias": False, "moe_layer_interval": 1},
        unsupported=unsupported_by_llama_cpp,
        tensor_names={f"mlp.gate.{CORRECTION}": "exp_probs_b.bias"},
    ),
)


FAMILIES = {"ernie4_5": ERNIE4_5, "ernie4_5_moe": ERNIE4_5_MOE}
