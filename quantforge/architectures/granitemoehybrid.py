"""Granite 4 hybrids: Mamba-2 in most layers and attention in the others, then a shared MLP, with experts or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import granitemoe, granitemoeshared, llama
from quantforge.architectures.declare import BEFORE_ATTENTION, BEFORE_MLP, Mixer, attention, layer
from quantforge.architectures.mamba2 import mamba2
from quantforge.architectures.mixtures import DENSE, SPARSE
from quantforge.errors import InputError

WORDS: Mapping[str, str] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
MIXERS: Mapping[str, Mixer] = {
    "mamba": mamba2(
        "mamba",
        BEFORE_ATTENTION,
        bias="mamba_proj_bias",
        conv_bias="mamba_conv_bias",
        output_bias="mamba_proj_bias",
    ),
    "attention": attention("attention_bias"),
}
# Without experts the norm before the shared MLP has no other reader.
ALONE = replace(
    granitemoeshared.SHARED,
    inputs=(
        replace(granitemoeshared.SHARED.inputs[0], absorber=BEFORE_MLP),
        granitemoeshared.SHARED.inputs[1],
    ),
)
CHANNELS = {
    DENSE: (ALONE,),
    SPARSE: (granitemoe.ROUTER, granitemoeshared.SHARED, granitemoe.EXPERTS),
}


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: as listed, or Mamba-2; with experts where there are any.

    Raises:
        InputError: ``layer_types`` is no list, or has an unknown word.
    """
    stated = config.get("layer_types") or ["mamba"] * config["num_hidden_layers"]
    if not isinstance(stated, list) or not {*map(str, stated)} <= WORDS.keys():
        raise InputError(
            f"config.json: layer_types = {str(stated)[:60]}", f"a list of {' or '.join(WORDS)}"
        )
    channels = SPARSE if config.get("num_local_experts") else DENSE
    return [f"{WORDS[str(word)]}/{channels}" for word in stated]


def experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts; 1 where there are none.

    Raises:
        InputError: it is no number.
    """
    count = config.get("num_local_experts") or 0
    if type(count) is not int or not 0 <= count <= 1 << 16:
        raise InputError(f"config.json: num_local_experts = {str(count)[:40]!r}", "a number, or 0")
    return count or 1


def width(config: Mapping[str, Any]) -> int:
    """Return the inner width of the Mamba-2 mixers.

    Raises:
        InputError: its factors are no sizes.
    """
    factors: tuple[Any, ...] = (config["mamba_expand"], config.get("hidden_size"))
    if any(type(size) is not int or not 0 < size < 1 << 20 for size in factors):
        raise InputError(f"config.json: mamba_expand = {str(factors[0])[:40]!r}", "a number")
    return int(factors[0]) * int(factors[1])


ARCHITECTURE = replace(
    granitemoeshared.ARCHITECTURE,
    model_type="granitemoehybrid",
    kinds=tuple(
        layer(llama.NORMS, mixer, *parts, name=f"{tokens}/{channels}")
        for tokens, mixer in MIXERS.items()
        for channels, parts in CHANNELS.items()
    ),
    kind_of=kinds,
    other_words=tuple(WORDS),
    sizes={
        "ssm": width,
        "ssm_heads": ("mamba_n_heads",),
        "ssm_groups": ("mamba_n_groups",),
        "ssm_state": ("mamba_d_state",),
        "kernel": ("mamba_d_conv",),
        "experts": experts,
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
