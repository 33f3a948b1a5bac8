"""OLMo 3: an olmo2 in which three layers of four see a window, and the others rotate by frequencies of their own."""

from dataclasses import replace

from quantforge.architectures import olmo2
from quantforge.architectures.layer_windows import WindowRule

ARCHITECTURE = replace(
    olmo2.ARCHITECTURE,
    model_type="olmo3",
    defaults={**olmo2.ARCHITECTURE.defaults, "rope_theta": 500_000.0},
    gguf=None,
    windows=WindowRule(width=4096, period=4),
)
