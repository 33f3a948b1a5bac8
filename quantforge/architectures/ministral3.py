"""Ministral 3: a mistral whose queries grow with the logarithm of their position, beyond the original context."""

from dataclasses import replace

from quantforge.architectures import mistral
from quantforge.architectures.layer_windows import WindowRule

ARCHITECTURE = replace(
    mistral.ARCHITECTURE,
    model_type="ministral3",
    defaults={**mistral.ARCHITECTURE.defaults, "head_dim": 128, "rms_norm_eps": 1e-5},
    windows=WindowRule(every=True, listed=False),
)
