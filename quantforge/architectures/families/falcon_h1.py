"""Falcon H1: parallel attention and Mamba-2 mixer after one norm in every layer, then a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, LayerKind, ScaleFold
from quantforge.architectures.declare import (
    Mixer,
    attention,
    compose_layer,
    gated_mlp,
    norm_parameters,
    outer_parameters,
    parallel_attention_mlp,
)
from quantforge.architectures.families.llama import ARCHITECTURE as LLAMA
from quantforge.architectures.mamba2 import mamba2
from quantforge.errors import InputError

# Layer kinds: with and without a norm inside the Mamba-2 mixer
WITH_INNER_NORM, WITHOUT_INNER_NORM = "normed", "bare"
FOLD_INTO_INPUT_NORM = ScaleFold(FoldKind.NORM, "input_layernorm")
MLP_MODULE = "feed_forward"


def _mlp() -> Mixer:
    """Declare the MLP, which computes ``up`` before ``gate``."""
    mlp = gated_mlp(
        "mlp_bias", norm=ScaleFold(FoldKind.NORM, "pre_ff_layernorm"), module=MLP_MODULE
    )
    first, last = mlp.inputs
    return replace(mlp, inputs=(replace(first, linears=first.linears[::-1]), last))


def _layer_kind(name: str) -> LayerKind:
    tokens = parallel_attention_mlp(
        mamba2(
            "mamba",
            FOLD_INTO_INPUT_NORM,
            bias="mamba_proj_bias",
            conv_bias="mamba_conv_bias",
            output_bias="projectors_bias",
            inner_norm=name == WITH_INNER_NORM,
        ),
        attention("attention_bias"),
    )
    components = (norm_parameters("input_layernorm", "pre_ff_layernorm"), tokens, _mlp())
    return replace(compose_layer(*components, name=name), num_outputs=1)


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer: all Mamba-2 mixers have an inner norm, or none has."""
    return [WITH_INNER_NORM if config["mamba_rms_norm"] else WITHOUT_INNER_NORM] * config[
        "num_hidden_layers"
    ]


def ssm_width(config: Mapping[str, Any]) -> int:
    """Return the inner width of the Mamba-2 mixers: the configured one, or a multiple of the model's width.

    Raises:
        InputError: the configured values are not sizes.
    """
    configured = config.get("mamba_d_ssm")
    factors: tuple[Any, ...] = (config.get("mamba_expand"), config.get("hidden_size"))
    sizes: tuple[Any, ...] = factors if configured is None else (configured, 1)
    if any(type(size) is not int or not 0 < size < 1 << 22 for size in sizes):
        raise InputError(
            f"mamba_d_ssm = {str(configured)[:40]!r}, mamba_expand = {str(factors[0])[:40]!r}",
            "sizes, or mamba_d_ssm = null",
            subject="config.json",
        )
    return int(sizes[0]) * int(sizes[1])


ARCHITECTURE = replace(
    LLAMA,
    model_type="falcon_h1",
    outer_parameters=outer_parameters("model.final_layernorm"),
    kinds=(_layer_kind(WITH_INNER_NORM), _layer_kind(WITHOUT_INNER_NORM)),
    layer_kind_names=layer_kind_names,
    final_norm="model.final_layernorm",
    sizes={
        "ssm": ssm_width,
        "ssm_heads": ("mamba_n_heads",),
        "ssm_groups": ("mamba_n_groups",),
        "ssm_state": ("mamba_d_state",),
        "kernel": ("mamba_d_conv",),
    },
    graph=None,
    gguf=None,
    defaults={
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_rms_norm": False,
    },
)
FAMILIES = {"falcon_h1": ARCHITECTURE}
