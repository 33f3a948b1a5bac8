"""Qwen 3.5 (dense): gated delta nets in three layers of four, gated attention in the others, beside a vision tower."""

from dataclasses import replace

from quantforge.architectures import llama, qwen3, qwen3_next
from quantforge.architectures.declare import QWEN_TOWER, beside_towers, layer
from quantforge.architectures.delta_net import APART, DEFAULTS, SIZES, gated_delta_net

TOKENS = gated_delta_net(APART, qwen3_next.BEFORE_TOKENS)
TEXT = replace(
    qwen3_next.ARCHITECTURE,
    kinds=(
        layer(llama.NORMS, TOKENS, qwen3_next.MLP, name=qwen3_next.LINEAR),
        layer(qwen3.NORMS, qwen3_next.ATTENTION, qwen3_next.MLP, name=qwen3_next.FULL),
    ),
    kind_of=qwen3_next.mixers,
    sizes=SIZES,
    gguf=None,
    defaults={
        **DEFAULTS,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 12288,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    },
)
ARCHITECTURE = beside_towers(TEXT, "qwen3_5", (QWEN_TOWER,))
