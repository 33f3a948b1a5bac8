"""Mixtral: a mistral with experts, stored one by one under names of their own, in place of the MLP."""

from dataclasses import replace
from typing import Any

from quantforge.architectures import llama, mistral
from quantforge.architectures.declare import attention, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import WITH_TABLE, Family, Keys, experts_restated
from quantforge.architectures.mixtures import experts_one_by_one, router

STORED, STORED_NAMES = "block_sparse_moe", ("w1", "w3", "w2")


def restated(keys: Keys) -> dict[str, Any]:
    """Return what the keys of a file say in ``config.json``."""
    return {**keys.usual(), "hidden_act": "silu", **experts_restated(keys)}


ARCHITECTURE = replace(
    mistral.ARCHITECTURE,
    model_type="mixtral",
    graph=DecoderGraph(one_window=True, experts=True),
    kinds=(
        layer(
            llama.NORMS,
            attention(),
            router("mlp.gate", stored=f"{STORED}.gate.weight"),
            experts_one_by_one("ffn", stored_module=f"{STORED}.experts", stored=STORED_NAMES),
        ),
    ),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        **mistral.ARCHITECTURE.defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
    windows=WindowRule(every=True, listed=False),
    gguf=Family(
        "llama",
        interleaved=True,
        experts=True,
        class_name="MixtralForCausalLM",
        scalings=WITH_TABLE,
        restated=restated,
    ),
)
