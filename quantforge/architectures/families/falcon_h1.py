"""Falcon H1: in every layer attention and a Mamba-2 mixer side by side after one norm, then a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, LayerKind, ScaleFold
from quantforge.architectures.declare import (
    Mixer,
    attention,
    gated_mlp,
    layer,
    norms,
    outer,
    side_by_side,
)
from quantforge.architectures.families.llama import ARCHITECTURE as LLAMA
from quantforge.architectures.mamba2 import mamba2
from quantforge.errors import InputError

NORMED, BARE = "normed", "bare"  # kinds of layers: with and without a norm inside of the mixer
BEFORE = ScaleFold(FoldKind.NORM, "input_layernorm")
MODULE = "feed_forward"


def _mlp() -> Mixer:
    """Return the MLP, which computes ``up`` before ``gate``."""
    mlp = gated_mlp("mlp_bias", norm=ScaleFold(FoldKind.NORM, "pre_ff_layernorm"), module=MODULE)
    first, last = mlp.inputs
    return replace(mlp, inputs=(replace(first, linears=first.linears[::-1]), last))


def _kind(name: str) -> LayerKind:
    tokens = side_by_side(
        mamba2(
            "mamba",
            BEFORE,
            bias="mamba_proj_bias",
            conv_bias="mamba_conv_bias",
            output_bias="projectors_bias",
            inner_norm=name == NORMED,
        ),
        attention("attention_bias"),
    )
    parts = (norms("input_layernorm", "pre_ff_layernorm"), tokens, _mlp())
    return replace(layer(*parts, name=name), num_outputs=1)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: all mixers have an inner norm, or none."""
    return [NORMED if config["mamba_rms_norm"] else BARE] * config["num_hidden_layers"]


def width(config: Mapping[str, Any]) -> int:
    """Return the inner width of the mixers: as stated, or so many times the model's.

    Raises:
        InputError: these are no sizes.
    """
    stated = config.get("mamba_d_ssm")
    factors: tuple[Any, ...] = (config.get("mamba_expand"), config.get("hidden_size"))
    sizes: tuple[Any, ...] = factors if stated is None else (stated, 1)
    if any(type(size) is not int or not 0 < size < 1 << 22 for size in sizes):
        raise InputError(
            f"config.json: mamba_d_ssm = {str(stated)[:40]!r}, mamba_expand = {str(factors[0])[:40]!r}",
            "sizes, or mamba_d_ssm = null",
        )
    return int(sizes[0]) * int(sizes[1])


ARCHITECTURE = replace(
    LLAMA,
    model_type="falcon_h1",
    outer=outer("model.final_layernorm"),
    kinds=(_kind(NORMED), _kind(BARE)),
    kind_of=kinds,
    final_norm="model.final_layernorm",
    sizes={
        "ssm": width,
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
