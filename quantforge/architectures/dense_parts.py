"""Parts of dense families: MLPs without gate, gate and up in one matrix, attention and MLP side by side.

Side by side, both halves of a layer read the same norm and are added: ``x + attention(norm(x)) + mlp(norm(x))``. A
factor that the norm takes has to be taken out of every reader at once, so that q, k, v and what the MLP begins with
are one shared input.
"""

from __future__ import annotations

from quantforge.architectures import Absorber, Absorbs, Parameter, SharedInput
from quantforge.architectures.declare import BEFORE_MLP, Mixer, linear, norms

GATE_UP = "mlp.gate_up_proj"
WHOLE_LAYER = ""  # as `SharedInput.within`
# Norms over all heads of q, and of k, at once.
NORMS_OF_ALL = (
    *norms("self_attn.q_norm", dimension="q"),
    *norms("self_attn.k_norm", dimension="kv"),
)
# Of a llama with LayerNorms: what lies outside of its blocks, and the norms before the halves of a block.
LAYER_NORM_OUTER = (
    Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
    *norms("model.norm", bias=True),
    Parameter("lm_head.weight", ("vocab", "hidden")),
)
LAYER_NORMS = norms("input_layernorm", "post_attention_layernorm", bias=True)


def plain_mlp(
    bias: str = "",
    *,
    norm: Absorber | None = BEFORE_MLP,
    names: tuple[str, str] = ("up_proj", "down_proj"),
) -> Mixer:
    """Declare up and down projections with an activation function between them that is not linear: nothing absorbs.

    Args:
        bias: of both, see `linear`.
        norm: makes what ``up`` reads.
        names: of the two.
    """
    up, down = (f"mlp.{name}" for name in names)
    return Mixer(
        (*linear(up, "ffn", "hidden", bias), *linear(down, "hidden", "ffn", bias)),
        (SharedInput((up,), "mlp", norm), SharedInput((down,), down)),
        inner_copies=2,
    )


def fused_mlp(*, norm: Absorber | None = BEFORE_MLP) -> Mixer:
    """Declare gate and up as rows of one matrix; the family says where in ``slices``: `FUSED_SLICES`."""
    down = "mlp.down_proj"
    return Mixer(
        (*linear(GATE_UP, "gate_up", "hidden"), *linear(down, "hidden", "ffn")),
        (
            SharedInput((GATE_UP,), "mlp", norm),
            SharedInput((down,), down, Absorber(Absorbs.ROWS, GATE_UP, "up")),
        ),
        inner_copies=4,
    )


FUSED_SLICES = {GATE_UP: ("ffn", "ffn")}
FUSED_LABELS = {GATE_UP: ("gate", "up")}


def side_by_side(attention: Mixer, mlp: Mixer) -> Mixer:
    """Join attention and an MLP that read the same norm, that of ``attention``."""
    first, *rest = attention.inputs
    other, *more = mlp.inputs
    both = SharedInput((*first.linears, *other.linears), WHOLE_LAYER, first.absorber)
    return Mixer(
        (*attention.parameters, *mlp.parameters),
        (both, *rest, *more),
        inner_copies=mlp.inner_copies,
        states=(*attention.states, *mlp.states),
    )
