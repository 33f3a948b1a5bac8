"""AFMoE (Trinity): gated attention, four norms per layer, dense first layers, shared experts.

The gate projection reads the same input as q, k and v, and its sigmoid multiplies the output of attention. So the input
of the output projection is still linear in ``v``, channel by channel, and a scale folds into ``v``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, ScaleFold
from quantforge.architectures.declare import (
    HEAD_NORMS,
    attention,
    gated_mlp,
    linear_parameters,
    norm_parameters,
)
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.mixtures import (
    dense_first_kinds,
    dense_or_sparse,
    router_parameters,
    shared_experts,
    single_experts,
)

GATE_PROJ = "self_attn.gate_proj"
PLAIN_ATTENTION = attention("attention_bias")
GATED_ATTENTION = replace(
    PLAIN_ATTENTION,
    parameters=(*PLAIN_ATTENTION.parameters, *linear_parameters(GATE_PROJ, "q", "hidden")),
    inputs=(
        replace(PLAIN_ATTENTION.inputs[0], linears=(*PLAIN_ATTENTION.inputs[0].linears, GATE_PROJ)),
        *PLAIN_ATTENTION.inputs[1:],
    ),
)
NORMS = (
    *llama.NORMS,
    *norm_parameters("pre_mlp_layernorm", "post_mlp_layernorm"),
    *HEAD_NORMS,
)


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer; errors as `dense_first_kinds`."""
    return dense_first_kinds(config, "num_dense_layers")


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="afmoe",
    kinds=dense_or_sparse(
        NORMS,
        GATED_ATTENTION,
        dense=gated_mlp(norm=ScaleFold(FoldKind.NORM, "pre_mlp_layernorm")),
        sparse=(
            router_parameters("mlp.router.gate", correction="mlp.expert_bias"),
            single_experts("inner"),
            *shared_experts("shared*inner"),
        ),
    ),
    layer_kind_names=layer_kind_names,
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
