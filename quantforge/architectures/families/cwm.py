"""CWM: a llama with an explicit head size and a sliding window in three of four layers."""

from dataclasses import replace

from quantforge.architectures.families import llama, mistral
from quantforge.architectures.layer_windows import WindowRule

ARCHITECTURE = replace(
    mistral.MISTRAL,
    model_type="cwm",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    graph=llama.ARCHITECTURE.graph,
    windows=WindowRule(width=8192, period=4, full_first=True),
    gguf=None,
)
FAMILIES = {"cwm": ARCHITECTURE}
