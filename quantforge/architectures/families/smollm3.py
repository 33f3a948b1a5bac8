"""SmolLM 3: a llama without rotary embeddings in every fourth layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.dimensions import read_dimensions
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, GgufKeys

NO_ROPE_INTERVAL = 4


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    llama.cpp uses rotary embeddings in all but every fourth layer.
    """
    expected, configured = (
        no_rope_layers(read_dimensions(config).layers),
        config.get("no_rope_layers"),
    )
    interval = config.get("no_rope_layer_interval", NO_ROPE_INTERVAL)
    if configured is None and interval != NO_ROPE_INTERVAL:
        return f"no_rope_layer_interval = {interval}", f"{NO_ROPE_INTERVAL}"
    if isinstance(configured, list) and configured[: len(expected)] != expected:
        return f"no_rope_layers = {configured[:8]}...", f"llama.cpp assumes {expected[:8]}..."
    return None


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    llama_config = keys.llama_config()
    rope_flags = no_rope_layers(llama_config["num_hidden_layers"])
    return {**llama_config, "hidden_act": "silu", "no_rope_layers": rope_flags}


def no_rope_layers(layers: int) -> list[int]:
    """Return the value of ``no_rope_layers``: 1 for a layer with rotary embeddings, 0 for every fourth layer."""
    return [int((layer + 1) % NO_ROPE_INTERVAL != 0) for layer in range(layers)]


ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="smollm3",
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    windows=WindowRule(needs_use_sliding_window=True),
    gguf=GgufFamily(
        "smollm3",
        stores_vocabulary_size=True,
        permutes_qk=True,
        transformers_class="SmolLM3ForCausalLM",
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
)
FAMILIES = {"smollm3": ARCHITECTURE}
