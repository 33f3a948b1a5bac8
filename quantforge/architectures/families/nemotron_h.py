"""Nemotron H (Nemotron Nano 2 and 3): one mixer per layer: Mamba-2, attention, an MLP or experts.

Neither the MLP nor the experts are gated: squared ReLU lies between their two matrices, so no scale can be folded
there. The kinds of the layers are given by a list, or by a string with one letter per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput, Stack
from quantforge.architectures.declare import (
    Mixer,
    attention,
    compose_layer,
    norm_parameters,
    plain_mlp,
)
from quantforge.architectures.families.llama import ARCHITECTURE as LLAMA
from quantforge.architectures.mamba2 import mamba2
from quantforge.architectures.mixtures import router_parameters
from quantforge.errors import InputError

MIXER_MODULE = "mixer"
NORM = norm_parameters("norm")
FOLD_INTO_NORM = ScaleFold(FoldKind.NORM, "norm")
KIND_BY_LAYER_TYPE: Mapping[str, str] = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}


def _ungated_experts(module: str, ssm_width: str) -> Mixer:
    up, down = f"{module}.{{}}.up_proj", f"{module}.{{}}.down_proj"
    shapes = {up: (ssm_width, "hidden"), down: ("hidden", ssm_width)}
    return Mixer(
        tuple(
            Parameter(f"{name}.weight", shape, repeated_over="experts", stored=f"{name}.weight")
            for name, shape in shapes.items()
        ),
        tuple(SharedInput((name,), module, repeated_over="experts") for name in shapes),
        (Stack(f"{module}.up_proj", (up,)), Stack(f"{module}.down_proj", (down,))),
        mlp_activations=2,
    )


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer.

    Raises:
        InputError: a value or letter is unknown.
    """
    layer_types = config.get("hybrid_override_pattern") or config.get("layer_types")
    layer_types = layer_types or config["layers_block_type"]
    is_sequence = isinstance(layer_types, str | list) and 0 < len(layer_types) <= 1 << 16
    if not is_sequence or not {*map(str, layer_types)} <= KIND_BY_LAYER_TYPE.keys():
        raise InputError(
            f"the kinds of layers are {str(layer_types)[:60]}",
            "letters of M * - E, or a list of linear_attention, full_attention, mlp and moe",
            subject="config.json",
        )
    return [KIND_BY_LAYER_TYPE[str(layer_type)] for layer_type in layer_types]


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of layers, declared only by the list of their kinds; errors as `layer_kind_names`."""
    return len(layer_kind_names(config))


def ssm_width(config: Mapping[str, Any]) -> int:
    """Return the inner width of the Mamba-2 mixers.

    Raises:
        InputError: the values that are multiplied are not sizes.
    """
    factors = (config["mamba_num_heads"], config["mamba_head_dim"])
    if any(type(size) is not int or not 0 < size < 1 << 16 for size in factors):
        raise InputError(
            f"mamba_num_heads, mamba_head_dim = {str(factors)[:60]}", "sizes", subject="config.json"
        )
    return int(factors[0]) * int(factors[1])


ARCHITECTURE = replace(
    LLAMA,
    model_type="nemotron_h",
    outer_parameters=(
        Parameter("model.embeddings.weight", ("vocab", "hidden")),
        *norm_parameters("model.norm_f"),
        LLAMA.outer_parameters[-1],
    ),
    kinds=(
        compose_layer(
            NORM,
            mamba2(
                MIXER_MODULE,
                FOLD_INTO_NORM,
                bias="use_bias",
                conv_bias="use_conv_bias",
                output_bias="use_bias",
            ),
            name="mamba",
        ),
        compose_layer(NORM, attention(norm=FOLD_INTO_NORM, module=MIXER_MODULE), name="attention"),
        compose_layer(
            NORM, plain_mlp("mlp_bias", norm=FOLD_INTO_NORM, module=MIXER_MODULE), name="mlp"
        ),
        compose_layer(
            NORM,
            router_parameters(
                f"{MIXER_MODULE}.gate", correction=f"{MIXER_MODULE}.gate.e_score_correction_bias"
            ),
            plain_mlp(
                "mlp_bias", norm=None, module=f"{MIXER_MODULE}.shared_experts", width="shared"
            ),
            _ungated_experts(f"{MIXER_MODULE}.experts", "inner"),
            name="moe",
        ),
    ),
    layer_kind_names=layer_kind_names,
    embedding="model.embeddings",
    final_norm="model.norm_f",
    prefixes=(("", ""), ("backbone.", "model.")),
    required_values={"moe_latent_size": None},
    sizes={
        "layers": layer_count,
        "ssm": ssm_width,
        "ssm_heads": ("mamba_num_heads",),
        "ssm_groups": ("n_groups", "mamba_n_groups"),
        "ssm_state": ("ssm_state_size",),
        "kernel": ("conv_kernel", "mamba_d_conv"),
        "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("moe_shared_expert_intermediate_size",),
    },
    graph=None,
    gguf=None,
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    },
)
FAMILIES = {"nemotron_h": ARCHITECTURE}
