"""Qwen 3 VL: a qwen3 that reads pictures, whose features are added to the states of early layers too."""

from dataclasses import replace

from quantforge.architectures import qwen3
from quantforge.architectures.layer_windows import NONE
from quantforge.architectures.tower_names import QWEN_TOWER, within_whole

ARCHITECTURE = replace(
    within_whole(qwen3.ARCHITECTURE, "qwen3_vl", (QWEN_TOWER,)),
    defaults={
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
    },
    windows=NONE,
)
