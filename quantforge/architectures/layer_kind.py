"""Kinds of layers as data: the tensors of one block, which linears read the same activation, and the experts.

A mixture has one declaration for all of its experts: names with ``{}`` for the index, and the dimension that counts
them in ``each``. `LayerKind.with_experts` expands it for a model. Files store experts one by one or stacked in one
three-dimensional parameter; the running model always stacks them. A `Stack` gives the position of each matrix, so that
an expert's matrix has its own name however it is stored.

A layer also declares its state between tokens, which a cache has to hold. Attention keeps the keys and values of all
tokens, or of those in a window. Latent attention keeps the narrow latent from which they are computed. Delta nets and
state spaces keep one matrix per head, and convolutions their last inputs, independent of the sequence length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from quantforge.architectures.dimensions import Dimensions

if TYPE_CHECKING:
    from torch import Tensor

KEYS, VALUES = "keys", "values"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One declared tensor: its name (relative to the block if inside one) and its shape in named dimensions.

    A dimension is a name of `Dimensions` (``hidden``, ``ffn``, ``q``, ``kv``, ``qkv``, ``gate_up``, ``vocab``,
    ``positions``, ``head``) or of the family's own ``sizes``, a sum such as ``positions+2``, a multiple such as
    ``3*hidden``, or a number.

    Attributes:
        required_flags: configuration keys, joined by spaces, that must be true for the tensor to exist (``!key``: must
            be false).
        repeated_over: the dimension that counts such tensors; the name has ``{}`` for the index.
        stored: the name in files, if it differs from that in the running model.
    """

    name: str
    shape: tuple[str, ...]
    required_flags: str = ""
    repeated_over: str = ""
    stored: str = ""

    def exists(self, config: Mapping[str, Any]) -> bool:
        """Return whether the tensor exists in models of a configuration (with the family's defaults)."""
        return all(
            bool(config.get(key.removeprefix("!"))) is not key.startswith("!")
            for key in self.required_flags.split()
        )


class FoldKind(StrEnum):
    """Ways to fold a per-channel scale into the module that produces an activation."""

    NORM = "norm"  # weight (and bias, if any) divided by the scale
    NORM_PLUS_ONE = "norm+1"  # gemma: y = (1 + w) x
    ROWS = "rows"  # output rows (and bias) of a linear, or of a slice of it, divided by the scale


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """The module (relative to the block) into which a scale of the activation it produces can be folded.

    ``rows`` names a slice of a fused linear; "" is the whole linear.
    """

    kind: FoldKind
    module: str
    rows: str = ""  # "v" or "up" in a fused projection; "" is the whole of it


@dataclass(frozen=True, slots=True)
class SharedInput:
    """An activation of a block, and the linears that read it.

    Attributes:
        linears: names relative to the block; they always get the same scheme, because engines load them as one matrix.
        compared_module: the submodule (relative to the block) whose output error decides whether a transform helps.
        scale_fold: where a scale can be folded; None if a nonlinear function lies between.
        heads: whether the activation is the concatenation of attention heads and the folded rows are key/value heads; a
            scale is then constant over the query heads that share a key/value head.
        repeated_over: the dimension that counts such inputs; the names of the linears have ``{}`` for the index.
        expert: index of the expert that reads it, for tokens routed there; -1 if all tokens are read.
        unquantized_readers: modules that read it too and whose weight is never quantized; scales are folded into them
            too.
    """

    linears: tuple[str, ...]
    compared_module: str
    scale_fold: ScaleFold | None = None
    heads: bool = False
    repeated_over: str = ""
    expert: int = -1
    unquantized_readers: tuple[str, ...] = ()

    @property
    def readers(self) -> tuple[str, ...]:
        """Return all modules that read the activation."""
        return (*self.linears, *self.unquantized_readers)

    @property
    def key(self) -> str:
        """Return the name of the shared input: that of its first linear."""
        return self.linears[0]

    def for_expert(self, number: int) -> SharedInput:
        """Return the shared input of one expert, from the declaration for all experts."""
        scale_fold = self.scale_fold and replace(
            self.scale_fold, module=self.scale_fold.module.format(number)
        )
        linears = tuple(name.format(number) for name in self.linears)
        return replace(
            self, linears=linears, scale_fold=scale_fold, repeated_over="", expert=number
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """A three-dimensional parameter of the running model with the rows of some linears of every expert.

    Attributes:
        parameter: its name relative to the block.
        linears: names with ``{}`` for the expert index, in the order of their rows; all have the same number of rows.
        transposed: the matrices are ``[in_features, out_features]``.
        interleaved: rows of the linears alternate instead of following one another.
        takes_weighted_tokens: its module takes every token once per expert, multiplied by its router weight.
    """

    parameter: str
    linears: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    takes_weighted_tokens: bool = False

    def matrix(self, stack_value: Tensor, linear_index: int, expert: int) -> Tensor:
        """Return the weight ``[out_features, in_features]`` of one linear of an expert, as a view of a stack."""
        return self.rows_of(
            stack_value[expert].T if self.transposed else stack_value[expert], linear_index
        )

    def rows_of(self, rows: Tensor, linear_index: int) -> Tensor:
        """Return the rows (of weights or outputs) of one expert that belong to the linear at ``linear_index``."""
        if self.interleaved:
            return rows[linear_index :: len(self.linears)]
        return rows.chunk(len(self.linears))[linear_index]


@dataclass(frozen=True, slots=True)
class StackSlice:
    """Position of one expert matrix in a stack."""

    stack: Stack
    linear_index: int
    expert: int

    def view(self, stack_value: Tensor) -> Tensor:
        """Return the matrix ``[out_features, in_features]`` as a view of the stack's ``stack_value``."""
        return self.stack.matrix(stack_value, self.linear_index, self.expert)


class StateType(StrEnum):
    """Data types in which a state is held."""

    CACHE = "cache"  # the type of the KV cache, which may be quantized
    ACTIVATIONS = "activations"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class LayerState:
    """One state that a layer keeps between tokens, its sizes in named dimensions as in a `Parameter`.

    Attributes:
        rows: number of rows; a quantized cache has one scale per row.
        width: numbers per row.
        per_token: whether there is one for every token, or one for the whole sequence.
        dtype: its data type.
        shared: the dimension along which tensor parallelism splits it; "" if every device holds all of it.
        part: `KEYS` or `VALUES`, which may be stored differently; "" for neither.
    """

    rows: str
    width: str
    per_token: bool = True
    dtype: StateType = StateType.CACHE
    shared: str = ""
    part: str = ""


def keys_and_values(heads: str = "kv_heads", head: str = "head") -> tuple[LayerState, ...]:
    """Declare the state of attention: a key and a value for every token and key/value head."""
    return tuple(LayerState(heads, head, shared=heads, part=part) for part in (KEYS, VALUES))


def latent_state(width: str) -> tuple[LayerState, ...]:
    """Declare a latent vector per token that all heads read."""
    return (LayerState("1", width),)


def convolution_state(channels: str) -> tuple[LayerState, ...]:
    """Declare the last ``kernel`` inputs of a depthwise convolution."""
    return (
        LayerState(
            channels, "kernel", per_token=False, dtype=StateType.ACTIVATIONS, shared=channels
        ),
    )


def recurrent_state(
    heads: str, matrix: str, dtype: StateType = StateType.FLOAT32
) -> tuple[LayerState, ...]:
    """Declare one matrix per head; ``matrix`` is the product of its sides."""
    return (LayerState(heads, matrix, per_token=False, dtype=dtype, shared=heads),)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Declaration of the blocks of one kind; `quantforge.architectures.declare.compose_layer` composes it from parts.

    Attributes:
        parameters: tensors, names relative to the block. Every two-dimensional ``*.weight`` of a linear in ``inputs``
            can be quantized.
        inputs: the shared inputs, in the order in which the block computes them.
        stacks: parameters of the running block that hold all experts.
        name: its name in the family's ``kind_of``, words joined by "/"; "" if all layers are of one kind.
        mlp_activations: activations inside the MLP that are in memory together: gate, up and their product in a gated
            one.
        num_outputs: length of the tuple that the running block returns, hidden states first; 0 if it returns them
            alone.
        states: what it keeps of a sequence between tokens; None if unknown (derived declarations).
    """

    parameters: tuple[Parameter, ...]
    inputs: tuple[SharedInput, ...]
    stacks: tuple[Stack, ...] = ()
    name: str = ""
    mlp_activations: int = 3
    num_outputs: int = 0
    states: tuple[LayerState, ...] | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """Return all linears of a block, in computing order."""
        return tuple(name for shared in self.inputs for name in shared.linears)

    @property
    def stored_stacks(self) -> dict[str, str]:
        """Return the stacks that files may store: names in the running model, mapped to names in files."""
        stack_names = {stack.parameter for stack in self.stacks}
        return {
            item.name: item.stored or item.name
            for item in self.parameters
            if item.name in stack_names
        }

    def for_config(self, config: Mapping[str, Any]) -> LayerKind:
        """Return the kind without the linears and stacks that do not exist in a configuration."""
        existing = tuple(item for item in self.parameters if item.exists(config))
        if len(existing) == len(self.parameters):
            return self
        weights = {item.name.removesuffix(".weight") for item in existing}
        inputs = (
            replace(shared, linears=tuple(name for name in shared.linears if name in weights))
            for shared in self.inputs
        )
        return replace(
            self,
            parameters=existing,
            inputs=tuple(shared for shared in inputs if shared.linears),
            stacks=tuple(stack for stack in self.stacks if weights.issuperset(stack.linears)),
        )

    def with_experts(self, dimensions: Dimensions) -> LayerKind:
        """Return the kind with one entry for each expert."""
        parameters = [
            replace(
                item,
                name=item.name.format(number),
                stored=item.stored.format(number),
                repeated_over="",
            )
            for item in self.parameters
            for number in range(dimensions.size(item.repeated_over) if item.repeated_over else 1)
        ]
        inputs = [
            item.for_expert(number) if item.repeated_over else item
            for item in self.inputs
            for number in range(dimensions.size(item.repeated_over) if item.repeated_over else 1)
        ]
        return replace(self, parameters=tuple(parameters), inputs=tuple(inputs))

    def expert_slices(self) -> dict[str, StackSlice]:
        """Return the position of every expert matrix in its stack, by linear; call it on `with_experts`."""
        return {
            name: self.expert_slice(name, shared.expert)
            for shared in self.inputs
            for name in shared.linears
            if shared.expert >= 0
        }

    def expert_slice(self, linear: str, expert: int) -> StackSlice:
        """Return the position of the matrix of one linear of one expert."""
        return next(
            StackSlice(stack, position, expert)
            for stack in self.stacks
            for position, name in enumerate(stack.linears)
            if name.format(expert) == linear
        )
