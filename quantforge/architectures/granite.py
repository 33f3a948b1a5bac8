"""Granite 3 and 4 (dense): a llama with factors on embeddings, attention, residuals and logits."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.llama_cpp import LLAMA_BIASES, WITH_TABLE, Family

FACTORS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}  # where a configuration leaves them out
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="granite",
    defaults={**llama.ARCHITECTURE.defaults, **FACTORS},
    gguf=Family(
        "granite",
        interleaved=True,
        scalings=WITH_TABLE,
        biases=LLAMA_BIASES,
        class_name="GraniteForCausalLM",
        reals={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
)
