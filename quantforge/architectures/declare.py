"""Parts of which families compose their layers, linears, norms, mixers of tokens and of channels, and further towers.

Some families compute attention and MLP side by side: both read the same norm and are added,
``x + attention(norm(x)) + mlp(norm(x))``. A factor that the norm takes has to be taken out of every reader at once, so
that q, k, v and what the MLP begins with are one shared input.

Further towers are told by the beginnings of their names; they are kept as they are. Where transformers has a class for
the decoder alone, that one runs, and names are those of its own (`beside_towers`); where it has none, the whole model
is built, and the decoder's names have their place in them (`within_whole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from quantforge.architectures import (
    Architecture,
    FoldKind,
    LayerKind,
    Parameter,
    ScaleFold,
    SharedInput,
    Stack,
)
from quantforge.architectures.layer_kind import LayerState, keys_and_values

ALWAYS = "always"  # a bias that every checkpoint of the family has
BEFORE_ATTENTION = ScaleFold(FoldKind.NORM, "input_layernorm")
BEFORE_MLP = ScaleFold(FoldKind.NORM, "post_attention_layernorm")
GATE_UP = "mlp.gate_up_proj"
FUSED_SLICES = {GATE_UP: ("ffn", "ffn")}
FUSED_LABELS = {GATE_UP: ("gate", "up")}
WHOLE_LAYER = ""  # as `SharedInput.within`
QWEN_TOWER = r"(model\.)?visual\..*"
WITHIN = "model.language_model"
ALONE = r"model\.(embed_tokens|layers|norm)\."  # names of a decoder alone, as `Architecture.unmapped` states them
WITHIN_TOWERS = r"(model\.)?language_model\."  # names of one within a model that has towers


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


def outer(
    norm: str = "model.norm", *, bias: bool = False, head_bias: str = ""
) -> tuple[Parameter, ...]:
    """Declare what lies outside of the blocks of a llama: the embedding, the last norm and the head.

    ``bias`` is that of the norm, see `norms`; ``head_bias`` that of the head, see `linear`.
    """
    return (
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        *norms(norm, bias=bias),
        *linear("lm_head", "vocab", "hidden", head_bias),
    )


HEAD_NORMS = norms("self_attn.q_norm", "self_attn.k_norm", dimension="head")
# Norms over all heads of q, and of k, at once.
NORMS_OF_ALL = (
    *norms("self_attn.q_norm", dimension="q"),
    *norms("self_attn.k_norm", dimension="kv"),
)
# Before the halves of a block of a llama with LayerNorms.
LAYER_NORMS = norms("input_layernorm", "post_attention_layernorm", bias=True)


@dataclass(frozen=True, slots=True)
class Mixer:
    """One half of a layer, attention or MLP: its tensors, and which of its linears read the same activation.

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
    """Make the tensors of a part conditional on configuration keys, see ``when`` of `Parameter`; "" means always."""
    if isinstance(part, Mixer):
        return replace(part, parameters=only(when, part.parameters))
    return tuple(replace(item, when=f"{item.when} {when}".strip()) for item in part)


def layer(*parts: Mixer | tuple[Parameter, ...], name: str = "") -> LayerKind:
    """Compose a layer kind from mixers, in the order of computation, and further tensors."""
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
    norm: ScaleFold | None = BEFORE_ATTENTION,
    module: str = "self_attn",
    output: str = "o_proj",
    q_rows: str = "q",
) -> Mixer:
    """Declare separate q, k, v and output projections.

    The values pass attention unchanged except for a weighted mean over positions, so that what reads the heads is
    linear in ``v``, channel by channel.

    Args:
        bias: of q, k and v, see `linear`.
        output_bias: of the output projection, where it differs.
        norm: makes what q, k and v read; None where nothing absorbs a scale of it.
        module: its name.
        output: name of the output projection.
        q_rows: rows of the query projection, where more than queries come of it.
    """
    q, k, v, out = (f"{module}.{name}" for name in ("q_proj", "k_proj", "v_proj", output))
    return Mixer(
        (
            *linear(q, q_rows, "hidden", bias),
            *linear(k, "kv", "hidden", bias),
            *linear(v, "kv", "hidden", bias),
            *linear(out, "hidden", "q", bias if output_bias is None else output_bias),
        ),
        (
            SharedInput((q, k, v), module, norm),
            SharedInput((out,), out, ScaleFold(FoldKind.ROWS, v), heads=True),
        ),
        states=keys_and_values(),
    )


def fused_attention(module: str, names: tuple[str, str], bias: str = "") -> Mixer:
    """Declare q, k and v as rows of one matrix, whose ``slices`` the family states, and an output projection.

    Args:
        module: its name.
        names: of the two.
        bias: of both, see `linear`.
    """
    qkv, out = (f"{module}.{name}" for name in names)
    return Mixer(
        (*linear(qkv, "qkv", "hidden", bias), *linear(out, "hidden", "q", bias)),
        (
            SharedInput((qkv,), module, BEFORE_ATTENTION),
            SharedInput((out,), out, ScaleFold(FoldKind.ROWS, qkv, "v"), heads=True),
        ),
        states=keys_and_values(),
    )


def gated_mlp(
    bias: str = "",
    *,
    norm: ScaleFold | None = BEFORE_MLP,
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
            SharedInput((down,), down, ScaleFold(FoldKind.ROWS, up)),
        ),
        inner_copies=3,
    )


def plain_mlp(
    bias: str = "",
    *,
    norm: ScaleFold | None = BEFORE_MLP,
    module: str = "mlp",
    names: tuple[str, str] = ("up_proj", "down_proj"),
    width: str = "ffn",
) -> Mixer:
    """Declare up and down projections with an activation function between them that is not linear: nothing absorbs.

    Args:
        bias: of both, see `linear`.
        norm: makes what ``up`` reads.
        module: its name.
        names: of the two.
        width: the dimension of what ``down`` reads.
    """
    up, down = (f"{module}.{name}" for name in names)
    return Mixer(
        (*linear(up, width, "hidden", bias), *linear(down, "hidden", width, bias)),
        (SharedInput((up,), module if norm else up, norm), SharedInput((down,), down)),
        inner_copies=2,
    )


def fused_mlp(*, norm: ScaleFold | None = BEFORE_MLP) -> Mixer:
    """Declare gate and up as rows of one matrix; the family says where in ``slices``: `FUSED_SLICES`."""
    down = "mlp.down_proj"
    return Mixer(
        (*linear(GATE_UP, "gate_up", "hidden"), *linear(down, "hidden", "ffn")),
        (
            SharedInput((GATE_UP,), "mlp", norm),
            SharedInput((down,), down, ScaleFold(FoldKind.ROWS, GATE_UP, "up")),
        ),
        inner_copies=4,
    )


def side_by_side(attention: Mixer, mlp: Mixer) -> Mixer:
    """Join attention and an MLP that read the same norm, that of ``attention``."""
    first, *rest = attention.inputs
    other, *more = mlp.inputs
    both = SharedInput((*first.linears, *other.linears), WHOLE_LAYER, first.scale_fold)
    return Mixer(
        (*attention.parameters, *mlp.parameters),
        (both, *rest, *more),
        inner_copies=mlp.inner_copies,
        states=(*attention.states, *mlp.states),
    )


def beside_towers(
    text: Architecture,
    model_type: str,
    towers: Sequence[str],
    prefixes: Sequence[tuple[str, str]] = (("model.language_model.", "model."),),
) -> Architecture:
    """Declare a multimodal family whose decoder transformers can run without the other towers.

    Args:
        text: the family of the decoder.
        model_type: of the whole.
        towers: regular expressions of the names of their tensors in files.
        prefixes: of the decoder's tensors, each (in files, canonical), beside the decoder's own.
    """
    return replace(
        text,
        model_type=model_type,
        prefixes=(*text.prefixes, *prefixes),
        unmapped={**text.unmapped, model_type: ALONE},
        foreign=(*text.foreign, *towers),
        text_config="text_config",
    )


def within_whole(text: Architecture, model_type: str, towers: Sequence[str]) -> Architecture:
    """Declare a multimodal family that transformers runs only as a whole, with its towers."""
    return replace(
        text,
        model_type=model_type,
        blocks=_moved(text.blocks),
        outer=tuple(replace(item, name=_moved(item.name)) for item in text.outer),
        embedding=_moved(text.embedding),
        final_norm=_moved(text.final_norm),
        prefixes=(("", ""), ("model.", f"{WITHIN}.")),
        foreign=(*text.foreign, *towers),
        text_config="text_config",
        graph=None,
        gguf=None,
    )


def _moved(name: str) -> str:
    own = name.startswith("model.")
    return f"{WITHIN}.{name.removeprefix('model.')}" if own else name
