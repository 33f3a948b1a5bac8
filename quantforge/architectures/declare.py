"""Building blocks from which families declare their layers: linears, norms, attention, MLPs, further towers.

Some families compute attention and MLP in parallel: both read the same norm and their outputs are added, ``x +
attention(norm(x)) + mlp(norm(x))``. A scale folded into the norm has to be undone in every reader at once, so q, k, v
and the first linears of the MLP form one shared input.

Tensors of further towers are recognized by the start of their names and kept unchanged. If transformers has a class for
the decoder alone, that class runs and its names are used (`multimodal_with_decoder_class`); otherwise the whole model
is built, in which the decoder's names have a prefix (`multimodal_as_whole`).
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

ALWAYS_BIAS = "always"  # a bias that every checkpoint of the family has
FOLD_INTO_ATTENTION_NORM = ScaleFold(FoldKind.NORM, "input_layernorm")
FOLD_INTO_MLP_NORM = ScaleFold(FoldKind.NORM, "post_attention_layernorm")
GATE_UP_PROJ = "mlp.gate_up_proj"
GATE_UP_SLICES = {GATE_UP_PROJ: ("ffn", "ffn")}
GATE_UP_LABELS = {GATE_UP_PROJ: ("gate", "up")}
WHOLE_LAYER = ""  # `SharedInput.compared_module` for a whole block
QWEN_VISION_TENSORS = r"(model\.)?visual\..*"
NESTED_DECODER_PREFIX = "model.language_model"
STANDALONE_DECODER_NAMES = r"model\.(embed_tokens|layers|norm)\."  # for `unmapped_prefixes`
NESTED_DECODER_NAMES = r"(model\.)?language_model\."  # of a decoder in a multimodal model


def linear_parameters(
    name: str, out_features: str, in_features: str, bias: str = ""
) -> tuple[Parameter, ...]:
    """Declare a linear; ``bias`` is "" (none), `ALWAYS_BIAS`, or the configuration key that adds one."""
    weight = Parameter(f"{name}.weight", (out_features, in_features))
    if not bias:
        return (weight,)
    return weight, Parameter(f"{name}.bias", (out_features,), "" if bias == ALWAYS_BIAS else bias)


def norm_parameters(
    *names: str, dimension: str = "hidden", bias: bool = False
) -> tuple[Parameter, ...]:
    """Declare norms over ``dimension``; with ``bias`` they are LayerNorms."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(Parameter(f"{name}.{kind}", (dimension,)) for name in names for kind in kinds)


def outer_parameters(
    norm: str = "model.norm", *, bias: bool = False, head_bias: str = ""
) -> tuple[Parameter, ...]:
    """Declare the tensors outside of a llama's blocks: the embedding, the last norm and the head.

    ``bias`` is that of the norm, see `norm_parameters`; ``head_bias`` that of the head, see `linear_parameters`.
    """
    return (
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        *norm_parameters(norm, bias=bias),
        *linear_parameters("lm_head", "vocab", "hidden", head_bias),
    )


HEAD_NORMS = norm_parameters("self_attn.q_norm", "self_attn.k_norm", dimension="head")
# Norms over all heads of q, and over all heads of k.
WHOLE_QK_NORMS = (
    *norm_parameters("self_attn.q_norm", dimension="q"),
    *norm_parameters("self_attn.k_norm", dimension="kv"),
)
# LayerNorms before attention and MLP.
LAYER_NORMS = norm_parameters("input_layernorm", "post_attention_layernorm", bias=True)


@dataclass(frozen=True, slots=True)
class Mixer:
    """Declaration of one half of a layer, attention or MLP: its tensors and shared inputs.

    Attributes:
        parameters, inputs, stacks, mlp_activations, states: see `LayerKind`, which joins those of all halves.
    """

    parameters: tuple[Parameter, ...]
    inputs: tuple[SharedInput, ...]
    stacks: tuple[Stack, ...] = ()
    mlp_activations: int = 0
    states: tuple[LayerState, ...] = ()


@overload
def only_when(when: str, part: Mixer) -> Mixer: ...
@overload
def only_when(when: str, part: tuple[Parameter, ...]) -> tuple[Parameter, ...]: ...
def only_when(when: str, part: Mixer | tuple[Parameter, ...]) -> Mixer | tuple[Parameter, ...]:
    """Make the tensors of a part conditional on configuration keys, see ``when`` of `Parameter`; "" means always."""
    if isinstance(part, Mixer):
        return replace(part, parameters=only_when(when, part.parameters))
    return tuple(
        replace(item, required_flags=f"{item.required_flags} {when}".strip()) for item in part
    )


def compose_layer(*components: Mixer | tuple[Parameter, ...], name: str = "") -> LayerKind:
    """Compose a layer kind from mixers, in the order of computation, and further tensors.

    Args:
        components: mixers, or declared tensors outside of them such as norms.
        name: see `LayerKind`.
    """
    mixers = [component for component in components if isinstance(component, Mixer)]
    return LayerKind(
        parameters=tuple(
            item
            for component in components
            for item in (component.parameters if isinstance(component, Mixer) else component)
        ),
        inputs=tuple(shared for mixer in mixers for shared in mixer.inputs),
        stacks=tuple(stack for mixer in mixers for stack in mixer.stacks),
        name=name,
        mlp_activations=max(mixer.mlp_activations for mixer in mixers),
        states=tuple(state for mixer in mixers for state in mixer.states),
    )


def attention(
    bias: str = "",
    output_bias: str | None = None,
    *,
    norm: ScaleFold | None = FOLD_INTO_ATTENTION_NORM,
    module: str = "self_attn",
    output: str = "o_proj",
    q_rows: str = "q",
) -> Mixer:
    """Declare separate q, k, v and output projections.

    The values pass attention unchanged except for a weighted mean over positions, so the input of the output projection
    is linear in ``v``, channel by channel.

    Args:
        bias: bias of q, k and v, see `linear_parameters`.
        output_bias: bias of the output projection, if it differs.
        norm: the scale fold of the norm before q, k and v; None if no scale can be folded there.
        module: name of the attention module.
        output: name of the output projection.
        q_rows: rows of the query projection, if it computes more than queries.
    """
    q, k, v, out = (f"{module}.{name}" for name in ("q_proj", "k_proj", "v_proj", output))
    return Mixer(
        (
            *linear_parameters(q, q_rows, "hidden", bias),
            *linear_parameters(k, "kv", "hidden", bias),
            *linear_parameters(v, "kv", "hidden", bias),
            *linear_parameters(out, "hidden", "q", bias if output_bias is None else output_bias),
        ),
        (
            SharedInput((q, k, v), module, norm),
            SharedInput((out,), out, ScaleFold(FoldKind.ROWS, v), heads=True),
        ),
        states=keys_and_values(),
    )


def fused_attention(module: str, names: tuple[str, str], bias: str = "") -> Mixer:
    """Declare q, k and v as rows of one matrix, whose ``slices`` the family declares, and an output projection.

    Args:
        module: name of the attention module.
        names: names of the fused and the output projection.
        bias: bias of both, see `linear_parameters`.
    """
    qkv, out = (f"{module}.{name}" for name in names)
    return Mixer(
        (
            *linear_parameters(qkv, "qkv", "hidden", bias),
            *linear_parameters(out, "hidden", "q", bias),
        ),
        (
            SharedInput((qkv,), module, FOLD_INTO_ATTENTION_NORM),
            SharedInput((out,), out, ScaleFold(FoldKind.ROWS, qkv, "v"), heads=True),
        ),
        states=keys_and_values(),
    )


def gated_mlp(
    bias: str = "",
    *,
    norm: ScaleFold | None = FOLD_INTO_MLP_NORM,
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    width: str = "ffn",
) -> Mixer:
    """Declare gate, up and down projections; ``down`` reads ``act(gate) * up``, which is linear in ``up``.

    Args:
        bias: see `linear_parameters`.
        norm: the scale fold of the norm before gate and up.
        module: name of the MLP.
        names: names of gate, up and down.
        width: the dimension of the input of ``down``.
    """
    gate, up, down = (f"{module}.{name}" for name in names)
    return Mixer(
        (
            *linear_parameters(gate, width, "hidden", bias),
            *linear_parameters(up, width, "hidden", bias),
            *linear_parameters(down, "hidden", width, bias),
        ),
        (
            SharedInput((gate, up), module, norm),
            SharedInput((down,), down, ScaleFold(FoldKind.ROWS, up)),
        ),
        mlp_activations=3,
    )


def plain_mlp(
    bias: str = "",
    *,
    norm: ScaleFold | None = FOLD_INTO_MLP_NORM,
    module: str = "mlp",
    names: tuple[str, str] = ("up_proj", "down_proj"),
    width: str = "ffn",
) -> Mixer:
    """Declare up and down projections with a nonlinear activation between them, where no scale can be folded.

    Args:
        bias: bias of both, see `linear_parameters`.
        norm: the scale fold of the norm before ``up``.
        module: name of the MLP.
        names: names of both projections.
        width: the dimension of the input of ``down``.
    """
    up, down = (f"{module}.{name}" for name in names)
    return Mixer(
        (
            *linear_parameters(up, width, "hidden", bias),
            *linear_parameters(down, "hidden", width, bias),
        ),
        (SharedInput((up,), module if norm else up, norm), SharedInput((down,), down)),
        mlp_activations=2,
    )


def fused_mlp(*, norm: ScaleFold | None = FOLD_INTO_MLP_NORM) -> Mixer:
    """Declare gate and up as rows of one matrix, whose family must set ``slices`` to `GATE_UP_SLICES`, and down."""
    down = "mlp.down_proj"
    return Mixer(
        (
            *linear_parameters(GATE_UP_PROJ, "gate_up", "hidden"),
            *linear_parameters(down, "hidden", "ffn"),
        ),
        (
            SharedInput((GATE_UP_PROJ,), "mlp", norm),
            SharedInput((down,), down, ScaleFold(FoldKind.ROWS, GATE_UP_PROJ, "up")),
        ),
        mlp_activations=4,
    )


def parallel_attention_mlp(attention: Mixer, mlp: Mixer) -> Mixer:
    """Join attention and an MLP that read the same norm and whose outputs are added to one mixer."""
    attention_input, *other_attention_inputs = attention.inputs
    mlp_input, *other_mlp_inputs = mlp.inputs
    joint_input = SharedInput(
        (*attention_input.linears, *mlp_input.linears), WHOLE_LAYER, attention_input.scale_fold
    )
    return Mixer(
        (*attention.parameters, *mlp.parameters),
        (joint_input, *other_attention_inputs, *other_mlp_inputs),
        mlp_activations=mlp.mlp_activations,
        states=(*attention.states, *mlp.states),
    )


def multimodal_with_decoder_class(
    text: Architecture,
    model_type: str,
    towers: Sequence[str],
    prefixes: Sequence[tuple[str, str]] = (("model.language_model.", "model."),),
) -> Architecture:
    """Declare a multimodal family whose decoder transformers can run without the other towers.

    Args:
        text: the declarations of the decoder.
        model_type: the type of the whole model.
        towers: regular expressions for the stored names of the towers' tensors.
        prefixes: further prefixes of the decoder's tensors, each (in files, canonical).
    """
    return replace(
        text,
        model_type=model_type,
        prefixes=(*text.prefixes, *prefixes),
        unmapped_prefixes={**text.unmapped_prefixes, model_type: STANDALONE_DECODER_NAMES},
        foreign_patterns=(*text.foreign_patterns, *towers),
        text_config="text_config",
    )


def multimodal_as_whole(text: Architecture, model_type: str, towers: Sequence[str]) -> Architecture:
    """Declare a multimodal family that transformers runs only as a whole, with its towers."""
    return replace(
        text,
        model_type=model_type,
        blocks=_nested_name(text.blocks),
        outer_parameters=tuple(
            replace(item, name=_nested_name(item.name)) for item in text.outer_parameters
        ),
        embedding=_nested_name(text.embedding),
        final_norm=_nested_name(text.final_norm),
        prefixes=(("", ""), ("model.", f"{NESTED_DECODER_PREFIX}.")),
        foreign_patterns=(*text.foreign_patterns, *towers),
        text_config="text_config",
        graph=None,
        gguf=None,
    )


def _nested_name(name: str) -> str:
    is_decoder_name = name.startswith("model.")
    return f"{NESTED_DECODER_PREFIX}.{name.removeprefix('model.')}" if is_decoder_name else name
