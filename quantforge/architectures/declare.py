"""Parts of which families compose their layers: linears, norms, and mixers of tokens and of channels."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.architectures import Absorber, Absorbs, LayerKind, Parameter, SharedInput, Stack

ALWAYS = "always"  # a bias that every checkpoint of the family has
BEFORE_ATTENTION = Absorber(Absorbs.NORM, "input_layernorm")
BEFORE_MLP = Absorber(Absorbs.NORM, "post_attention_layernorm")

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


@dataclass(frozen=True, slots=True)
class Mixer:
    """Half of a layer, of tokens or of channels: its tensors, and which of its linears read the same activation.

    Attributes:
        parameters, inputs, stacks, inner_copies: as those of `LayerKind`, which are joined of these.
    """

    parameters: tuple[Parameter, ...]
    inputs: tuple[SharedInput, ...]
    stacks: tuple[Stack, ...] = ()
    inner_copies: int = 0


def layer(*parts: Mixer | tuple[Parameter, ...], name: str = "") -> LayerKind:
    """Compose a kind of layers of mixers, in computing order, and of other tensors."""
    mixers = [part for part in parts if isinstance(part, Mixer)]
    return LayerKind(
        parameters=tuple(
            item
            for part in parts
            for item in (part.parameters if isinstance(part, Mixer) else part)
        ),
        inputs=tuple(shared for mixer in mixers for shared in mixer.inputs),
        stacks=tuple(stack for mixer in mixers for stack in mixer.stacks),
        name=name,
        inner_copies=max(mixer.inner_copies for mixer in mixers),
    )


def attention(
    bias: str = "",
    output_bias: str | None = None,
    *,
    norm: Absorber = BEFORE_ATTENTION,
    output: str = "o_proj",
) -> Mixer:
    """Declare separate q, k, v and output projections.

    The values pass attention unchanged except for a weighted mean over positions, so that what reads the heads is
    linear in ``v``, channel by channel.

    Args:
        bias: of q, k and v, see `linear`.
        output_bias: of the output projection, where it differs.
        norm: makes what q, k and v read.
        output: name of the output projection.
    """
    q, k, v, out = (f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", output))
    return Mixer(
        (
            *linear(q, "q", "hidden", bias),
            *linear(k, "kv", "hidden", bias),
            *linear(v, "kv", "hidden", bias),
            *linear(out, "hidden", "q", bias if output_bias is None else output_bias),
        ),
        (
            SharedInput((q, k, v), "self_attn", norm),
            SharedInput((out,), out, Absorber(Absorbs.ROWS, v), heads=True),
        ),
    )


def gated_mlp(
    bias: str = "",
    *,
    norm: Absorber = BEFORE_MLP,
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Mixer:
    """Declare gate, up and down projections; ``down`` reads ``act(gate) * up``, which is linear in ``up``."""
    gate, up, down = (f"{module}.{name}" for name in names)
    return Mixer(
        (
            *linear(gate, "ffn", "hidden", bias),
            *linear(up, "ffn", "hidden", bias),
            *linear(down, "hidden", "ffn", bias),
        ),
        (
            SharedInput((gate, up), module, norm),
            SharedInput((down,), down, Absorber(Absorbs.ROWS, up)),
        ),
        inner_copies=3,
    )


def router(name: str, *, bias: bool = False, stored: str = "") -> tuple[Parameter, ...]:
    """Declare what sends tokens to experts; it stays as it is, because no shared input reads it."""
    weight = Parameter(f"{name}.weight", ("experts", "hidden"), stored=stored)
    return (weight, Parameter(f"{name}.bias", ("experts",))) if bias else (weight,)


def experts_one_by_one(
    width: str,
    *,
    module: str = "mlp.experts",
    stored: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    stored_module: str = "",
) -> Mixer:
    """Declare gated experts that files hold as matrices of their own, and the running model in two stacks.

    Args:
        width: the dimension of what ``down`` reads; ``experts`` is the one that counts them.
        module: of the running model.
        stored: names of gate, up and down in files.
        stored_module: name of the module in files, where it differs.
    """
    gate, up, down = (f"{module}.{{}}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    shapes = ((width, "hidden"), (width, "hidden"), ("hidden", width))
    return Mixer(
        tuple(
            Parameter(
                f"{name}.weight",
                shape,
                each="experts",
                stored=f"{stored_module or module}.{{}}.{leaf}.weight",
            )
            for name, leaf, shape in zip((gate, up, down), stored, shapes, strict=True)
        ),
        (
            SharedInput((gate, up), module, each="experts"),
            SharedInput((down,), module, Absorber(Absorbs.ROWS, up), each="experts"),
        ),
        (Stack(f"{module}.gate_up_proj", (gate, up)), Stack(f"{module}.down_proj", (down,))),
        inner_copies=3,
    )


def experts_in_one(
    width: str, *, module: str = "mlp.experts", transposed: bool = False, interleaved: bool = False
) -> Mixer:
    """Declare gated experts with biases that files, too, hold stacked in parameters of three dimensions.

    Args:
        width: the dimension of what ``down`` reads; ``experts`` is the one that counts them.
        module: its name.
        transposed: the matrices are ``[in_features, out_features]``.
        interleaved: rows of gate and up alternate.
    """
    gate, up, down = (f"{module}.{{}}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    both, one = (f"2*{width}", "hidden"), ("hidden", width)
    gate_up, last = f"{module}.gate_up_proj", f"{module}.down_proj"
    return Mixer(
        (
            Parameter(gate_up, ("experts", *(both[::-1] if transposed else both))),
            Parameter(f"{gate_up}_bias", ("experts", both[0])),
            Parameter(last, ("experts", *(one[::-1] if transposed else one))),
            Parameter(f"{last}_bias", ("experts", "hidden")),
        ),
        (
            SharedInput((gate, up), module, each="experts"),
            SharedInput((down,), module, each="experts"),
        ),
        (
            Stack(gate_up, (gate, up), transposed=transposed, interleaved=interleaved),
            Stack(last, (down,), transposed=transposed),
        ),
        inner_copies=4,
    )
