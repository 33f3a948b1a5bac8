"""Shorthand for the declarations: a linear with its bias, and the shared inputs of a gated decoder block."""

from __future__ import annotations

from quantforge.architectures import Absorber, Absorbs, Parameter, SharedInput

ALWAYS = "always"  # a bias that every checkpoint of the family has

# Layers that predict further tokens; the model works without them, and they are kept as they are.
EXTRA_HEADS = r"(model\.)?(mtp|mtp_layers|medusa_heads?)\..*"


def linear(name: str, out_features: str, in_features: str, bias: str = "") -> tuple[Parameter, ...]:
    """Declare a linear; ``bias`` is "" (none), `ALWAYS`, or the configuration key that adds one."""
    weight = Parameter(f"{name}.weight", (out_features, in_features))
    if not bias:
        return (weight,)
    return weight, Parameter(f"{name}.bias", (out_features,), "" if bias == ALWAYS else bias)


def norms(*names: str, dimension: str = "hidden", bias: bool = False) -> tuple[Parameter, ...]:
    """Declare normalisations over ``dimension``; LayerNorms have a bias."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(Parameter(f"{name}.{kind}", (dimension,)) for name in names for kind in kinds)


def attention(bias: str = "", output_bias: str | None = None) -> tuple[Parameter, ...]:
    """Declare separate q, k, v and o projections; ``output_bias`` differs from ``bias`` in some families."""
    return (
        *linear("self_attn.q_proj", "q", "hidden", bias),
        *linear("self_attn.k_proj", "kv", "hidden", bias),
        *linear("self_attn.v_proj", "kv", "hidden", bias),
        *linear("self_attn.o_proj", "hidden", "q", bias if output_bias is None else output_bias),
    )


def gated_mlp(bias: str = "") -> tuple[Parameter, ...]:
    """Declare gate, up and down projections."""
    return (
        *linear("mlp.gate_proj", "ffn", "hidden", bias),
        *linear("mlp.up_proj", "ffn", "hidden", bias),
        *linear("mlp.down_proj", "hidden", "ffn", bias),
    )


def gated_inputs(norm: Absorbs, before_mlp: str) -> tuple[SharedInput, ...]:
    """Return the shared inputs of a gated block; ``before_mlp`` names the norm that the MLP reads.

    The values pass attention unchanged except for a weighted mean over positions, and ``down`` reads
    ``act(gate) * up``: both are linear in their absorber, channel by channel.
    """
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        SharedInput(qkv, "self_attn", Absorber(norm, "input_layernorm")),
        SharedInput(
            ("self_attn.o_proj",),
            "self_attn.o_proj",
            Absorber(Absorbs.ROWS, "self_attn.v_proj"),
            True,
        ),
        SharedInput(("mlp.gate_proj", "mlp.up_proj"), "mlp", Absorber(norm, before_mlp)),
        SharedInput(("mlp.down_proj",), "mlp.down_proj", Absorber(Absorbs.ROWS, "mlp.up_proj")),
    )
