"""Types of the tensors of a GGUF file: from the mixture, from ``--scheme``, or as an export finds them.

A mixture (``Q4_K_M``) gives every tensor its type; ``--scheme`` gives one grid to all linears, and Q6_K to what lies
outside of the blocks. A type whose blocks do not divide the rows of a tensor is replaced as llama.cpp replaces it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError, RefusedError, UnknownNameError, nearest
from quantforge.formats import KEEP, gguf
from quantforge.formats.format_choice import holders
from quantforge.formats.gguf import blocks_of, mixture
from quantforge.formats.gguf.container import TYPES
from quantforge.formats.gguf.families import Named
from quantforge.formats.unknown_names import TYPE_WORDS
from quantforge.grids import SUPERBLOCKS
from quantforge.notation import parse
from quantforge.packers.lattices import LATTICES
from quantforge.planning.choice import Decision, Fitted
from quantforge.planning.embedding_choice import check_not_quantized, tied_rule
from quantforge.planning.rules import Choice
from quantforge.recipe import Recipe
from quantforge.scheme import LayerScheme, Scheme


class FileTypes(ABC):
    """Types of the tensors of one file; ``label`` is the mixture, or the type that most of them have."""

    label: str

    def stated(self, tensor: MatchedTensor, choice: Choice) -> str:
        """Return the type that a scheme is; that of the source where nothing is to be rounded."""
        if choice.scheme is None:
            return tensor.stored.dtype
        return type_of(choice.scheme, choice.rule)

    @abstractmethod
    def default(self, tensor: MatchedTensor) -> Decision[str]:
        """Return the type of a tensor of which nothing is said."""

    def meant(self, tensor: MatchedTensor) -> str:
        """Return the type by which a file is of the kind that it is called after, before its blocks are fitted."""
        return self.default(tensor).form

    def fitted(self, tensor: MatchedTensor, form: str) -> Fitted[str]:
        """Return the type, or the one that llama.cpp takes where its blocks do not divide the rows."""
        shape = stored_shape(tensor)
        given = mixture.fitting(form, shape[-1])
        if given == form:
            return Fitted(form)
        nbytes = TYPES[given].row_bytes(shape[-1]) * math.prod(shape[:-1])
        reason = f"{shape[-1]} columns are no multiple of {TYPES[form].columns}"
        return Fitted(given, f"{form} -> {given}, {nbytes} bytes", reason)

    def left(self, tensor: MatchedTensor, form: str) -> Fitted[str] | None:
        """Return None: files of this kind hold every shape."""
        del tensor, form
        return None


class MixtureTypes(FileTypes):
    """Types by a mixture, or by one scheme for all linears.

    Args:
        wanted: what the recipe says.
        names: of each tensor in the file, by its canonical name.
        tensors: those that are written.
        shape: of the model.
    """

    def __init__(
        self,
        wanted: Recipe,
        names: Mapping[str, Named],
        tensors: Sequence[MatchedTensor],
        shape: mixture.Shape,
    ) -> None:
        self._names = names
        self._one_scheme = wanted.scheme is not None
        self.label = _label(wanted)
        columns = {
            named.name: stored_shape(tensor)[-1]
            for tensor in tensors
            if not mixture.always_float32(
                (named := names[tensor.name]).name, len(tensor.stored.shape)
            )
        }
        # Mixtures of the names of lattices are mostly of other types.
        pure = self.label not in mixture.MIXTURES or self.label.lower() in LATTICES
        if self._one_scheme and pure:
            self._types = dict.fromkeys(columns, self.label)
        else:
            self._types = mixture.assign(self.label, columns.items(), shape)

    def default(self, tensor: MatchedTensor) -> Decision[str]:
        """Return what the mixture says."""
        if self._one_scheme and tensor.role is not Role.LINEAR:
            return Decision("Q6_K", "outside of the blocks")
        name = self._names[tensor.name].name
        if name in mixture.UNTOUCHED and self._types[name] not in mixture.FLOATING:
            return Decision(tensor.stored.dtype, "kept in every mixture")
        return Decision(self._types[name], self.label)


class GivenTypes(FileTypes):
    """Types of a model that is quantized already, by the schemes of its modules; what else it has keeps its type.

    An embedding that is the head too (``tied``) is rounded as in the mixture that the other types are of.
    """

    def __init__(self, given: Mapping[str, Scheme], *, tied: bool) -> None:
        self._tied = tied
        self._given = {
            module: type_of(LayerScheme(scheme), module) for module, scheme in given.items()
        }
        counted = list(self._given.values())
        self.label = max(sorted(set(counted)), key=counted.count)

    def stated(self, tensor: MatchedTensor, choice: Choice) -> str:
        """Return the type that is asked for the embedding; of one that has codes, theirs."""
        given = self._given.get(tensor.stored.name.removesuffix(".weight"))
        if given is None:
            return super().stated(tensor, choice)
        check_not_quantized(tensor.stored.name, str(choice.scheme or KEEP))
        return given

    def default(self, tensor: MatchedTensor) -> Decision[str]:
        """Return the type that the tensor's codes have."""
        module = tensor.stored.name.removesuffix(".weight")
        if module in self._given:
            return Decision(self._given[module], "re-laid out")
        if self._tied and tensor.role is Role.EMBEDDING:
            columns = tensor.stored.shape[-1]
            kind = mixture.output_type(self.label, self.label, columns)
            return Decision(mixture.fitting(kind, columns), tied_rule(gguf))
        return Decision(tensor.stored.dtype, "kept")

    def meant(self, tensor: MatchedTensor) -> str:
        """Return the type of most tensors."""
        del tensor
        return self.label


def stored_shape(tensor: MatchedTensor) -> tuple[int, ...]:
    """Return the shape of a tensor as linears have it in a file, ``[out, in]``."""
    shape = tensor.stored.shape
    return shape[::-1] if tensor.transposed else shape


def type_of(layer: LayerScheme, where: str) -> str:
    """Return the type of ggml that a scheme is.

    Raises:
        RefusedError: there is none; the formats that hold it are named, or the nearest type.
    """
    scheme = blocks_of(layer.weight)
    if scheme.grid not in SUPERBLOCKS or layer.input is not None:
        others = holders(LayerScheme(scheme, layer.input))
        raise RefusedError(
            f"{where}: {LayerScheme(scheme, layer.input)} is no type of a GGUF file",
            f"--format {' or '.join(others)} holds it"
            if others
            else nearest(scheme.grid, SUPERBLOCKS),
        )
    return scheme.grid.upper()


def _label(wanted: Recipe) -> str:
    """Return the name of the mixture, or the grid that all linears get."""
    if wanted.type is not None:
        if wanted.type.upper() not in mixture.MIXTURES:
            hint = nearest(wanted.type.upper(), mixture.MIXTURES, TYPE_WORDS)
            raise UnknownNameError(f"--type {wanted.type}: unknown", hint)
        return wanted.type.upper()
    if wanted.scheme is not None:
        return type_of(LayerScheme(parse(wanted.scheme)), "--scheme")
    bits = wanted.bits or 4
    if bits not in mixture.BY_BITS:
        raise InputError(f"--bits {bits}: no mixture of that size", "2, 3, 4, 5, 6 or 8, or --type")
    return mixture.BY_BITS[bits]
