"""Qwen 3 Next: gated delta nets in three layers of four, gated attention in the others, experts with a shared one.

Norms multiply by 1 + w, but for the one inside of the delta nets. Half of the rows of ``q_proj`` are gates: ``W_o``
reads ``attention(q, k, v) * sigmoid(gate)``, which is linear in ``v``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Absorber, Absorbs, SharedInput, llama, qwen3, qwen3_moe
from quantforge.architectures.declare import Mixer, gated_mlp, linear
from quantforge.architectures.delta_net import DEFAULTS, JOINED, SIZES, VALUES, gated_delta_net
from quantforge.architectures.dimensions import layer_types
from quantforge.architectures.layer_kind import keys_and_values
from quantforge.architectures.layer_windows import NONE
from quantforge.architectures.llama_cpp import Family
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_one_by_one,
    router,
    shared_experts,
)
from quantforge.errors import InputError

LINEAR, FULL = "linear_attention", "full_attention"
BEFORE_TOKENS = Absorber(Absorbs.NORM_PLUS_ONE, "input_layernorm")
BEFORE_CHANNELS = Absorber(Absorbs.NORM_PLUS_ONE, "post_attention_layernorm")
Q, K, V, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
ATTENTION = Mixer(
    (
        *linear(Q, "2*heads*head", "hidden", "attention_bias"),
        *linear(K, "kv", "hidden", "attention_bias"),
        *linear(V, "kv", "hidden", "attention_bias"),
        *linear(OUT, "hidden", "q", "attention_bias"),
    ),
    (
        SharedInput((Q, K, V), "self_attn", BEFORE_TOKENS),
        SharedInput((OUT,), OUT, Absorber(Absorbs.ROWS, V), heads=True),
    ),
    states=keys_and_values(),
)
MLP = gated_mlp(norm=BEFORE_CHANNELS)
MIXTURE = (
    router("mlp.gate"),
    *shared_experts("shared", module="mlp.shared_expert", gate="mlp.shared_expert_gate"),
    experts_one_by_one("inner"),
)


def mixers(config: Mapping[str, Any]) -> list[str]:
    """Return the mixer of tokens of every layer: as ``layer_types`` lists them, or full attention in every n-th.

    Raises:
        InputError: ``full_attention_interval`` is no number.
    """
    if (listed := layer_types(config)) is not None:
        return listed
    every = config.get("full_attention_interval")
    if type(every) is not int or every < 1:
        raise InputError(
            f"config.json: full_attention_interval = {str(every)[:40]!r}", "a number of layers"
        )
    layers = range(config["num_hidden_layers"])
    return [LINEAR if (index + 1) % every else FULL for index in layers]


def beyond_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what llama.cpp does not compute and what it does, or None: it puts attention in every n-th layer."""
    found = mixers(config)
    if LINEAR not in found:
        return "layers that are all full_attention", "linear_attention beside them"
    if config["linear_conv_kernel_dim"] < 2:
        return f"linear_conv_kernel_dim = {config['linear_conv_kernel_dim']}", "2 or more"
    runs = {"layer_types": None, "full_attention_interval": interval(config)}
    if found != mixers({**config, **runs}):
        return f"layer_types = {str(found)[:60]}", "full_attention at the end of equal runs"
    return None


def interval(config: Mapping[str, Any]) -> int:
    """Return how many layers lead to the first full attention, itself included; errors as `mixers`.

    Without any, one more than there are layers.
    """
    return [*mixers(config), FULL].index(FULL) + 1


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `mixers` and those of qwen3_moe."""
    pairs = zip(mixers(config), qwen3_moe.kinds(config), strict=False)
    return [f"{tokens}/{channels}" for tokens, channels in pairs]


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="qwen3_next",
    kinds=(
        *dense_or_sparse(
            llama.NORMS,
            gated_delta_net(JOINED, BEFORE_TOKENS),
            dense=MLP,
            sparse=MIXTURE,
            prefix=f"{LINEAR}/",
        ),
        *dense_or_sparse(qwen3.NORMS, ATTENTION, dense=MLP, sparse=MIXTURE, prefix=f"{FULL}/"),
    ),
    kind_of=kinds,
    sizes={
        **SIZES,
        "interval": interval,
        "experts": ("num_experts", "num_local_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("shared_expert_intermediate_size",),
    },
    graph=None,
    defaults={
        **DEFAULTS,
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
    gguf=Family(
        "qwen3next",
        norm_plus_one=True,
        plain_norms=("linear_attn.norm.weight",),
        experts=True,
        sizes={
            "ssm.conv_kernel": "kernel",
            "ssm.state_size": "k_head",
            "ssm.group_count": "k_heads",
            "ssm.time_step_rank": "v_heads",
            "ssm.inner_size": VALUES,
            "full_attention_interval": "interval",
            "expert_feed_forward_length": "inner",
            "expert_shared_feed_forward_length": "shared",
        },
        graph={"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True},
        equal=(("k_head", "v_head"),),
        obstacle=beyond_llama_cpp,
        names={"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"},
        squeezed=("linear_attn.conv1d.weight",),
        decays=("linear_attn.A_log",),
    ),
    windows=NONE,
)
