"""Mamba-2 mixers: state spaces with one decay per head, and a short convolution before them.

With the block's normalized input ``h``, and a depthwise convolution over a few tokens:

    [z, x, B, C, dt] = W_in h;   [x, B, C] = silu(conv([x, B, C]));   S = exp(-exp(A) dt) S + dt x B^T
    y = W_out (norm((S C + D x) * silu(z)))

The inner norm has a weight for every channel, into which a scale of the input of ``W_out`` folds. In a family without
this norm no scale can be folded, because ``silu`` follows every row of ``W_in``. The convolution, the decays ``A``,
their offsets and ``D`` are not quantized.
"""

from __future__ import annotations

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput
from quantforge.architectures.declare import Mixer, linear_parameters, norm_parameters
from quantforge.architectures.layer_kind import convolution_state, recurrent_state

CONV_CHANNELS = "ssm+2*ssm_groups*ssm_state"


def mamba2(
    module: str,
    norm: ScaleFold | None,
    *,
    bias: str,
    conv_bias: str,
    output_bias: str,
    inner_norm: bool = True,
) -> Mixer:
    """Declare a Mamba-2 mixer; its sizes are ``ssm``, ``ssm_heads``, ``ssm_groups``, ``ssm_state`` and ``kernel``.

    Args:
        module: name of the mixer.
        norm: the scale fold of the norm before it.
        bias: bias of ``W_in``, see `linear_parameters`.
        conv_bias: bias of the convolution, see `linear_parameters`.
        output_bias: bias of ``W_out``, see `linear_parameters`.
        inner_norm: whether there is a norm before ``W_out``.
    """
    in_proj, out_proj = f"{module}.in_proj", f"{module}.out_proj"
    norm_module = f"{module}.norm"
    return Mixer(
        (
            *(Parameter(f"{module}.{name}", ("ssm_heads",)) for name in ("dt_bias", "A_log", "D")),
            Parameter(f"{module}.conv1d.weight", (CONV_CHANNELS, "1", "kernel")),
            Parameter(f"{module}.conv1d.bias", (CONV_CHANNELS,), conv_bias),
            *linear_parameters(in_proj, f"ssm+{CONV_CHANNELS}+ssm_heads", "hidden", bias),
            *(norm_parameters(norm_module, dimension="ssm") if inner_norm else ()),
            *linear_parameters(out_proj, "hidden", "ssm", output_bias),
        ),
        (
            SharedInput((in_proj,), module, norm),
            SharedInput(
                (out_proj,), module, ScaleFold(FoldKind.NORM, norm_module) if inner_norm else None
            ),
        ),
        states=(*convolution_state(CONV_CHANNELS), *recurrent_state("ssm", "ssm_state")),
    )
