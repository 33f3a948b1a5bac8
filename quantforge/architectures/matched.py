"""A checkpoint, understood: every stored tensor with its place in the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from quantforge.architectures import Architecture, LayerKind, Place
from quantforge.architectures.dimensions import Dimensions
from quantforge.plans import StoredTensor

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_INTEGERS = frozenset({"U8", "I8", "U16", "I16", "U32", "I32"})  # into which tools pack codes
_TABLES = frozenset(
    {"bias", "masked_bias", "position_ids", "token_type_ids", "tid2eid"}
)  # of integers


def holds_codes(tensor: StoredTensor) -> bool:
    """Return whether a stored tensor is packed: a float of fewer than 16 bits, or a matrix of integers but a table."""
    if tensor.dtype in _INTEGERS:
        return len(tensor.shape) > 1 and tensor.name.rpartition(".")[2] not in _TABLES
    return tensor.dtype.startswith("F") and tensor.dtype not in FLOATS


class Role(StrEnum):
    """Roles of stored tensors."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"
    FOREIGN = "foreign"  # of another tower, or of a head that predicts further tokens


class Declared(NamedTuple):
    """Declarations of one model.

    Attributes:
        architecture: as derived.
        names: the canonical name of each stored tensor that has a place in it.
        turned: stored stacks of experts whose matrices are the transposed ones of the running model.
    """

    architecture: Architecture
    names: Mapping[str, str]
    turned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MatchedTensor:
    """One stored tensor with its place in the model.

    Attributes:
        name: canonical name (that of the transformers model); of foreign tensors the stored one.
        stored: name, type and shape in the checkpoint.
        block: index of the decoder block, -1 outside.
        shared: for linear weights the stored module name of the first linear that reads the same activation.
        transposed: a linear weight stored ``[in_features, out_features]``.
        expert: the number of the expert whose matrix it is, -1 for all others.
        further: it is of a head that predicts further tokens; ``shared`` is stated of the linears among them.
    """

    name: str
    stored: StoredTensor
    role: Role
    block: int = -1
    shared: str = ""
    transposed: bool = False
    expert: int = -1
    further: bool = False


@dataclass(frozen=True, slots=True)
class Matched:
    """A checkpoint, understood.

    Attributes:
        architecture: the declarations, or None after the generic rule (then ``dimensions`` is None as well).
        config: the configuration of the text tower.
        layers: the kind of every decoder block, empty after the generic rule.
        tensors: all that are kept, in the order of the checkpoint.
        dropped: tensors left out, each with the pattern that says so.
        tied: the output projection is the embedding.
        tied_twice: it is, and the checkpoint stores it twice: see `quantforge.architectures.match.resolve_tied`.
        rule: how linears were found, as a sentence for `plan`.
        draft: the kind of draft heads that it is, "" for a model.
        by_name: the tensors by canonical name.
    """

    architecture: Architecture | None
    model_type: str
    config: Mapping[str, Any]
    dimensions: Dimensions | None
    tensors: tuple[MatchedTensor, ...]
    layers: tuple[LayerKind, ...] = ()
    dropped: tuple[tuple[StoredTensor, str], ...] = ()
    tied: bool = False
    tied_twice: bool = False
    rule: str = ""
    draft: str = ""
    by_name: Mapping[str, MatchedTensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {tensor.name: tensor for tensor in self.tensors})

    @property
    def blocks(self) -> int:
        """Return the number of decoder blocks."""
        return 1 + max((tensor.block for tensor in self.tensors), default=-1)

    def block_name(self, index: int) -> str:
        """Return the canonical name of a block, e.g. ``model.layers.3``."""
        return f"{self.architecture.blocks if self.architecture else 'block'}.{index}"

    def place(self, tensor: MatchedTensor) -> Place:
        """Return where in the running model the matrix of an expert lies."""
        block = self.block_name(tensor.block)
        linear = tensor.name.removeprefix(f"{block}.").removesuffix(".weight")
        return self.layers[tensor.block].place(linear, tensor.expert)

    @property
    def heads(self) -> tuple[MatchedTensor, ...]:
        """Return the tensors of heads that predict further tokens, see `quantforge.architectures.draft_heads`."""
        return tuple(tensor for tensor in self.tensors if tensor.further)

    @property
    def foreign(self) -> tuple[MatchedTensor, ...]:
        """Return the tensors of other towers and of heads that predict further tokens.

        Their modules belong into the ignore list of a format.
        """
        return tuple(tensor for tensor in self.tensors if tensor.role is Role.FOREIGN)
