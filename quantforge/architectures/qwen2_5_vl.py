"""Qwen 2 and 2.5 VL: a qwen2 that reads pictures; files name its tensors as those of a decoder alone."""

from dataclasses import replace

from quantforge.architectures import qwen2
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.tower_names import QWEN_TOWER, within_whole

ARCHITECTURE = replace(
    within_whole(qwen2.ARCHITECTURE, "qwen2_5_vl", (QWEN_TOWER,)),
    defaults={
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
    },
    windows=WindowRule(width=4096, asked=True, start=("max_window_layers", 80)),
)
