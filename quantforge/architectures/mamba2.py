"""Mamba-2 mixers as parts of layers: state spaces with one decay per head, read through a convolution.

With the block's input ``h`` after its norm, and a depthwise convolution over a few tokens:

    [z, x, B, C, dt] = W_in h;   [x, B, C] = silu(conv([x, B, C]));   S = exp(-exp(A) dt) S + dt x B^T
    y = W_out (norm((S C + D x) * silu(z)))

The inner norm has a weight for every channel and absorbs for ``W_out``. Where a family has none, nothing does: ``silu``
follows every row of ``W_in``. The convolution, the decays ``A``, their offsets and ``D`` stay as they are.
"""

from __future__ import annotations

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput
from quantforge.architectures.declare import Mixer, linear, norms
from quantforge.architectures.layer_kind import convolution, recurrent

CONV = "ssm+2*ssm_groups*ssm_state"


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
        module: its name.
        norm: makes what it reads.
        bias: of ``W_in``, see `linear`.
        conv_bias: of the convolution, likewise.
        output_bias: of ``W_out``, likewise.
        inner_norm: whether there is a norm before ``W_out``.
    """
    first, last = f"{module}.in_proj", f"{module}.out_proj"
    inner = f"{module}.norm"
    return Mixer(
        (
            *(Parameter(f"{module}.{name}", ("ssm_heads",)) for name in ("dt_bias", "A_log", "D")),
            Parameter(f"{module}.conv1d.weight", (CONV, "1", "kernel")),
            Parameter(f"{module}.conv1d.bias", (CONV,), conv_bias),
            *linear(first, f"ssm+{CONV}+ssm_heads", "hidden", bias),
            *(norms(inner, dimension="ssm") if inner_norm else ()),
            *linear(last, "hidden", "ssm", output_bias),
        ),
        (
            SharedInput((first,), module, norm),
            SharedInput((last,), module, ScaleFold(FoldKind.NORM, inner) if inner_norm else None),
        ),
        states=(*convolution(CONV), *recurrent("ssm", "ssm_state")),
    )
