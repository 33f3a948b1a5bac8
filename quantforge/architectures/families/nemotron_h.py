"""Nemotron H (Nemotron Nano 2 and 3): every layer is one mixer after a norm: Mamba-2, attention, an MLP or experts.

Neither the MLP nor the experts have a gate: squared ReLU lies between their two matrices, so that nothing absorbs.
Which layer is which, a list says or a text of one letter for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput, Stack
from quantforge.architectures.declare import Mixer, attention, layer, norms, plain_mlp
from quantforge.architectures.families.llama import ARCHITECTURE as LLAMA
from quantforge.architectures.mamba2 import mamba2
from quantforge.architectures.mixtures import router
from quantforge.errors import InputError

HERE = "mixer"
NORM = norms("norm")
BEFORE = ScaleFold(FoldKind.NORM, "norm")
WORDS: Mapping[str, str] = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}


def _experts(module: str, width: str) -> Mixer:
    up, down = f"{module}.{{}}.up_proj", f"{module}.{{}}.down_proj"
    shapes = {up: (width, "hidden"), down: ("hidden", width)}
    return Mixer(
        tuple(
            Parameter(f"{name}.weight", shape, each="experts", stored=f"{name}.weight")
            for name, shape in shapes.items()
        ),
        tuple(SharedInput((name,), module, each="experts") for name in shapes),
        (Stack(f"{module}.up_proj", (up,)), Stack(f"{module}.down_proj", (down,))),
        inner_copies=2,
    )


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer.

    Raises:
        InputError: a word or a letter is unknown.
    """
    stated = config.get("hybrid_override_pattern") or config.get("layer_types")
    stated = stated or config["layers_block_type"]
    known = isinstance(stated, str | list) and 0 < len(stated) <= 1 << 16
    if not known or not {*map(str, stated)} <= WORDS.keys():
        raise InputError(
            f"config.json: the kinds of layers are {str(stated)[:60]}",
            "letters of M * - E, or a list of linear_attention, full_attention, mlp and moe",
        )
    return [WORDS[str(word)] for word in stated]


def count(config: Mapping[str, Any]) -> int:
    """Return the number of layers, which files do not state beside their kinds; errors as `kinds`."""
    return len(kinds(config))


def width(config: Mapping[str, Any]) -> int:
    """Return the inner width of the Mamba-2 mixers.

    Raises:
        InputError: its factors are no sizes.
    """
    factors = (config["mamba_num_heads"], config["mamba_head_dim"])
    if any(type(size) is not int or not 0 < size < 1 << 16 for size in factors):
        raise InputError(
            f"config.json: mamba_num_heads, mamba_head_dim = {str(factors)[:60]}", "sizes"
        )
    return int(factors[0]) * int(factors[1])


ARCHITECTURE = replace(
    LLAMA,
    model_type="nemotron_h",
    outer=(
        Parameter("model.embeddings.weight", ("vocab", "hidden")),
        *norms("model.norm_f"),
        LLAMA.outer[-1],
    ),
    kinds=(
        layer(
            NORM,
            mamba2(
                HERE, BEFORE, bias="use_bias", conv_bias="use_conv_bias", output_bias="use_bias"
            ),
            name="mamba",
        ),
        layer(NORM, attention(norm=BEFORE, module=HERE), name="attention"),
        layer(NORM, plain_mlp("mlp_bias", norm=BEFORE, module=HERE), name="mlp"),
        layer(
            NORM,
            router(f"{HERE}.gate", correction=f"{HERE}.gate.e_score_correction_bias"),
            plain_mlp("mlp_bias", norm=None, module=f"{HERE}.shared_experts", width="shared"),
            _experts(f"{HERE}.experts", "inner"),
            name="moe",
        ),
    ),
    kind_of=kinds,
    embedding="model.embeddings",
    final_norm="model.norm_f",
    prefixes=(("", ""), ("backbone.", "model.")),
    requires={"moe_latent_size": None},
    sizes={
        "layers": count,
        "ssm": width,
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
