"""Parts of which families compose their layers: linears, norms, and mixers of tokens and of channels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import overload

from quantforge.architectures import Absorber, Absorbs, LayerKind, Parameter, SharedInput, Stack
from quantforge.architectures.sequence_state import LayerState, keys_and_values

ALWAYS = "always"  # a bias that every checkpoint of the family has
BEFORE_ATTENTION = Absorber(Absorbs.NORM, "input_layernorm")
BEFORE_MLP = Absorber(Absorbs.NORM, "post_attention_layernorm")


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
        parameters, inputs, stacks, inner_copies, states: as those of `LayerKind`, which are joined of these.
    """

    parameters: tuple[Parameter, ...]
    inputs: tuple[SharedInput, ...]
    stacks: tuple[Stack, ...] = ()
    inner_copies: int = 0
    states: tuple[LayerState, ...] = ()


@overload
def only(when: str, part: Mixer) -> Mixer: ...
@overload
def only(when: str, part: tuple[Parameter, ...]) -> tuple[Parameter, ...]: ...
def only(when: str, part: Mixer | tuple[Parameter, ...]) -> Mixer | tuple[Parameter, ...]:
    """Return a part of which tensors exist only ``when`` a configuration says so, see `Parameter`; "" is always."""
    if isinstance(part, Mixer):
        return replace(part, parameters=only(when, part.parameters))
    return tuple(replace(item, when=f"{item.when} {when}".strip()) for item in part)


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
        states=tuple(state for mixer in mixers for state in mixer.states),
    )


def attention(
    bias: str = "",
    output_bias: str | None = None,
    *,
    norm: Absorber | None = BEFORE_ATTENTION,
    output: str = "o_proj",
) -> Mixer:
    """Declare separate q, k, v and output projections.

    The values pass attention unchanged except for a weighted mean over positions, so that what reads the heads is
    linear in ``v``, channel by channel.

    Args:
        bias: of q, k and v, see `linear`.
        output_bias: of the output projection, where it differs.
        norm: makes what q, k and v read; None where nothing absorbs a scale of it.
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
        states=keys_and_values(),
    )


def gated_mlp(
    bias: str = "",
    *,
    norm: Absorber | None = BEFORE_MLP,
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    width: str = "ffn",
) -> Mixer:
    """Declare gate, up and down projections; ``down`` reads ``act(gate) * up``, which is linear in ``up``.

    Args:
        bias: see `linear`.
        norm: makes what gate and up read.
        module: its name.
        names: of gate, up and down.
        width: the dimension of what ``down`` reads.
    """
    gate, up, down = (f"{module}.{name}" for name in names)
    return Mixer(
        (
            *linear(gate, width, "hidden", bias),
            *linear(up, width, "hidden", bias),
            *linear(down, "hidden", width, bias),
        ),
        (
            SharedInput((gate, up), module, norm),
            SharedInput((down,), down, Absorber(Absorbs.ROWS, up)),
        ),
        inner_copies=3,
    )
