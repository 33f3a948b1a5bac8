"""LFM 2: short convolutions in most layers and attention in the others, a gated MLP in all.

A convolution layer computes ``b, c, x = split(W_in h)`` and ``W_out (c * conv(b * x))`` with a depthwise convolution
over a few tokens: what ``W_out`` reads is linear in ``c``, channel by channel. The width of the MLP is not the one that
the configuration names, but is derived from it. Mixtures have dense first layers, then experts in the place of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Architecture, FoldKind, Parameter, ScaleFold, SharedInput
from quantforge.architectures.declare import (
    Mixer,
    attention,
    gated_mlp,
    layer,
    linear,
    norms,
    outer,
)
from quantforge.architectures.dimensions import layer_types
from quantforge.architectures.layer_kind import convolution
from quantforge.architectures.llama_cpp import SIGMOID, GgufFamily
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_one_by_one,
    first_dense,
    router,
)
from quantforge.errors import InputError

IN, OUT = "conv.in_proj", "conv.out_proj"
BEFORE_MIXER = ScaleFold(FoldKind.NORM, "operator_norm")
NORMS = norms("operator_norm", "ffn_norm")
HEAD_NORMS = norms("self_attn.q_layernorm", "self_attn.k_layernorm", dimension="head")
NAMES = ("w1", "w3", "w2")  # of gate, up and down in files
CONVOLUTION = Mixer(
    (
        Parameter("conv.conv.weight", ("hidden", "1", "kernel")),
        Parameter("conv.conv.bias", ("hidden",), "conv_bias"),
        *linear(IN, "3*hidden", "hidden", "conv_bias"),
        *linear(OUT, "hidden", "hidden", "conv_bias"),
    ),
    (
        SharedInput((IN,), "conv", BEFORE_MIXER),
        SharedInput((OUT,), OUT, ScaleFold(FoldKind.ROWS, IN, "c")),
    ),
    states=convolution("hidden"),
)
ATTENTION = attention(norm=BEFORE_MIXER, output="out_proj")
MLP = gated_mlp(norm=ScaleFold(FoldKind.NORM, "ffn_norm"), module="feed_forward", names=NAMES)


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    It aborts on a model that lacks layers of one kind.
    """
    if config["conv_L_cache"] < 2:
        return f"conv_L_cache = {config['conv_L_cache']}", "2 or more"
    if len(found := {*mixers(config)}) < len(LFM2.kinds):
        return f"layers that are all {', '.join(found)}", "conv beside full_attention"
    return None


def kv_heads(config: Mapping[str, Any]) -> list[int]:
    """Return how many heads of keys every layer has, none in those that convolve; errors as `mixers`."""
    return [
        config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in mixers(config)
    ]


def mixers(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: as listed, or by the indices of the layers with attention, or attention.

    Raises:
        InputError: ``full_attn_idxs`` is no list, or ``tie_embedding``, which transformers obeys, contradicts the rest.
    """
    is_tied = config.get("tie_word_embeddings", LFM2.defaults["tie_word_embeddings"])
    if config.get("tie_embedding", is_tied) != is_tied:
        raise InputError(
            f"config.json: tie_embedding = {str(config['tie_embedding'])[:20]},"
            f" tie_word_embeddings = {str(is_tied)[:20]}",
            "state the same in both",
        )
    if (listed := layer_types(config)) is not None:
        return listed
    layers = range(int(config.get("num_hidden_layers", LFM2.defaults["num_hidden_layers"])))
    attending = config.get("full_attn_idxs")
    if attending is None:
        attending = list(layers)
    if not isinstance(attending, list):
        raise InputError(f"config.json: full_attn_idxs = {str(attending)[:60]}", "a list of layers")
    return ["full_attention" if index in attending else "conv" for index in layers]


def inner_width(config: Mapping[str, Any]) -> int:
    """Return the width of the MLP: two thirds of what is stated, times a factor, rounded up to a multiple.

    Raises:
        InputError: one of the values is no number.
    """
    width = config.get("block_ff_dim", config.get("intermediate_size", 12288))
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    multiple = config.get("block_multiple_of", 256)
    known = type(width) is int and type(multiple) is int and 0 < multiple <= 1 << 20
    if not known or not (factor is None or (type(factor) in {int, float} and 0 < factor < 1e3)):
        raise InputError(
            f"config.json: intermediate_size = {str(width)[:40]!r}, block_ffn_dim_multiplier = {str(factor)[:40]!r},"
            f" block_multiple_of = {str(multiple)[:40]!r}",
            "they have to be positive numbers",
        )
    if not config.get("block_auto_adjust_ff_dim", True):
        return int(width)
    width = int(2 * min(width, 1 << 22) / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


GGUF = GgufFamily(
    "lfm2",
    epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
    sizes={"shortconv.l_cache": "kernel", "vocab_size": "vocab"},
    lists={"attention.head_count_kv": kv_heads},
    squeezed=("conv.conv.weight",),
    heads_fill=True,
    unsupported=unsupported_by_llama_cpp,
)
LFM2 = Architecture(
    model_type="lfm2",
    blocks="model.layers",
    outer=outer("model.embedding_norm"),
    kinds=(
        layer(NORMS, CONVOLUTION, MLP, name="conv"),
        layer(NORMS, HEAD_NORMS, ATTENTION, MLP, name="full_attention"),
    ),
    kind_of=mixers,
    sizes={"kernel": ("conv_L_cache",), "ffn": inner_width},
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.embedding_norm",
    slices={IN: ("hidden", "hidden", "hidden")},
    slice_labels={IN: ("b", "c", "x")},
    defaults={
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    gguf=GGUF,
)


CORRECTION = Parameter("feed_forward.expert_bias", ("experts",), "use_expert_bias")
MIXTURE = (
    router("feed_forward.gate"),
    (CORRECTION,),
    experts_one_by_one("inner", module="feed_forward.experts", stored=NAMES),
)


def moe_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `mixers` and `first_dense`."""
    pairs = zip(mixers(config), first_dense(config, "num_dense_layers"), strict=True)
    return [f"{tokens}/{channels}" for tokens, channels in pairs]


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
    kind_of=moe_kinds,
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
        GGUF,
        arch="lfm2moe",
        experts=True,
        sizes={**GGUF.sizes, "expert_feed_forward_length": "inner"},
        numbers={"leading_dense_block_count": "num_dense_layers", "expert_gating_func": SIGMOID},
        graph={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        names={
            "feed_forward.gate.weight": "ffn_gate_inp.weight",
            "feed_forward.expert_bias": "exp_probs_b.bias",
            "feed_forward.experts.gate_proj.weight": "ffn_gate_exps.weight",
            "feed_forward.experts.up_proj.weight": "ffn_up_exps.weight",
            "feed_forward.experts.down_proj.weight": "ffn_down_exps.weight",
        },
    ),
)


FAMILIES = {"lfm2": LFM2, "lfm2_moe": LFM2_MOE}
