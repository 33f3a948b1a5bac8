"""Kimi delta attention as a part of layers: a gated delta net that forgets channel by channel.

With the block's input ``h`` behind its norm, each of q, k and v behind a convolution over a few tokens of its own:

    q, k, v = silu(conv(W h));   b = sigmoid(W_b h);   g = -exp(A) softplus(W_fb W_fa h + dt)
    S = diag(exp(g)) S (1 - b k k^T) + b v k^T;   y = W_o (norm(S q) * sigmoid(W_gb W_ga h))

Gates are made through narrow matrices, whose rows absorb for the second ones. The convolutions, the decays ``A`` and
their offsets stay as they are. Files hold three convolutions, the running model one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import Absorber, Absorbs, Parameter, SharedInput
from quantforge.architectures.declare import BEFORE_ATTENTION, Mixer, linear, norms
from quantforge.architectures.sequence_state import convolution, recurrent
from quantforge.errors import InputError

HERE = "self_attn"
GATE = (
    f"{HERE}.forget_gate"  # of the running model; files name its tensors as those of the attention
)
JOINED = {f"{HERE}.conv1d.weight": tuple(f"{HERE}.{name}_conv1d.weight" for name in "qkv")}
WIDTH = "kda_heads*kda_head"
_NESTED: Mapping[str, tuple[str, int]] = {
    "linear_num_heads": ("num_heads", 32),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
SIZES: Mapping[str, tuple[str, ...]] = {
    "kda_heads": ("quantforge.architectures.delta_attention.heads",),
    "kda_head": ("quantforge.architectures.delta_attention.head",),
    "kernel": ("quantforge.architectures.delta_attention.kernel",),
}


def delta_attention() -> Mixer:
    """Declare Kimi delta attention."""
    q, k, v, out, b, g_a, g_b = (
        f"{HERE}.{name}_proj" for name in ("q", "k", "v", "o", "b", "g_a", "g_b")
    )
    f_a, f_b = f"{GATE}.f_a_proj", f"{GATE}.f_b_proj"
    narrow = {f_a: ("kda_head", "hidden"), f_b: (WIDTH, "kda_head")}
    return Mixer(
        (
            *(item for name in (q, k, v) for item in linear(name, WIDTH, "hidden")),
            *(Parameter(f"{HERE}.{name}_conv1d.weight", (WIDTH, "1", "kernel")) for name in "qkv"),
            Parameter(f"{GATE}.dt_bias", (WIDTH,), stored=f"{HERE}.dt_bias"),
            Parameter(f"{GATE}.A_log", ("1", "1", "kda_heads", "1"), stored=f"{HERE}.A_log"),
            *(
                Parameter(f"{name}.weight", shape, stored=name.replace(GATE, HERE) + ".weight")
                for name, shape in narrow.items()
            ),
            *linear(b, "kda_heads", "hidden"),
            *linear(g_a, "kda_head", "hidden"),
            *linear(g_b, WIDTH, "kda_head"),
            *norms(f"{HERE}.o_norm", dimension="kda_head"),
            *linear(out, "hidden", WIDTH),
        ),
        (
            SharedInput((q, k, v, f_a, b, g_a), HERE, BEFORE_ATTENTION),
            SharedInput((f_b,), f_b, Absorber(Absorbs.ROWS, f_a)),
            SharedInput((g_b,), g_b, Absorber(Absorbs.ROWS, g_a)),
            SharedInput((out,), out),
        ),
        states=(*convolution(f"3*{WIDTH}"), *recurrent("kda_heads", "kda_head*kda_head")),
    )


def heads(config: Mapping[str, Any]) -> int:
    """Return the number of heads; errors as `_stated`."""
    return _stated(config, "linear_num_heads")


def head(config: Mapping[str, Any]) -> int:
    """Return the width of a head; errors as `_stated`."""
    return _stated(config, "linear_head_dim")


def kernel(config: Mapping[str, Any]) -> int:
    """Return how many tokens a convolution reads; errors as `_stated`."""
    return _stated(config, "linear_conv_kernel_dim")


def _stated(config: Mapping[str, Any], key: str) -> int:
    """Return a size, which published files state in a configuration of its own.

    Raises:
        InputError: it is none.
    """
    name, otherwise = _NESTED[key]
    nested = config.get("linear_attn_config")
    own = nested.get(name) if isinstance(nested, Mapping) else None
    size = config.get(key, otherwise) if own is None else own
    if type(size) is not int or not 0 < size < 1 << 16:
        raise InputError(f"config.json: {key} = {str(size)[:40]!r}", "a size")
    return size
