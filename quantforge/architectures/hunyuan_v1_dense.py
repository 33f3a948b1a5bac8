"""Hunyuan (dense): a llama with an RMSNorm over each head of q and k, behind the rotation.

Published models call the scaling of their positions dynamic, and state an ``alpha``: it changes the base alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, gated_mlp, layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dimensions import dimensions_of
from quantforge.architectures.llama_cpp import Family
from quantforge.errors import InputError

HEAD_NORMS = norms("self_attn.query_layernorm", "self_attn.key_layernorm", dimension="head")


def base(config: Mapping[str, Any]) -> float | None:
    """Return the base of the frequencies that ``alpha`` makes; None where there is none.

    Raises:
        InputError: a value is no positive number.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or not scaling.get("alpha"):
        return None
    if scaling.get("rope_type", scaling.get("type")) != "dynamic":
        return None
    width = dimensions_of(config).head
    values = (scaling.get("rope_theta", config.get("rope_theta", 1e4)), scaling["alpha"])
    if width < 4 or not all(type(one) in {int, float} and 0 < one < 1e30 for one in values):
        raise InputError(
            f"config.json: base and alpha of the rope scaling are {values}", "two positive numbers"
        )
    theta, alpha = values
    return float(theta * alpha ** (width / (width - 2)))


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="hunyuan_v1_dense",
    kinds=(layer(llama.NORMS, HEAD_NORMS, attention("attention_bias"), gated_mlp()),),
    defaults={"rms_norm_eps": 1e-5},
    graph=DecoderGraph(head_norms=("query_layernorm", "key_layernorm"), norms_behind=True),
    gguf=Family("hunyuan-dense", class_name="HunYuanDenseV1ForCausalLM", base=base),
)
