"""Qwen 3 Next and 3.5: gated delta nets in three of four layers, gated attention in the others.

Qwen 3 Next has experts and a shared expert. Qwen 3.5 has a gated MLP, or experts that files store one by one or
stacked, and a vision tower. Norms multiply by 1 + w, except for the one inside the delta nets. Half of the rows of
``q_proj`` are gates: ``W_o`` reads ``attention(q, k, v) * sigmoid(gate)``, which is linear in ``v``.

A gated delta net (linear attention with the delta rule) keeps one state matrix per head, which decays and is corrected
toward the new value. With the block's normalized input ``h``, and a depthwise convolution over a few tokens:

    [q, k, v] = silu(conv(W_qkv h));   z = W_z h;   b = sigmoid(W_b h);   g = -exp(A) softplus(W_a h + dt)
    S = exp(g) S (1 - b k k^T) + b v k^T;   y = W_out (norm(S q) * silu(z))

All projections read the same activation, and its scale folds into the norm. No scale of the input of ``W_out`` can be
folded: the norm over each head of the output has one weight vector for all heads, and ``silu`` follows every
projection. The convolution, the decays ``A`` and their offsets are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput
from quantforge.architectures.declare import (
    QWEN_VISION_TENSORS,
    Mixer,
    attention,
    compose_layer,
    gated_mlp,
    linear_parameters,
    multimodal_with_decoder_class,
    norm_parameters,
)
from quantforge.architectures.dimensions import listed_layer_types
from quantforge.architectures.families import llama, qwen3
from quantforge.architectures.layer_kind import convolution_state, recurrent_state
from quantforge.architectures.layer_windows import NO_WINDOWS
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    router_parameters,
    shared_experts,
    single_experts,
    stacked_experts,
)
from quantforge.errors import InputError

DELTA_NET_MODULE = "linear_attn"
KEY_WIDTH, VALUE_WIDTH = "k_heads*k_head", "v_heads*v_head"
DELTA_NET_SIZES: Mapping[str, tuple[str, ...]] = {
    "k_heads": ("linear_num_key_heads",),
    "k_head": ("linear_key_head_dim",),
    "v_heads": ("linear_num_value_heads",),
    "v_head": ("linear_value_head_dim",),
    "kernel": ("linear_conv_kernel_dim",),
}
DELTA_NET_DEFAULTS: Mapping[str, object] = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Projections of the block's input, each with its number of rows: separate, or joined head by head.
SEPARATE_PROJECTIONS: Mapping[str, str] = {
    "in_proj_qkv": f"2*{KEY_WIDTH}+{VALUE_WIDTH}",
    "in_proj_z": VALUE_WIDTH,
    "in_proj_b": "v_heads",
    "in_proj_a": "v_heads",
}
JOINED_PROJECTIONS: Mapping[str, str] = {
    "in_proj_qkvz": f"2*{KEY_WIDTH}+2*{VALUE_WIDTH}",
    "in_proj_ba": "2*v_heads",
}


def gated_delta_net(projections: Mapping[str, str], norm: ScaleFold | None) -> Mixer:
    """Declare a gated delta net.

    Args:
        projections: names and numbers of rows of the input projections: `SEPARATE_PROJECTIONS` or `JOINED_PROJECTIONS`.
        norm: the scale fold of the norm before them.
    """
    out = f"{DELTA_NET_MODULE}.out_proj"
    return Mixer(
        (
            Parameter(f"{DELTA_NET_MODULE}.dt_bias", ("v_heads",)),
            Parameter(f"{DELTA_NET_MODULE}.A_log", ("v_heads",)),
            Parameter(
                f"{DELTA_NET_MODULE}.conv1d.weight", (f"2*{KEY_WIDTH}+{VALUE_WIDTH}", "1", "kernel")
            ),
            *(
                item
                for name, rows in projections.items()
                for item in linear_parameters(f"{DELTA_NET_MODULE}.{name}", rows, "hidden")
            ),
            *norm_parameters(f"{DELTA_NET_MODULE}.norm", dimension="v_head"),
            *linear_parameters(out, "hidden", VALUE_WIDTH),
        ),
        (
            SharedInput(
                tuple(f"{DELTA_NET_MODULE}.{name}" for name in projections), DELTA_NET_MODULE, norm
            ),
            SharedInput((out,), out),
        ),
        states=(
            *convolution_state(f"2*{KEY_WIDTH}+{VALUE_WIDTH}"),
            *recurrent_state("v_heads", "k_head*v_head"),
        ),
    )


LINEAR, FULL = "linear_attention", "full_attention"
FOLD_INTO_ATTENTION_NORM = ScaleFold(FoldKind.NORM_PLUS_ONE, "input_layernorm")
FOLD_INTO_MLP_NORM = ScaleFold(FoldKind.NORM_PLUS_ONE, "post_attention_layernorm")
ATTENTION = attention("attention_bias", norm=FOLD_INTO_ATTENTION_NORM, q_rows="2*heads*head")
MLP = gated_mlp(norm=FOLD_INTO_MLP_NORM)
MIXTURE = (
    router_parameters("mlp.gate"),
    *shared_experts("shared", module="mlp.shared_expert", gate="mlp.shared_expert_gate"),
    single_experts("inner"),
)


def mixer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the mixer type of every layer, from ``layer_types``, or full attention in every n-th layer.

    Raises:
        InputError: ``full_attention_interval`` is not a number.
    """
    if (listed_types := listed_layer_types(config)) is not None:
        return listed_types
    interval = config.get("full_attention_interval")
    if type(interval) is not int or interval < 1:
        raise InputError(
            f"full_attention_interval = {str(interval)[:40]!r}",
            "a number of layers",
            subject="config.json",
        )
    layers = range(config["num_hidden_layers"])
    return [LINEAR if (index + 1) % interval else FULL for index in layers]


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    llama.cpp puts full attention in every n-th layer.
    """
    types = mixer_types(config)
    if LINEAR not in types:
        return "layers that are all full_attention", "linear_attention beside them"
    if config["linear_conv_kernel_dim"] < 2:
        return f"linear_conv_kernel_dim = {config['linear_conv_kernel_dim']}", "2 or more"
    periodic = {"layer_types": None, "full_attention_interval": full_attention_interval(config)}
    if types != mixer_types({**config, **periodic}):
        return f"layer_types = {str(types)[:60]}", "full_attention at the end of equal runs"
    return None


def full_attention_interval(config: Mapping[str, Any]) -> int:
    """Return the 1-based index of the first layer with full attention; errors as `mixer_types`.

    If there is no such layer, return one more than the number of layers.
    """
    return [*mixer_types(config), FULL].index(FULL) + 1


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer; errors as `mixer_types` and `qwen3.layer_kind_names`."""
    pairs = zip(mixer_types(config), qwen3.layer_kind_names(config), strict=False)
    return [f"{mixer_type}/{mlp_kind}" for mixer_type, mlp_kind in pairs]


QWEN3_NEXT = replace(
    llama.ARCHITECTURE,
    model_type="qwen3_next",
    kinds=(
        *dense_or_sparse(
            llama.NORMS,
            gated_delta_net(JOINED_PROJECTIONS, FOLD_INTO_ATTENTION_NORM),
            dense=MLP,
            sparse=MIXTURE,
            prefix=f"{LINEAR}/",
        ),
        *dense_or_sparse(qwen3.NORMS, ATTENTION, dense=MLP, sparse=MIXTURE, prefix=f"{FULL}/"),
    ),
    layer_kind_names=layer_kind_names,
    sizes={
        **DELTA_NET_SIZES,
        "interval": full_attention_interval,
        "experts": ("num_experts", "num_local_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("shared_expert_intermediate_size",),
    },
    graph=None,
    defaults={
        **DELTA_NET_DEFAULTS,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 5632,
        "num_experts": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    },
    gguf=GgufFamily(
        "qwen3next",
        norm_plus_one=True,
        unshifted_norm_suffixes=("linear_attn.norm.weight",),
        has_experts=True,
        size_keys={
            "ssm.conv_kernel": "kernel",
            "ssm.state_size": "k_head",
            "ssm.group_count": "k_heads",
            "ssm.time_step_rank": "v_heads",
            "ssm.inner_size": VALUE_WIDTH,
            "full_attention_interval": "interval",
            "expert_feed_forward_length": "inner",
            "expert_shared_feed_forward_length": "shared",
        },
        required_values={"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True},
        equal_sizes=(("k_head", "v_head"),),
        unsupported=unsupported_by_llama_cpp,
        tensor_names={"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"},
        squeezed_suffixes=("linear_attn.conv1d.weight",),
        decay_suffixes=("linear_attn.A_log",),
    ),
    windows=NO_WINDOWS,
)


DELTA_NET = gated_delta_net(SEPARATE_PROJECTIONS, FOLD_INTO_ATTENTION_NORM)
QWEN3_5_TEXT = replace(
    QWEN3_NEXT,
    kinds=(
        compose_layer(llama.NORMS, DELTA_NET, MLP, name=LINEAR),
        compose_layer(qwen3.NORMS, ATTENTION, MLP, name=FULL),
    ),
    layer_kind_names=mixer_types,
    sizes=DELTA_NET_SIZES,
    gguf=None,
    defaults={
        **DELTA_NET_DEFAULTS,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 12288,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    },
)
QWEN3_5 = multimodal_with_decoder_class(QWEN3_5_TEXT, "qwen3_5", (QWEN_VISION_TENSORS,))


STACKED_MIXTURE = (*MIXTURE[:-1], stacked_experts("inner"))
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    kinds=(
        compose_layer(llama.NORMS, DELTA_NET, *STACKED_MIXTURE, name=LINEAR),
        compose_layer(qwen3.NORMS, ATTENTION, *STACKED_MIXTURE, name=FULL),
    ),
    loads_single_experts=True,
    sizes=QWEN3_NEXT.sizes,
    defaults={
        **DELTA_NET_DEFAULTS,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 1,  # there is no dense layer
        "num_experts": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    },
)
QWEN3_5_MOE = multimodal_with_decoder_class(QWEN3_5_MOE_TEXT, "qwen3_5_moe", (QWEN_VISION_TENSORS,))


FAMILIES = {
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
}
