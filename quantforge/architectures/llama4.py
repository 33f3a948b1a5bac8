"""Llama 4: attention with chunks in most layers; experts beside a shared one in all layers or in some; a vision tower.

Files hold the experts stacked, ``[experts, in, out]``. transformers hands every expert every token, each times the
weight of the router, which is zero for all but one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, gated_mlp
from quantforge.architectures.mixtures import (
    DENSE,
    SPARSE,
    dense_or_sparse,
    experts_in_one,
    router,
    shared_experts,
)
from quantforge.architectures.tower_names import beside_towers
from quantforge.errors import InputError

HERE = "feed_forward"
TEXT = replace(
    llama.ARCHITECTURE,
    kinds=dense_or_sparse(
        llama.NORMS,
        attention("attention_bias"),
        dense=gated_mlp(module=HERE, width="dense"),
        sparse=(
            router(f"{HERE}.router"),
            *shared_experts("ffn", module=f"{HERE}.shared_expert"),
            experts_in_one("ffn", module=f"{HERE}.experts", transposed=True),
        ),
    ),
    kind_of="quantforge.architectures.llama4.kinds",
    other_words=("chunked_attention",),
    sizes={"experts": ("num_local_experts",), "dense": ("intermediate_size_mlp",)},
    graph=None,
    defaults={
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
)
ARCHITECTURE = beside_towers(
    TEXT,
    "llama4",
    (r"(model\.)?(vision_model|multi_modal_projector)\..*",),
    (("language_model.", ""), ("model.language_model.", "model.")),
)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: experts in those that are listed, or in each last one of a few.

    Raises:
        InputError: ``moe_layers`` is no list, or the step no number.
    """
    layers, step = config["num_hidden_layers"], config["interleave_moe_layer_step"]
    listed = config.get("moe_layers")
    if type(step) is not int or step < 1 or not (listed is None or isinstance(listed, list)):
        raise InputError(
            f"config.json: moe_layers = {str(listed)[:60]}, interleave_moe_layer_step = {str(step)[:40]}",
            "a list of layers, or a positive number",
        )
    sparse = range(step - 1, layers, step) if listed is None else listed
    return [SPARSE if index in sparse else DENSE for index in range(layers)]
