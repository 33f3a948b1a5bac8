"""Kimi Linear: delta attention in three layers of four, latent attention in the others, experts behind a dense one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import Parameter, deepseek_v3, latent, llama
from quantforge.architectures.declare import Mixer, gated_mlp
from quantforge.architectures.delta_attention import JOINED, SIZES, delta_attention
from quantforge.architectures.dimensions import layer_types
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_one_by_one,
    listed,
    router,
    shared_experts,
)
from quantforge.errors import InputError

LINEAR, FULL = "linear_attention", "full_attention"
STORED = "block_sparse_moe"
SHARED: tuple[Mixer, ...] = tuple(
    replace(
        part,
        parameters=tuple(
            replace(item, stored=item.name.replace("mlp.", f"{STORED}.", 1))
            for item in part.parameters
        ),
    )
    for part in shared_experts("shared*inner")
    if isinstance(part, Mixer)
)
MIXTURE: tuple[Mixer | tuple[Parameter, ...], ...] = (
    router(
        "mlp.gate",
        stored=f"{STORED}.gate.weight",
        correction="mlp.gate.e_score_correction_bias",
        stored_correction=f"{STORED}.gate.e_score_correction_bias",
    ),
    *SHARED,
    experts_one_by_one("inner", stored=("w1", "w3", "w2"), stored_module=f"{STORED}.experts"),
)
TOKENS = {LINEAR: delta_attention(), FULL: latent.latent_attention(queries=False)}
ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    model_type="kimi_linear",
    kinds=tuple(
        kind
        for name, mixer in TOKENS.items()
        for kind in dense_or_sparse(
            llama.NORMS, mixer, dense=gated_mlp(), sparse=MIXTURE, prefix=f"{name}/"
        )
    ),
    kind_of="quantforge.architectures.kimi_linear.kinds",
    converted=True,
    joined=JOINED,
    # transformers writes the dense first layer as if it were a mixture.
    prefixes=(("", ""), (f"model.layers.0.{STORED}.", "model.layers.0.mlp.")),
    sizes={
        **{key: place for key, place in latent.SIZES.items() if key != "q_rank"},
        **SIZES,
        "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("num_shared_experts", "n_shared_experts"),
    },
    requires={"q_lora_rank": None},
    gguf=None,
    defaults={
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `mixers` and `listed`."""
    pairs = zip(mixers(config), listed(config), strict=False)
    return [f"{tokens}/{channels}" for tokens, channels in pairs]


def mixers(config: Mapping[str, Any]) -> list[str]:
    """Return the attention of every layer: as ``layer_types`` lists them, else full where ``full_attn_layers`` says so.

    Without either, it is full in every fourth layer behind the first.

    Raises:
        InputError: ``full_attn_layers`` is no list.
    """
    if (listed := layer_types(config)) is not None:
        return listed
    layers = range(config["num_hidden_layers"])
    nested = config.get("linear_attn_config")
    full = nested.get("full_attn_layers") if isinstance(nested, Mapping) else None
    if full is None:
        return [FULL if index and index % 4 == 0 else LINEAR for index in layers]
    if not isinstance(full, list):
        raise InputError(
            f"config.json: full_attn_layers = {str(full)[:60]}", "a list of layers, counted from 1"
        )
    return [FULL if index + 1 in full else LINEAR for index in layers]
