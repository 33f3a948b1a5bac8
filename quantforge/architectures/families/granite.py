"""Granite 3 and 4: a llama with factors on embeddings, attention, residuals and logits.

Files of the mixtures hold experts stacked, ``[experts, out, in]``. Some have a shared expert, whose gate and up are one
matrix. Granite 4 hybrids have Mamba-2 in most layers and attention in the others, then a shared MLP, with experts or
without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, ScaleFold, SharedInput
from quantforge.architectures.declare import (
    BEFORE_ATTENTION,
    BEFORE_MLP,
    Mixer,
    attention,
    layer,
    linear,
)
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import LLAMA_BIASES, WITH_TABLE, GgufFamily
from quantforge.architectures.mamba2 import mamba2
from quantforge.architectures.mixtures import DENSE, SPARSE, experts_in_one, router
from quantforge.errors import InputError

# Where a configuration leaves them out.
FACTORS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GGUF_FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE = replace(
    llama.ARCHITECTURE,
    model_type="granite",
    defaults={**llama.ARCHITECTURE.defaults, **FACTORS},
    gguf=GgufFamily(
        "granite",
        interleaved=True,
        scalings=WITH_TABLE,
        biases=LLAMA_BIASES,
        class_name="GraniteForCausalLM",
        reals=GGUF_FACTORS,
    ),
)


STORED = "block_sparse_moe"
EXPERTS = experts_in_one(
    "ffn",
    module=f"{STORED}.experts",
    stored=(f"{STORED}.input_linear.weight", f"{STORED}.output_linear.weight"),
    stored_one=("w1", "w3", "w2"),
)
ROUTER = router(f"{STORED}.router", stored=f"{STORED}.router.layer.weight")
PARTS = (llama.NORMS, attention("attention_bias"), ROUTER, EXPERTS)
GRANITEMOE = replace(
    llama.ARCHITECTURE,
    model_type="granitemoe",
    kinds=(layer(*PARTS),),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        **FACTORS,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    gguf=GgufFamily(
        "granitemoe",
        interleaved=True,
        scalings=WITH_TABLE,
        experts=True,
        reals=GGUF_FACTORS,
        names={
            f"{STORED}.experts.gate_proj.weight": "ffn_gate_exps.weight",
            f"{STORED}.experts.up_proj.weight": "ffn_up_exps.weight",
            f"{STORED}.experts.down_proj.weight": "ffn_down_exps.weight",
            f"{STORED}.router.weight": "ffn_gate_inp.weight",
        },
    ),
)


GATE_UP, DOWN = "shared_mlp.input_linear", "shared_mlp.output_linear"
SHARED = Mixer(
    (*linear(GATE_UP, "2*shared", "hidden"), *linear(DOWN, "hidden", "shared")),
    (
        SharedInput((GATE_UP,), "shared_mlp"),
        SharedInput((DOWN,), DOWN, ScaleFold(FoldKind.ROWS, GATE_UP, "up")),
    ),
    inner_copies=4,
)


def shared_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: all of them have a shared expert, or none."""
    sharing = bool(config["shared_intermediate_size"])
    return ["sharing" if sharing else "experts"] * config["num_hidden_layers"]


def shared_width(config: Mapping[str, Any]) -> int:
    """Return the width of the shared expert; 1 where there is none.

    Raises:
        InputError: it is no size.
    """
    size = config["shared_intermediate_size"]
    if type(size) is not int or size < 0:
        raise InputError(f"config.json: shared_intermediate_size = {str(size)[:40]!r}", "a size")
    return size or 1


GRANITEMOESHARED = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    kinds=(layer(*PARTS, name="experts"), layer(*PARTS, SHARED, name="sharing")),
    kind_of=shared_kinds,
    gguf=None,  # its gate and up are one matrix, and two in such a file
    slices={GATE_UP: ("shared", "shared")},
    slice_labels={GATE_UP: ("gate", "up")},
    sizes={**GRANITEMOE.sizes, "shared": shared_width},
    defaults={**GRANITEMOE.defaults, "shared_intermediate_size": 0},
)


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
ALONE = replace(SHARED, inputs=(replace(SHARED.inputs[0], scale_fold=BEFORE_MLP), SHARED.inputs[1]))
CHANNELS = {DENSE: (ALONE,), SPARSE: (ROUTER, SHARED, EXPERTS)}


def hybrid_kinds(config: Mapping[str, Any]) -> list[str]:
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


def mamba_width(config: Mapping[str, Any]) -> int:
    """Return the inner width of the Mamba-2 mixers.

    Raises:
        InputError: its factors are no sizes.
    """
    factors: tuple[Any, ...] = (config["mamba_expand"], config.get("hidden_size"))
    if any(type(size) is not int or not 0 < size < 1 << 20 for size in factors):
        raise InputError(f"config.json: mamba_expand = {str(factors[0])[:40]!r}", "a number")
    return int(factors[0]) * int(factors[1])


GRANITEMOEHYBRID = replace(
    GRANITEMOESHARED,
    model_type="granitemoehybrid",
    kinds=tuple(
        layer(llama.NORMS, mixer, *parts, name=f"{tokens}/{channels}")
        for tokens, mixer in MIXERS.items()
        for channels, parts in CHANNELS.items()
    ),
    kind_of=hybrid_kinds,
    other_words=tuple(WORDS),
    sizes={
        "ssm": mamba_width,
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


FAMILIES = {
    "granite": GRANITE,
    "granitemoe": GRANITEMOE,
    "granitemoehybrid": GRANITEMOEHYBRID,
    "granitemoeshared": GRANITEMOESHARED,
}
