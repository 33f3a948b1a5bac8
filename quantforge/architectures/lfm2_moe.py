"""LFM 2 mixtures: an lfm2 with dense first layers, then experts in the place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Absorber, Absorbs, Parameter, lfm2
from quantforge.architectures.declare import gated_mlp, norms
from quantforge.architectures.llama_cpp import SIGMOID
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_one_by_one,
    first_dense,
    router,
)

assert lfm2.ARCHITECTURE.gguf is not None
LFM2_GGUF = lfm2.ARCHITECTURE.gguf
NAMES = ("w1", "w3", "w2")
CORRECTION = Parameter("feed_forward.expert_bias", ("experts",), "use_expert_bias")
MIXTURE = (
    router("feed_forward.gate"),
    (CORRECTION,),
    experts_one_by_one("inner", module="feed_forward.experts", stored=NAMES),
)
MLP = gated_mlp(norm=Absorber(Absorbs.NORM, "ffn_norm"), module="feed_forward", names=NAMES)
HEAD_NORMS = norms("self_attn.q_layernorm", "self_attn.k_layernorm", dimension="head")


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as those of lfm2 and `first_dense`."""
    mixers = zip(lfm2.kinds(config), first_dense(config, "num_dense_layers"), strict=True)
    return [f"{tokens}/{channels}" for tokens, channels in mixers]


ARCHITECTURE = replace(
    lfm2.ARCHITECTURE,
    model_type="lfm2_moe",
    kinds=(
        *dense_or_sparse(lfm2.NORMS, lfm2.CONVOLUTION, dense=MLP, sparse=MIXTURE, prefix="conv/"),
        *dense_or_sparse(
            lfm2.NORMS,
            HEAD_NORMS,
            lfm2.ATTENTION,
            dense=MLP,
            sparse=MIXTURE,
            prefix="full_attention/",
        ),
    ),
    kind_of=kinds,
    sizes={
        "kernel": ("conv_L_cache",),
        "experts": ("num_experts", "num_local_experts"),
        "inner": ("moe_intermediate_size",),
    },
    defaults={
        **lfm2.ARCHITECTURE.defaults,
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
        LFM2_GGUF,
        arch="lfm2moe",
        experts=True,
        sizes={**LFM2_GGUF.sizes, "expert_feed_forward_length": "inner"},
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
