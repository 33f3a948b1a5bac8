"""Qwen 3 Next and 3.5: gated delta nets in three layers of four, gated attention in the others.

Qwen 3 Next has experts with a shared one, Qwen 3.5 a gated MLP, or experts that files hold one by one or stacked,
beside a vision tower. Norms multiply by 1 + w, but for the one inside of the delta nets. Half of the rows of ``q_proj``
are gates: ``W_o`` reads ``attention(q, k, v) * sigmoid(gate)``, which is linear in ``v``.

A gated delta net keeps a state per head that forgets, and is corrected toward what it should have said. With the
block's input ``h`` after its norm, and a depthwise convolution over a few tokens:

    [q, k, v] = silu(conv(W_qkv h));   z = W_z h;   b = sigmoid(W_b h);   g = -exp(A) softplus(W_a h + dt)
    S = exp(g) S (1 - b k k^T) + b v k^T;   y = W_out (norm(S q) * silu(z))

All projections read the same activation, whose norm absorbs. The norm over each head of what is said has one weight
for all heads, and ``silu`` follows every projection, so that nothing absorbs a scale of what ``W_out`` reads. The
convolution, the decays ``A`` and their offsets stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput
from quantforge.architectures.declare import (
    QWEN_TOWER,
    Mixer,
    attention,
    beside_towers,
    gated_mlp,
    layer,
    linear,
    norms,
)
from quantforge.architectures.dimensions import layer_types
from quantforge.architectures.families import llama, qwen3
from quantforge.architectures.layer_kind import convolution, recurrent
from quantforge.architectures.layer_windows import NONE
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_in_one,
    experts_one_by_one,
    router,
    shared_experts,
)
from quantforge.errors import InputError

HERE = "linear_attn"
KEYS, VALUES = "k_heads*k_head", "v_heads*v_head"
SIZES: Mapping[str, tuple[str, ...]] = {
    "k_heads": ("linear_num_key_heads",),
    "k_head": ("linear_key_head_dim",),
    "v_heads": ("linear_num_value_heads",),
    "v_head": ("linear_value_head_dim",),
    "kernel": ("linear_conv_kernel_dim",),
}
DEFAULTS: Mapping[str, object] = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Projections of the block's input, each with its rows: all apart, or joined head by head.
APART: Mapping[str, str] = {
    "in_proj_qkv": f"2*{KEYS}+{VALUES}",
    "in_proj_z": VALUES,
    "in_proj_b": "v_heads",
    "in_proj_a": "v_heads",
}
JOINED: Mapping[str, str] = {
    "in_proj_qkvz": f"2*{KEYS}+2*{VALUES}",
    "in_proj_ba": "2*v_heads",
}


def gated_delta_net(projections: Mapping[str, str], norm: ScaleFold | None) -> Mixer:
    """Declare a gated delta net.

    Args:
        projections: of the block's input, with their rows: `APART` or `JOINED`.
        norm: makes what they read.
    """
    out = f"{HERE}.out_proj"
    return Mixer(
        (
            Parameter(f"{HERE}.dt_bias", ("v_heads",)),
            Parameter(f"{HERE}.A_log", ("v_heads",)),
            Parameter(f"{HERE}.conv1d.weight", (f"2*{KEYS}+{VALUES}", "1", "kernel")),
            *(
                item
                for name, rows in projections.items()
                for item in linear(f"{HERE}.{name}", rows, "hidden")
            ),
            *norms(f"{HERE}.norm", dimension="v_head"),
            *linear(out, "hidden", VALUES),
        ),
        (
            SharedInput(tuple(f"{HERE}.{name}" for name in projections), HERE, norm),
            SharedInput((out,), out),
        ),
        states=(*convolution(f"2*{KEYS}+{VALUES}"), *recurrent("v_heads", "k_head*v_head")),
    )


LINEAR, FULL = "linear_attention", "full_attention"
BEFORE_TOKENS = ScaleFold(FoldKind.NORM_PLUS_ONE, "input_layernorm")
BEFORE_CHANNELS = ScaleFold(FoldKind.NORM_PLUS_ONE, "post_attention_layernorm")
ATTENTION = attention("attention_bias", norm=BEFORE_TOKENS, q_rows="2*heads*head")
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


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    It puts attention in every n-th layer.
    """
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
    """Return the kind of every layer; errors as `mixers` and `qwen3.kinds`."""
    pairs = zip(mixers(config), qwen3.kinds(config), strict=False)
    return [f"{tokens}/{channels}" for tokens, channels in pairs]


QWEN3_NEXT = replace(
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
    gguf=GgufFamily(
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
        unsupported=unsupported_by_llama_cpp,
        names={"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"},
        squeezed=("linear_attn.conv1d.weight",),
        decays=("linear_attn.A_log",),
    ),
    windows=NONE,
)


DELTA_NET = gated_delta_net(APART, BEFORE_TOKENS)
QWEN3_5_TEXT = replace(
    QWEN3_NEXT,
    kinds=(
        layer(llama.NORMS, DELTA_NET, MLP, name=LINEAR),
        layer(qwen3.NORMS, ATTENTION, MLP, name=FULL),
    ),
    kind_of=mixers,
    sizes=SIZES,
    gguf=None,
    defaults={
        **DEFAULTS,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 12288,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    },
)
QWEN3_5 = beside_towers(QWEN3_5_TEXT, "qwen3_5", (QWEN_TOWER,))


STACKED_MIXTURE = (*MIXTURE[:-1], experts_in_one("inner"))
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    kinds=(
        layer(llama.NORMS, DELTA_NET, *STACKED_MIXTURE, name=LINEAR),
        layer(qwen3.NORMS, ATTENTION, *STACKED_MIXTURE, name=FULL),
    ),
    joins_experts=True,
    sizes=QWEN3_NEXT.sizes,
    defaults={
        **DEFAULTS,
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
QWEN3_5_MOE = beside_towers(QWEN3_5_MOE_TEXT, "qwen3_5_moe", (QWEN_TOWER,))


FAMILIES = {
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
}
