"""SmolLM 3: a llama that skips rotary embeddings in every fourth layer."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.layer_windows import WindowRule

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="smollm3",
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    windows=WindowRule(asked=True),
)
