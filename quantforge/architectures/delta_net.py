"""Gated delta nets as parts of layers: a state per head that forgets, and is corrected toward what it should have said.

With the block's input ``h`` behind its norm, and a depthwise convolution over a few tokens:

    [q, k, v] = silu(conv(W_qkv h));   z = W_z h;   b = sigmoid(W_b h);   g = -exp(A) softplus(W_a h + dt)
    S = exp(g) S (1 - b k k^T) + b v k^T;   y = W_out (norm(S q) * silu(z))

All projections read the same activation, whose norm absorbs. The norm over each head of what is said has one weight
for all heads, and ``silu`` follows every projection, so that nothing absorbs a scale of what ``W_out`` reads. The
convolution, the decays ``A`` and their offsets stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantforge.architectures import Absorber, Parameter, SharedInput
from quantforge.architectures.declare import Mixer, linear, norms
from quantforge.architectures.layer_kind import convolution, recurrent

HERE = "linear_attn"
KEYS, VALUES = "k_heads*k_head", "v_heads*v_head"
SIZES: Mapping[str, tuple[str, ...]] = {
    "k_heads": ("linear_num_key_heads",),
    "k_head": ("linear_key_head_dim",),
    "v_heads": ("linear_num_value_heads",),
    "v_head": ("linear_value_head_dim",),
    "kernel": ("linear_conv_kernel_dim",),
}
DEFAULTS: Mapping[str, object] = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Projections of the block's input, each with its rows: all apart, or joined head by head.
APART: Mapping[str, str] = {
    "in_proj_qkv": f"2*{KEYS}+{VALUES}",
    "in_proj_z": VALUES,
    "in_proj_b": "v_heads",
    "in_proj_a": "v_heads",
}
JOINED: Mapping[str, str] = {
    "in_proj_qkvz": f"2*{KEYS}+2*{VALUES}",
    "in_proj_ba": "2*v_heads",
}


def gated_delta_net(projections: Mapping[str, str], norm: Absorber | None) -> Mixer:
    """Declare a gated delta net.

    Args:
        projections: of the block's input, with their rows: `APART` or `JOINED`.
        norm: makes what they read.
    """
    out = f"{HERE}.out_proj"
    return Mixer(
        (
            Parameter(f"{HERE}.dt_bias", ("v_heads",)),
            Parameter(f"{HERE}.A_log", ("v_heads",)),
            Parameter(f"{HERE}.conv1d.weight", (f"2*{KEYS}+{VALUES}", "1", "kernel")),
            *(
                item
                for name, rows in projections.items()
                for item in linear(f"{HERE}.{name}", rows, "hidden")
            ),
            *norms(f"{HERE}.norm", dimension="v_head"),
            *linear(out, "hidden", VALUES),
        ),
        (
            SharedInput(tuple(f"{HERE}.{name}" for name in projections), HERE, norm),
            SharedInput((out,), out),
        ),
        states=(*convolution(f"2*{KEYS}+{VALUES}"), *recurrent("v_heads", "k_head*v_head")),
    )
