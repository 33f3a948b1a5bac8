"""LFM 2: short convolutions in most layers, attention in the others, a gated MLP in all.

A convolution layer computes ``b, c, x = split(W_in h)`` and ``W_out (c * conv(b * x))`` with a depthwise convolution
over a few tokens: the input of ``W_out`` is linear in ``c``, channel by channel. The width of the MLP is computed from
the configured one. Mixtures have dense first layers, then experts instead of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Architecture, FoldKind, Parameter, ScaleFold, SharedInput
from quantforge.architectures.declare import (
    Mixer,
    attention,
    compose_layer,
    gated_mlp,
    linear_parameters,
    norm_parameters,
    outer_parameters,
)
from quantforge.architectures.dimensions import listed_layer_types
from quantforge.architectures.layer_kind import convolution_state
from quantforge.architectures.llama_cpp import SIGMOID_GATING, GgufFamily
from quantforge.architectures.mixtures import (
    dense_first_kinds,
    dense_or_sparse,
    router_parameters,
    single_experts,
)
from quantforge.errors import InputError

IN_PROJ, OUT_PROJ = "conv.in_proj", "conv.out_proj"
FOLD_INTO_OPERATOR_NORM = ScaleFold(FoldKind.NORM, "operator_norm")
NORMS = norm_parameters("operator_norm", "ffn_norm")
HEAD_NORMS = norm_parameters("self_attn.q_layernorm", "self_attn.k_layernorm", dimension="head")
STORED_MLP_NAMES = ("w1", "w3", "w2")  # names of gate, up and down in files
CONVOLUTION = Mixer(
    (
        Parameter("conv.conv.weight", ("hidden", "1", "kernel")),
        Parameter("conv.conv.bias", ("hidden",), "conv_bias"),
        *linear_parameters(IN_PROJ, "3*hidden", "hidden", "conv_bias"),
        *linear_parameters(OUT_PROJ, "hidden", "hidden", "conv_bias"),
    ),
    (
        SharedInput((IN_PROJ,), "conv", FOLD_INTO_OPERATOR_NORM),
        SharedInput((OUT_PROJ,), OUT_PROJ, ScaleFold(FoldKind.ROWS, IN_PROJ, "c")),
    ),
    states=convolution_state("hidden"),
)
ATTENTION = attention(norm=FOLD_INTO_OPERATOR_NORM, output="out_proj")
MLP = gated_mlp(
    norm=ScaleFold(FoldKind.NORM, "ffn_norm"), module="feed_forward", names=STORED_MLP_NAMES
)


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    llama.cpp aborts on a model that has layers of only one kind.
    """
    if config["conv_L_cache"] < 2:
        return f"conv_L_cache = {config['conv_L_cache']}", "2 or more"
    if len(types := {*mixer_types(config)}) < len(LFM2.kinds):
        return f"layers that are all {', '.join(types)}", "conv beside full_attention"
    return None


def kv_head_counts(config: Mapping[str, Any]) -> list[int]:
    """Return the number of key/value heads of every layer, 0 for convolutions; errors as `mixer_types`."""
    return [
        config["num_key_value_heads"] if kind == "full_attention" else 0
        for kind in mixer_types(config)
    ]


def mixer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the mixer type of every layer, from ``layer_types`` or else ``full_attn_idxs``.

    If neither is present, every layer has attention.

    Raises:
        InputError: ``full_attn_idxs`` is not a list, or ``tie_embedding``, which transformers uses, contradicts
            ``tie_word_embeddings``.
    """
    is_tied = config.get("tie_word_embeddings", LFM2.defaults["tie_word_embeddings"])
    if config.get("tie_embedding", is_tied) != is_tied:
        raise InputError(
            f"tie_embedding = {str(config['tie_embedding'])[:20]},"
            f" tie_word_embeddings = {str(is_tied)[:20]}",
            "state the same in both",
            subject="config.json",
        )
    if (layer_types := listed_layer_types(config)) is not None:
        return layer_types
    layers = range(int(config.get("num_hidden_layers", LFM2.defaults["num_hidden_layers"])))
    attention_layers = config.get("full_attn_idxs")
    if attention_layers is None:
        attention_layers = list(layers)
    if not isinstance(attention_layers, list):
        raise InputError(
            f"full_attn_idxs = {str(attention_layers)[:60]}",
            "a list of layers",
            subject="config.json",
        )
    return ["full_attention" if index in attention_layers else "conv" for index in layers]


def mlp_width(config: Mapping[str, Any]) -> int:
    """Return the width of the MLP: two thirds of the configured one, times a factor, rounded up to a multiple.

    Raises:
        InputError: one of the values is not a number.
    """
    width = config.get("block_ff_dim", config.get("intermediate_size", 12288))
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    multiple = config.get("block_multiple_of", 256)
    are_sizes = type(width) is int and type(multiple) is int and 0 < multiple <= 1 << 20
    if not are_sizes or not (factor is None or (type(factor) in {int, float} and 0 < factor < 1e3)):
        raise InputError(
            f"intermediate_size = {str(width)[:40]!r}, block_ffn_dim_multiplier = {str(factor)[:40]!r},"
            f" block_multiple_of = {str(multiple)[:40]!r}",
            "they have to be positive numbers",
            subject="config.json",
        )
    if not config.get("block_auto_adjust_ff_dim", True):
        return int(width)
    width = int(2 * min(width, 1 << 22) / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


GGUF_FAMILY = GgufFamily(
    "lfm2",
    epsilon_keys=("attention.layer_norm_rms_epsilon", "norm_eps"),
    size_keys={"shortconv.l_cache": "kernel", "vocab_size": "vocab"},
    per_layer_keys={"attention.head_count_kv": kv_head_counts},
    squeezed_suffixes=("conv.conv.weight",),
    heads_fill_width=True,
    unsupported=unsupported_by_llama_cpp,
)
LFM2 = Architecture(
    model_type="lfm2",
    blocks="model.layers",
    outer_parameters=outer_parameters("model.embedding_norm"),
    kinds=(
        compose_layer(NORMS, CONVOLUTION, MLP, name="conv"),
        compose_layer(NORMS, HEAD_NORMS, ATTENTION, MLP, name="full_attention"),
    ),
    layer_kind_names=mixer_types,
    sizes={"kernel": ("conv_L_cache",), "ffn": mlp_width},
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.embedding_norm",
    slices={IN_PROJ: ("hidden", "hidden", "hidden")},
    slice_labels={IN_PROJ: ("b", "c", "x")},
    defaults={
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    gguf=GGUF_FAMILY,
)


SCORE_CORRECTION = Parameter("feed_forward.expert_bias", ("experts",), "use_expert_bias")
MIXTURE = (
    router_parameters("feed_forward.gate"),
    (SCORE_CORRECTION,),
    single_experts("inner", module="feed_forward.experts", stored=STORED_MLP_NAMES),
)


def moe_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer; errors as `mixer_types` and `dense_first_kinds`."""
    pairs = zip(mixer_types(config), dense_first_kinds(config, "num_dense_layers"), strict=True)
    return [f"{mixer_type}/{mlp_kind}" for mixer_type, mlp_kind in pairs]


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    kinds=(
        *dense_or_sparse(NORMS, CONVOLUTION, dense=MLP, sparse=MIXTURE, prefix="conv/"),
        *dense_or_sparse(
            NORMS,
            HEAD_NORMS,
            ATTENTION,
            dense=MLP,
            sparse=MIXTURE,
            prefix="full_attention/",
        ),
    ),
    layer_kind_names=moe_kind_names,
    sizes={
        "kernel": ("conv_L_cache",),
        "experts": ("num_experts", "num_local_experts"),
        "inner": ("moe_intermediate_size",),
    },
    defaults={
        **LFM2.defaults,
        "num_attention_heads": 32,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    gguf=replace(
        GGUF_FAMILY,
        arch="lfm2moe",
        has_experts=True,
        size_keys={**GGUF_FAMILY.size_keys, "expert_feed_forward_length": "inner"},
        integer_keys={
            "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": SIGMOID_GATING,
        },
        required_values={
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        tensor_names={
            "feed_forward.gate.weight": "ffn_gate_inp.weight",
            "feed_forward.expert_bias": "exp_probs_b.bias",
            "feed_forward.experts.gate_proj.weight": "ffn_gate_exps.weight",
            "feed_forward.experts.up_proj.weight": "ffn_up_exps.weight",
            "feed_forward.experts.down_proj.weight": "ffn_down_exps.weight",
        },
    ),
)


FAMILIES = {"lfm2": LFM2, "lfm2_moe": LFM2_MOE}
