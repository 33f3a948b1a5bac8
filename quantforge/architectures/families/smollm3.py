"""SmolLM 3: a llama that skips rotary embeddings in every fourth layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.dimensions import dimensions_of
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, Keys

INTERVAL = 4


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    It rotates in all but every fourth layer.
    """
    expected, stated = rotating(dimensions_of(config).layers), config.get("no_rope_layers")
    interval = config.get("no_rope_layer_interval", INTERVAL)
    if stated is None and interval != INTERVAL:
        return f"no_rope_layer_interval = {interval}", f"{INTERVAL}"
    if isinstance(stated, list) and stated[: len(expected)] != expected:
        return f"no_rope_layers = {stated[:8]}...", f"llama.cpp assumes {expected[:8]}..."
    return None


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    usual = keys.usual()
    layers = rotating(usual["num_hidden_layers"])
    return {**usual, "hidden_act": "silu", "no_rope_layers": layers}


def rotating(layers: int) -> list[int]:
    """Return ``no_rope_layers``: 1 for a layer that rotates queries and keys, 0 for the last of each four."""
    return [int((layer + 1) % INTERVAL != 0) for layer in range(layers)]


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="smollm3",
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    windows=WindowRule(asked=True),
    gguf=GgufFamily(
        "smollm3",
        counts_vocabulary=True,
        interleaved=True,
        class_name="SmolLM3ForCausalLM",
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
)
FAMILIES = {"smollm3": ARCHITECTURE}
