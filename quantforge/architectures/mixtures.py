"""Mixtures of experts: routers, experts in every stored layout, and shared experts.

The norm before a mixture is read by the router, all experts and the shared experts at once. A scale for one of these
readers would have to be folded into all of them, so no scale folds into the norm. The input of an expert's ``down`` is
linear in the rows of its own ``up``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, LayerKind, Parameter, ScaleFold, SharedInput, Stack
from quantforge.architectures.declare import Mixer, compose_layer, gated_mlp
from quantforge.errors import InputError

DENSE, SPARSE = "dense", "experts"  # names of layer kinds


def router_parameters(
    name: str,
    *,
    bias: bool = False,
    stored: str = "",
    correction: str = "",
    stored_correction: str = "",
) -> tuple[Parameter, ...]:
    """Declare the router; it is not quantized, because no shared input lists it.

    Args:
        name: name of its module.
        bias: whether its matrix has a bias.
        stored: name of its weight in files, if different.
        correction: name of the bias that is added to the scores when experts are selected; "" for none.
        stored_correction: name of that bias in files, if different.
    """
    parameters = [Parameter(f"{name}.weight", ("experts", "hidden"), stored=stored)]
    if bias:
        parameters.append(Parameter(f"{name}.bias", ("experts",)))
    if correction:
        parameters.append(Parameter(correction, ("experts",), stored=stored_correction))
    return tuple(parameters)


def shared_experts(
    width: str, *, module: str = "mlp.shared_experts", bias: str = "", gate: str = ""
) -> tuple[Mixer | tuple[Parameter, ...], ...]:
    """Declare the shared experts, which process every token, as one gated MLP.

    Args:
        width: the dimension of the input of ``down``.
        module: name of the MLP.
        bias: see `linear_parameters`.
        gate: name of a single-row matrix that weighs its output and is not quantized; "" for none.
    """
    mlp = gated_mlp(bias, norm=None, module=module, width=width)
    gate_parameters = (Parameter(f"{gate}.weight", ("1", "hidden")),) if gate else ()
    return mlp, gate_parameters


def dense_or_sparse(
    *shared_components: Mixer | tuple[Parameter, ...],
    dense: Mixer,
    sparse: tuple[Mixer | tuple[Parameter, ...], ...],
    prefix: str = "",
) -> tuple[LayerKind, ...]:
    """Return two layer kinds with ``shared_components``: one with a dense MLP, one with experts instead."""
    return (
        compose_layer(*shared_components, dense, name=prefix + DENSE),
        compose_layer(*shared_components, *sparse, name=prefix + SPARSE),
    )


def dense_first_kinds(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the name of every layer's kind if the first layers are dense and the others have experts.

    Args:
        config: configuration with the family's defaults.
        key: configuration key of the number of dense layers.

    Raises:
        InputError: the value is not a number of layers.
    """
    dense = config.get(key)
    if type(dense) is not int or dense < 0:
        raise InputError(
            f"{key} = {str(dense)[:40]!r}", "a number of layers", subject="config.json"
        )
    return [DENSE if index < dense else SPARSE for index in range(config["num_hidden_layers"])]


def kinds_by_first_k_dense(config: Mapping[str, Any]) -> list[str]:
    """Return the name of every layer's kind from ``first_k_dense_replace``; errors as `dense_first_kinds`."""
    return dense_first_kinds(config, "first_k_dense_replace")


def kinds_by_mlp_layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the name of every layer's kind from ``mlp_layer_types``, or else ``first_k_dense_replace``.

    Raises:
        InputError: ``mlp_layer_types`` is not a list, or has unknown values (`Architecture.layer_kinds` checks its
            length); or as `dense_first_kinds`.
    """
    types = config.get("mlp_layer_types")
    if types is None:
        return kinds_by_first_k_dense(config)
    names = {"dense": DENSE, "sparse": SPARSE}
    if not isinstance(types, list) or not {*map(str, types)} <= names.keys():
        raise InputError(
            f"mlp_layer_types = {str(types)[:60]}",
            f"a list of {' or '.join(names)}",
            subject="config.json",
        )
    return [names[layer_type] for layer_type in types]


def single_experts(
    width: str,
    *,
    module: str = "mlp.experts",
    stored: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    stored_module: str = "",
) -> Mixer:
    """Declare gated experts that files store one by one and the running model holds in two stacks.

    Args:
        width: the dimension of the input of ``down``; the dimension ``experts`` counts the experts.
        module: name of the experts module in the running model.
        stored: names of gate, up and down in files.
        stored_module: name of the module in files, if different.
    """
    gate, up, down = (f"{module}.{{}}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    shapes = ((width, "hidden"), (width, "hidden"), ("hidden", width))
    return Mixer(
        tuple(
            Parameter(
                f"{name}.weight",
                shape,
                repeated_over="experts",
                stored=f"{stored_module or module}.{{}}.{leaf}.weight",
            )
            for name, leaf, shape in zip((gate, up, down), stored, shapes, strict=True)
        ),
        (
            SharedInput((gate, up), module, repeated_over="experts"),
            SharedInput((down,), module, ScaleFold(FoldKind.ROWS, up), repeated_over="experts"),
        ),
        (Stack(f"{module}.gate_up_proj", (gate, up)), Stack(f"{module}.down_proj", (down,))),
        mlp_activations=3,
    )


def stacked_experts(
    width: str,
    *,
    module: str = "mlp.experts",
    transposed: bool = False,
    interleaved: bool = False,
    biases: bool = False,
    stored: tuple[str, str] = ("", ""),
    stored_one: tuple[str, str, str] | None = None,
) -> Mixer:
    """Declare gated experts that files also store stacked in three-dimensional tensors.

    Files of quantized models store them one by one.

    Args:
        width: the dimension of the input of ``down``; the dimension ``experts`` counts the experts.
        module: name of the experts module.
        transposed: whether the matrices are ``[in_features, out_features]``.
        interleaved: whether rows of gate and up alternate.
        biases: whether there are stacked biases, named after the matrices. No scale is folded into a row of these, so
            none of the input of ``down`` can be folded.
        stored: names of the two stacks in files, if different.
        stored_one: names of gate, up and down of a single expert in files, if different.
    """
    names = stored_one or ("gate_proj", "up_proj", "down_proj")
    expert_mixer = single_experts(width, module=module, stored=names)
    gate_up_shape, down_shape = (f"2*{width}", "hidden"), ("hidden", width)
    gate_up, down = f"{module}.gate_up_proj", f"{module}.down_proj"
    stacks = [
        Parameter(name, ("experts", *(shape[::-1] if transposed else shape)), stored=file)
        for name, shape, file in zip(
            (gate_up, down), (gate_up_shape, down_shape), stored, strict=True
        )
    ]
    bias_parameters = (
        Parameter(f"{gate_up}_bias", ("experts", gate_up_shape[0])),
        Parameter(f"{down}_bias", ("experts", down_shape[0])),
    )
    first, last = expert_mixer.inputs
    return Mixer(
        (*stacks, *(bias_parameters if biases else ()), *expert_mixer.parameters),
        (first, replace(last, scale_fold=None) if biases else last),
        tuple(
            replace(
                stack, transposed=transposed, interleaved=interleaved and stack.parameter == gate_up
            )
            for stack in expert_mixer.stacks
        ),
        mlp_activations=4,
    )
