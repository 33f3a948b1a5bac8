"""Mixtures of experts as parts of layers: routers, experts in every way in which files hold them, shared experts.

The norm before a mixture is read by the router, by all experts and by shared experts at once. A factor for one of
these readers would have to be folded into all of them, so that the norm absorbs none here; what ``down`` of an expert
reads is linear in the rows of its own ``up``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import FoldKind, LayerKind, Parameter, ScaleFold, SharedInput, Stack
from quantforge.architectures.declare import Mixer, gated_mlp, layer
from quantforge.errors import InputError

DENSE, SPARSE = "dense", "experts"  # kinds of layers


def router(
    name: str,
    *,
    bias: bool = False,
    stored: str = "",
    correction: str = "",
    stored_correction: str = "",
) -> tuple[Parameter, ...]:
    """Declare the router; it is not quantized, because no shared input lists it.

    Args:
        name: of its module.
        bias: whether its matrix has one.
        stored: the name of its weight in files, where it differs.
        correction: the name of what is added to the scores when experts are chosen; "" where nothing is.
        stored_correction: its name in files, where it differs.
    """
    found = [Parameter(f"{name}.weight", ("experts", "hidden"), stored=stored)]
    if bias:
        found.append(Parameter(f"{name}.bias", ("experts",)))
    if correction:
        found.append(Parameter(correction, ("experts",), stored=stored_correction))
    return tuple(found)


def shared_experts(
    width: str, *, module: str = "mlp.shared_experts", bias: str = "", gate: str = ""
) -> tuple[Mixer | tuple[Parameter, ...], ...]:
    """Declare the shared experts, which process every token, as one gated MLP.

    Args:
        width: the dimension of what ``down`` reads.
        module: its name.
        bias: see `linear`.
        gate: the name of what weighs its output, a matrix of one row that stays as it is; "" where nothing does.
    """
    mlp = gated_mlp(bias, norm=None, module=module, width=width)
    weighs = (Parameter(f"{gate}.weight", ("1", "hidden")),) if gate else ()
    return mlp, weighs


def dense_or_sparse(
    *common: Mixer | tuple[Parameter, ...],
    dense: Mixer,
    sparse: tuple[Mixer | tuple[Parameter, ...], ...],
    prefix: str = "",
) -> tuple[LayerKind, ...]:
    """Return two layer kinds with ``common`` parts: one with a dense MLP, one with experts in its place."""
    return (
        layer(*common, dense, name=prefix + DENSE),
        layer(*common, *sparse, name=prefix + SPARSE),
    )


def first_dense(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the kind of every layer of a model whose first layers are dense and the others have experts.

    Args:
        config: with the defaults of the family.
        key: holds how many are dense.

    Raises:
        InputError: it is no number.
    """
    dense = config.get(key)
    if type(dense) is not int or dense < 0:
        raise InputError(f"config.json: {key} = {str(dense)[:40]!r}", "a number of layers")
    return [DENSE if index < dense else SPARSE for index in range(config["num_hidden_layers"])]


def replaced_first(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer by ``first_k_dense_replace``; errors as `first_dense`."""
    return first_dense(config, "first_k_dense_replace")


def listed(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer by ``mlp_layer_types``, or else by ``first_k_dense_replace``.

    Raises:
        InputError: it is no list, or has other words (`Architecture.layers` checks its length); or as `first_dense`.
    """
    words = config.get("mlp_layer_types")
    if words is None:
        return replaced_first(config)
    names = {"dense": DENSE, "sparse": SPARSE}
    if not isinstance(words, list) or not {*map(str, words)} <= names.keys():
        raise InputError(
            f"config.json: mlp_layer_types = {str(words)[:60]}", f"a list of {' or '.join(names)}"
        )
    return [names[word] for word in words]


def experts_one_by_one(
    width: str,
    *,
    module: str = "mlp.experts",
    stored: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    stored_module: str = "",
) -> Mixer:
    """Declare gated experts that files store one by one and the running model holds in two stacks.

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
            SharedInput((down,), module, ScaleFold(FoldKind.ROWS, up), each="experts"),
        ),
        (Stack(f"{module}.gate_up_proj", (gate, up)), Stack(f"{module}.down_proj", (down,))),
        inner_copies=3,
    )


def experts_in_one(
    width: str,
    *,
    module: str = "mlp.experts",
    transposed: bool = False,
    interleaved: bool = False,
    biases: bool = False,
    stored: tuple[str, str] = ("", ""),
    stored_one: tuple[str, str, str] | None = None,
) -> Mixer:
    """Declare gated experts that files, too, store stacked in three-dimensional tensors.

    Once they are quantized, files hold them one by one.

    Args:
        width: the dimension of what ``down`` reads; ``experts`` is the one that counts them.
        module: its name.
        transposed: the matrices are ``[in_features, out_features]``.
        interleaved: rows of gate and up alternate.
        biases: whether they have any, stacked and named as their matrices; a factor is not folded into a row of these,
            so that nothing absorbs one of what ``down`` reads.
        stored: names of the two stacks in files, where they differ.
        stored_one: names of gate, up and down of one expert in files, where they differ.
    """
    names = stored_one or ("gate_proj", "up_proj", "down_proj")
    single = experts_one_by_one(width, module=module, stored=names)
    both, one = (f"2*{width}", "hidden"), ("hidden", width)
    gate_up, down = f"{module}.gate_up_proj", f"{module}.down_proj"
    stacks = [
        Parameter(name, ("experts", *(shape[::-1] if transposed else shape)), stored=file)
        for name, shape, file in zip((gate_up, down), (both, one), stored, strict=True)
    ]
    added = (
        Parameter(f"{gate_up}_bias", ("experts", both[0])),
        Parameter(f"{down}_bias", ("experts", one[0])),
    )
    first, last = single.inputs
    return Mixer(
        (*stacks, *(added if biases else ()), *single.parameters),
        (first, replace(last, scale_fold=None) if biases else last),
        tuple(
            replace(
                stack, transposed=transposed, interleaved=interleaved and stack.parameter == gate_up
            )
            for stack in single.stacks
        ),
        inner_copies=4,
    )
