"""AFMoE (Trinity): attention whose output is gated, four norms per layer, dense first layers and shared experts.

The gate reads what q, k and v read, and multiplies what attention computed: it leaves the way from ``v`` to the output
linear, channel by channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, ScaleFold
from quantforge.architectures.declare import HEAD_NORMS, attention, gated_mlp, linear, norms
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_one_by_one,
    first_dense,
    router,
    shared_experts,
)

GATE = "self_attn.gate_proj"
PLAIN = attention("attention_bias")
GATED = replace(
    PLAIN,
    parameters=(*PLAIN.parameters, *linear(GATE, "q", "hidden")),
    inputs=(
        replace(PLAIN.inputs[0], linears=(*PLAIN.inputs[0].linears, GATE)),
        *PLAIN.inputs[1:],
    ),
)
NORMS = (
    *llama.NORMS,
    *norms("pre_mlp_layernorm", "post_mlp_layernorm"),
    *HEAD_NORMS,
)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `first_dense`."""
    return first_dense(config, "num_dense_layers")


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="afmoe",
    kinds=dense_or_sparse(
        NORMS,
        GATED,
        dense=gated_mlp(norm=ScaleFold(FoldKind.NORM, "pre_mlp_layernorm")),
        sparse=(
            router("mlp.router.gate", correction="mlp.expert_bias"),
            experts_one_by_one("inner"),
            *shared_experts("shared*inner"),
        ),
    ),
    kind_of=kinds,
    sizes={
        "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("num_shared_experts",),
    },
    defaults={
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
    },
    windows=WindowRule(width=1024, period=4, period_key="global_attn_every_n_layers"),
    gguf=None,
)
FAMILIES = {"afmoe": ARCHITECTURE}
