"""Granite 3 and 4: a llama with multipliers on embeddings, attention, residuals and logits.

Files of the mixtures store experts stacked, ``[experts, out, in]``. Some have a shared expert, whose gate and up are
one matrix. Granite 4 hybrids have Mamba-2 in most layers and attention in the others, followed by a shared MLP, with or
without experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, ScaleFold, SharedInput
from quantforge.architectures.declare import (
    FOLD_INTO_ATTENTION_NORM,
    FOLD_INTO_MLP_NORM,
    Mixer,
    attention,
    compose_layer,
    linear_parameters,
)
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import LLAMA_BIASES, SCALINGS_WITH_TABLE, GgufFamily
from quantforge.architectures.mamba2 import mamba2
from quantforge.architectures.mixtures import DENSE, SPARSE, router_parameters, stacked_experts
from quantforge.errors import InputError

# Values of multipliers that a configuration omits.
DEFAULT_MULTIPLIERS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GGUF_MULTIPLIER_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE = replace(
    llama.ARCHITECTURE,
    model_type="granite",
    defaults={**llama.ARCHITECTURE.defaults, **DEFAULT_MULTIPLIERS},
    gguf=GgufFamily(
        "granite",
        permutes_qk=True,
        rope_scalings=SCALINGS_WITH_TABLE,
        bias_suffixes=LLAMA_BIASES,
        transformers_class="GraniteForCausalLM",
        float_keys=GGUF_MULTIPLIER_KEYS,
    ),
)


MOE_MODULE = "block_sparse_moe"
EXPERTS = stacked_experts(
    "ffn",
    module=f"{MOE_MODULE}.experts",
    stored=(f"{MOE_MODULE}.input_linear.weight", f"{MOE_MODULE}.output_linear.weight"),
    stored_one=("w1", "w3", "w2"),
)
ROUTER = router_parameters(f"{MOE_MODULE}.router", stored=f"{MOE_MODULE}.router.layer.weight")
COMMON_PARTS = (llama.NORMS, attention("attention_bias"), ROUTER, EXPERTS)
GRANITEMOE = replace(
    llama.ARCHITECTURE,
    model_type="granitemoe",
    kinds=(compose_layer(*COMMON_PARTS),),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        **DEFAULT_MULTIPLIERS,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    gguf=GgufFamily(
        "granitemoe",
        permutes_qk=True,
        rope_scalings=SCALINGS_WITH_TABLE,
        has_experts=True,
        float_keys=GGUF_MULTIPLIER_KEYS,
        tensor_names={
            f"{MOE_MODULE}.experts.gate_proj.weight": "ffn_gate_exps.weight",
            f"{MOE_MODULE}.experts.up_proj.weight": "ffn_up_exps.weight",
            f"{MOE_MODULE}.experts.down_proj.weight": "ffn_down_exps.weight",
            f"{MOE_MODULE}.router.weight": "ffn_gate_inp.weight",
        },
    ),
)


SHARED_GATE_UP, SHARED_DOWN = "shared_mlp.input_linear", "shared_mlp.output_linear"
SHARED_EXPERT = Mixer(
    (
        *linear_parameters(SHARED_GATE_UP, "2*shared", "hidden"),
        *linear_parameters(SHARED_DOWN, "hidden", "shared"),
    ),
    (
        SharedInput((SHARED_GATE_UP,), "shared_mlp"),
        SharedInput((SHARED_DOWN,), SHARED_DOWN, ScaleFold(FoldKind.ROWS, SHARED_GATE_UP, "up")),
    ),
    mlp_activations=4,
)


def shared_expert_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer: either all have a shared expert, or none has."""
    has_shared_expert = bool(config["shared_intermediate_size"])
    return ["sharing" if has_shared_expert else "experts"] * config["num_hidden_layers"]


def shared_expert_width(config: Mapping[str, Any]) -> int:
    """Return the width of the shared expert; 1 if there is none.

    Raises:
        InputError: the configured value is not a size.
    """
    size = config["shared_intermediate_size"]
    if type(size) is not int or size < 0:
        raise InputError(
            f"shared_intermediate_size = {str(size)[:40]!r}", "a size", subject="config.json"
        )
    return size or 1


GRANITEMOESHARED = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    kinds=(
        compose_layer(*COMMON_PARTS, name="experts"),
        compose_layer(*COMMON_PARTS, SHARED_EXPERT, name="sharing"),
    ),
    layer_kind_names=shared_expert_kind_names,
    gguf=None,  # gate and up of its shared expert are one matrix, but two in a GGUF file
    slices={SHARED_GATE_UP: ("shared", "shared")},
    slice_labels={SHARED_GATE_UP: ("gate", "up")},
    sizes={**GRANITEMOE.sizes, "shared": shared_expert_width},
    defaults={**GRANITEMOE.defaults, "shared_intermediate_size": 0},
)


MIXER_BY_LAYER_TYPE: Mapping[str, str] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
MIXERS: Mapping[str, Mixer] = {
    "mamba": mamba2(
        "mamba",
        FOLD_INTO_ATTENTION_NORM,
        bias="mamba_proj_bias",
        conv_bias="mamba_conv_bias",
        output_bias="mamba_proj_bias",
    ),
    "attention": attention("attention_bias"),
}
# Without experts, nothing else reads the norm before the shared MLP, so a scale folds into it.
SHARED_MLP_ONLY = replace(
    SHARED_EXPERT,
    inputs=(
        replace(SHARED_EXPERT.inputs[0], scale_fold=FOLD_INTO_MLP_NORM),
        SHARED_EXPERT.inputs[1],
    ),
)
MLP_PARTS = {DENSE: (SHARED_MLP_ONLY,), SPARSE: (ROUTER, SHARED_EXPERT, EXPERTS)}


def hybrid_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer: mixer and MLP; layers are Mamba-2 unless listed otherwise.

    Raises:
        InputError: ``layer_types`` is not a list, or has an unknown value.
    """
    layer_types = config.get("layer_types") or ["mamba"] * config["num_hidden_layers"]
    if (
        not isinstance(layer_types, list)
        or not {*map(str, layer_types)} <= MIXER_BY_LAYER_TYPE.keys()
    ):
        raise InputError(
            f"layer_types = {str(layer_types)[:60]}",
            f"a list of {' or '.join(MIXER_BY_LAYER_TYPE)}",
            subject="config.json",
        )
    mlp_kind = SPARSE if config.get("num_local_experts") else DENSE
    return [f"{MIXER_BY_LAYER_TYPE[str(layer_type)]}/{mlp_kind}" for layer_type in layer_types]


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts; 1 if there are none.

    Raises:
        InputError: the configured value is not a number.
    """
    count = config.get("num_local_experts") or 0
    if type(count) is not int or not 0 <= count <= 1 << 16:
        raise InputError(
            f"num_local_experts = {str(count)[:40]!r}", "a number, or 0", subject="config.json"
        )
    return count or 1


def mamba_width(config: Mapping[str, Any]) -> int:
    """Return the inner width of the Mamba-2 mixers.

    Raises:
        InputError: the values that are multiplied are not sizes.
    """
    factors: tuple[Any, ...] = (config["mamba_expand"], config.get("hidden_size"))
    if any(type(size) is not int or not 0 < size < 1 << 20 for size in factors):
        raise InputError(
            f"mamba_expand = {str(factors[0])[:40]!r}", "a number", subject="config.json"
        )
    return int(factors[0]) * int(factors[1])


GRANITEMOEHYBRID = replace(
    GRANITEMOESHARED,
    model_type="granitemoehybrid",
    kinds=tuple(
        compose_layer(llama.NORMS, mixer, *parts, name=f"{tokens}/{channels}")
        for tokens, mixer in MIXERS.items()
        for channels, parts in MLP_PARTS.items()
    ),
    layer_kind_names=hybrid_kind_names,
    extra_layer_types=tuple(MIXER_BY_LAYER_TYPE),
    sizes={
        "ssm": mamba_width,
        "ssm_heads": ("mamba_n_heads",),
        "ssm_groups": ("mamba_n_groups",),
        "ssm_state": ("mamba_d_state",),
        "kernel": ("mamba_d_conv",),
        "experts": expert_count,
        "shared": ("shared_intermediate_size",),
    },
    graph=None,
    defaults={
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    },
)


FAMILIES = {
    "granite": GRANITE,
    "granitemoe": GRANITEMOE,
    "granitemoehybrid": GRANITEMOEHYBRID,
    "granitemoeshared": GRANITEMOESHARED,
}
