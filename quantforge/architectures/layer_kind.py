"""Kinds of layers as data: the tensors of one block, which of its linears read the same activation, and its experts.

A mixture has one declaration for all of its experts: names with ``{}`` for the number, and the dimension that counts
them in ``each``. `LayerKind.counted` writes it out for a model. Files hold experts one by one or all of them stacked in
one parameter of three dimensions; the running model stacks them always. A `Stack` says where in it each matrix lies,
so that an expert's matrix has a name of its own however it is stored.

A layer also says what it keeps of a sequence between tokens, which a cache has to hold. Attention keeps the keys and
values of every token that it may still look at, all of them or those of a window. Latent attention keeps the narrow
latent that they are made of. Delta nets and state spaces keep one matrix per head, and convolutions their last inputs,
however long the sequence is.
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
    """One tensor: its name (inside a block: relative to it) and its shape in named dimensions.

    A dimension is a name of `Dimensions` (``hidden``, ``ffn``, ``q``, ``kv``, ``qkv``, ``gate_up``, ``vocab``,
    ``positions``, ``head``) or of the family's own ``sizes``, a sum such as ``positions+2``, a multiple such as
    ``3*hidden``, or a number.

    Attributes:
        when: configuration keys, joined by spaces, that must be true for the tensor to exist (``!key``: must be false).
        each: the dimension that counts such tensors; the name has ``{}`` for the number.
        stored: the name in files, where it differs from that in the running model.
    """

    name: str
    shape: tuple[str, ...]
    when: str = ""
    each: str = ""
    stored: str = ""

    def exists(self, config: Mapping[str, Any]) -> bool:
        """Return whether models of a configuration, with the family's defaults, have the tensor."""
        return all(
            bool(config.get(key.removeprefix("!"))) is not key.startswith("!")
            for key in self.when.split()
        )


class FoldKind(StrEnum):
    """Ways to fold a per-channel factor into the module that produces an activation."""

    NORM = "norm"  # weight (and bias, if any) divided by the factor
    NORM_PLUS_ONE = "norm+1"  # gemma: y = (1 + w) x
    ROWS = "rows"  # output rows (and their bias) of a linear, or of a slice of it, divided by the factor


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """The module that produces an activation, relative to the block; ``rows`` names a slice of a fused linear."""

    kind: FoldKind
    module: str
    rows: str = ""  # "v" or "up" in a fused projection; "" is the whole of it


@dataclass(frozen=True, slots=True)
class SharedInput:
    """The linears of a block that read the same activation.

    Attributes:
        linears: names relative to the block; they always get one scheme, because engines load them as one matrix.
        within: the sub-block whose output tells whether a transform helped (relative to the block).
        scale_fold: what can absorb a scale, or None (an activation function that is not linear lies between).
        heads: the activation is the concatenation of attention heads, and the absorber's rows are key/value heads:
            a factor is constant over the query heads that share a key/value head.
        each: the dimension that counts such inputs; the names of the linears have ``{}`` for the number.
        expert: whose input it is, of the tokens that the router sends there; -1: all tokens are read.
        also: modules that read it too, and whose weight is never quantized; a factor is folded into them as well.
    """

    linears: tuple[str, ...]
    within: str
    scale_fold: ScaleFold | None = None
    heads: bool = False
    each: str = ""
    expert: int = -1
    also: tuple[str, ...] = ()

    @property
    def readers(self) -> tuple[str, ...]:
        """Return all modules that read the activation."""
        return (*self.linears, *self.also)

    @property
    def key(self) -> str:
        """Return the name of the shared input: that of its first linear."""
        return self.linears[0]

    def of_expert(self, number: int) -> SharedInput:
        """Return the shared input of one expert, from the declaration for all experts."""
        scale_fold = self.scale_fold and replace(
            self.scale_fold, module=self.scale_fold.module.format(number)
        )
        linears = tuple(name.format(number) for name in self.linears)
        return replace(self, linears=linears, scale_fold=scale_fold, each="", expert=number)


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter of the running model, of three dimensions: of every expert the rows of some linears.

    Attributes:
        parameter: its name relative to the block.
        linears: with ``{}`` for the number, in the order of their rows, of which all have as many.
        transposed: the matrices are ``[in_features, out_features]``.
        interleaved: rows alternate between the linears, instead of following one another.
        spread: its module takes every token once for each expert, times the weight that the router gave it.
    """

    parameter: str
    linears: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    spread: bool = False

    def matrix(self, value: Tensor, position: int, expert: int) -> Tensor:
        """Return the weight ``[out_features, in_features]`` of one linear of an expert, a view of a stack."""
        return self.share(value[expert].T if self.transposed else value[expert], position)

    def share(self, rows: Tensor, position: int) -> Tensor:
        """Return the rows (of weights or outputs) of one expert that belong to the linear at ``position``."""
        if self.interleaved:
            return rows[position :: len(self.linears)]
        return rows.chunk(len(self.linears))[position]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a stack the matrix of one expert lies."""

    stack: Stack
    position: int
    expert: int

    def view(self, value: Tensor) -> Tensor:
        """Return the matrix ``[out_features, in_features]`` as a view of the stack's ``value``."""
        return self.stack.matrix(value, self.position, self.expert)


class StateType(StrEnum):
    """Types in which a state is held."""

    CACHE = "cache"  # that of the cache, which may be quantized
    ACTIVATIONS = "activations"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class LayerState:
    """One state of a layer, its sizes in named dimensions as those of a `Parameter`.

    Attributes:
        rows: rows of numbers; a quantized cache scales each by itself.
        width: numbers of a row.
        each_token: whether there is one for every token, or one for the whole sequence.
        held: its type.
        part: of keys and values, which may be stored differently; "" is neither.
        shared: the dimension by which devices share it, "" where each of them holds all of it.
    """

    rows: str
    width: str
    each_token: bool = True
    held: StateType = StateType.CACHE
    shared: str = ""
    part: str = ""


def keys_and_values(heads: str = "kv_heads", head: str = "head") -> tuple[LayerState, ...]:
    """Declare what attention keeps: a key and a value of every token and head."""
    return tuple(LayerState(heads, head, shared=heads, part=part) for part in (KEYS, VALUES))


def latent(width: str) -> tuple[LayerState, ...]:
    """Declare a vector of every token, which all heads read."""
    return (LayerState("1", width),)


def convolution(channels: str) -> tuple[LayerState, ...]:
    """Declare the last ``kernel`` inputs of a depthwise convolution."""
    return (
        LayerState(
            channels, "kernel", each_token=False, held=StateType.ACTIVATIONS, shared=channels
        ),
    )


def recurrent(
    heads: str, matrix: str, held: StateType = StateType.FLOAT32
) -> tuple[LayerState, ...]:
    """Declare a matrix of every head; ``matrix`` is the product of its sides."""
    return (LayerState(heads, matrix, each_token=False, held=held, shared=heads),)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Parts of the blocks of one kind; `quantforge.architectures.declare.layer` composes it of parts.

    Attributes:
        parameters: tensors, names relative to the block. Every ``*.weight`` of two dimensions that belongs to a
            linear of ``inputs`` can be quantized.
        inputs: the shared inputs, in the order in which the block computes them.
        stacks: parameters of the running block that hold all experts.
        name: how the family's ``kind_of`` calls it, words joined by "/"; "" where all layers are of one kind.
        inner_copies: inner activations of the MLP that are alive together: gate, up and their product, of a gated one.
        num_outputs: elements of the tuple that the running block returns, of which the hidden states are the first; 0
            where it returns them alone.
        states: what it keeps of a sequence between tokens; None: not known, as of derived declarations.
    """

    parameters: tuple[Parameter, ...]
    inputs: tuple[SharedInput, ...]
    stacks: tuple[Stack, ...] = ()
    name: str = ""
    inner_copies: int = 3
    num_outputs: int = 0
    states: tuple[LayerState, ...] | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """Return all linears of a block, in computing order."""
        return tuple(name for shared in self.inputs for name in shared.linears)

    @property
    def stored_stacks(self) -> dict[str, str]:
        """Return the stacks that files may hold: names in the running model, mapped to names in files."""
        held = {stack.parameter for stack in self.stacks}
        return {
            item.name: item.stored or item.name for item in self.parameters if item.name in held
        }

    def present(self, config: Mapping[str, Any]) -> LayerKind:
        """Return the kind without the linears and stacks that a configuration leaves out."""
        kept = tuple(item for item in self.parameters if item.exists(config))
        if len(kept) == len(self.parameters):
            return self
        weights = {item.name.removesuffix(".weight") for item in kept}
        inputs = (
            replace(shared, linears=tuple(name for name in shared.linears if name in weights))
            for shared in self.inputs
        )
        return replace(
            self,
            parameters=kept,
            inputs=tuple(shared for shared in inputs if shared.linears),
            stacks=tuple(stack for stack in self.stacks if weights.issuperset(stack.linears)),
        )

    def counted(self, dimensions: Dimensions) -> LayerKind:
        """Return the kind with one entry for each expert."""
        parameters = [
            replace(item, name=item.name.format(number), stored=item.stored.format(number), each="")
            for item in self.parameters
            for number in range(dimensions.size(item.each) if item.each else 1)
        ]
        inputs = [
            item.of_expert(number) if item.each else item
            for item in self.inputs
            for number in range(dimensions.size(item.each) if item.each else 1)
        ]
        return replace(self, parameters=tuple(parameters), inputs=tuple(inputs))

    def places(self) -> dict[str, Place]:
        """Return the place of every expert matrix in the running block, by linear; for a `counted` kind."""
        return {
            name: self.place(name, shared.expert)
            for shared in self.inputs
            for name in shared.linears
            if shared.expert >= 0
        }

    def place(self, linear: str, expert: int) -> Place:
        """Return the place of the matrix of one linear of one expert."""
        return next(
            Place(stack, position, expert)
            for stack in self.stacks
            for position, name in enumerate(stack.linears)
            if name.format(expert) == linear
        )
