"""Phi 3, 3.5 and 4 (mini): a llama with q, k, v in one matrix and gate, up in another."""

from dataclasses import replace

from quantforge.architectures import Absorber, Absorbs, LayerKind, SharedInput, llama
from quantforge.architectures.declare import linear

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="phi3",
    kinds=(
        LayerKind(
            parameters=(
                *llama.NORMS,
                *linear(QKV, "qkv", "hidden"),
                *linear("self_attn.o_proj", "hidden", "q"),
                *linear(GATE_UP, "gate_up", "hidden"),
                *linear("mlp.down_proj", "hidden", "ffn"),
            ),
            inputs=(
                SharedInput((QKV,), "self_attn", Absorber(Absorbs.NORM, "input_layernorm")),
                SharedInput(
                    ("self_attn.o_proj",),
                    "self_attn.o_proj",
                    Absorber(Absorbs.ROWS, QKV, "v"),
                    heads=True,
                ),
                SharedInput((GATE_UP,), "mlp", Absorber(Absorbs.NORM, "post_attention_layernorm")),
                SharedInput(
                    ("mlp.down_proj",), "mlp.down_proj", Absorber(Absorbs.ROWS, GATE_UP, "up")
                ),
            ),
            inner_copies=4,
        ),
    ),
    unclipped=(f"{QKV}:q", f"{QKV}:k"),
    slices={QKV: ("q", "kv", "kv"), GATE_UP: ("ffn", "ffn")},
    slice_labels={QKV: ("q", "k", "v"), GATE_UP: ("gate", "up")},
    defaults={**llama.ARCHITECTURE.defaults, "rms_norm_eps": 1e-5},
)
