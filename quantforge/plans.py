"""The plan as data: what happens to every tensor, and what the result will be. No torch.

What a plan has chosen and substituted is shown before the work begins (`decisions`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from quantforge.arguments import strict_fields
from quantforge.events import Event
from quantforge.scheme import LayerScheme

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


class Action(StrEnum):
    """Action of a plan on a source tensor.

    What is kept is not rounded, yet its values may change: transforms fold scales into norms and biases, what is
    ``sparse`` gets zeros, and tuning learns gains of norms.
    """

    QUANTIZE = "quantize"
    KEEP = "keep"
    DROP = "drop"
    MEASURE = "measure"  # not in the source: calibration finds it


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Header of one tensor in a file of any format: name, type as safetensors calls it, shape.

    Blocks of a GGUF file are ``U8`` ``[rows, bytes of a row]``. ``data`` holds the content of a small tensor that
    describes another (its shape, how it is packed), if read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(default=b"", compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor as its file describes it: type in the file's own words, shape in elements, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    own: str = ""  # the name in the file, where that is another


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One weight file, known to the byte before any tensor exists.

    Attributes:
        name: inside of the stage.
        size: of the whole file; whatever is neither fixed nor a tensor is zeros.
        fixed: runs of bytes that are known beforehand (offset, bytes): the header first of all.
        places: every tensor that will be written, with the offset of its first byte in the file.
    """

    name: str
    size: int
    fixed: tuple[tuple[int, bytes], ...]
    places: tuple[tuple[StoredTensor, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors, in file order."""
        return tuple(tensor.name for tensor, _ in self.places)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One source tensor: what is done with it, by which rule, and what is written for it."""

    name: str  # as in the source checkpoint
    dtype: str
    shape: tuple[int, ...]
    action: Action
    rule: str
    scheme: LayerScheme | None = None
    outputs: tuple[StoredTensor, ...] = ()
    block: int = -1  # index of the decoder block, -1 outside of the blocks
    shared: str = ""  # the shared input that it reads, "" when none is declared
    transposed: bool = False  # stored [in_features, out_features] (gpt2's Conv1D)
    turned: bool = False  # its codes are stored so, too
    scattered: bool = False  # an index says the group of each column (desc_act)
    heads: int = 0  # GGUF: rows are reordered within so many heads (rotary pairs)
    plus_one: bool = False  # GGUF: stored plus one
    decay: bool = False  # GGUF: a logarithm, of which minus the exponential is stored
    by_rows: bool = False  # without statistics, rounded and written in strips of rows
    expert: int = -1  # the number of the expert whose matrix it is, -1 for all others
    sparse: bool = False  # kept, with zeros of the recipe's pattern

    @property
    def output_bytes(self) -> int:
        """Return the bytes written for this tensor."""
        return sum([tensor.nbytes for tensor in self.outputs])  # asked for of every expert

    @property
    def matrix(self) -> tuple[int, int]:
        """Return ``(out_features, in_features)`` of a linear weight."""
        first, second = self.shape
        return (second, first) if self.transposed else (first, second)


@strict_fields
@dataclass(frozen=True, slots=True)
class Serving:
    """Way in which a result is to be served: what its command asks for. No byte of the result depends on it.

    Attributes:
        context: most tokens of a sequence, or None.
        cache: type of the cache, or None.
        devices: that share the model by tensors.
    """

    context: int | None = None
    cache: str | None = None
    devices: int = 1


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """Verdict on whether an engine loads the result, and why not.

    Attributes:
        engine: its name.
        loads: None where it was not tried.
        reason: why it does not load it, or was not tried; what is good to know where it loads it.
        note: what is good to know if it loads it, of one that was not tried.
    """

    engine: str
    loads: bool | None
    reason: str = ""
    note: str = ""

    @property
    def word(self) -> str:
        """Return the verdict as tables show it."""
        return "not tried" if self.loads is None else ("yes" if self.loads else "no")


class NoteKind(StrEnum):
    """Kinds of notes; programs sort notes by kind, never by their text."""

    FACT = "fact"
    CHOICE = "choice"  # an option that was left open and how it was set
    SOURCE = "source"  # the source is read with changes: an adapter, fewer experts, a rotation
    EMBEDDING = "embedding"  # the share of embedding and head in the bytes
    TEMPLATE = "template"  # chat templates that a format changes or leaves out
    ENGINE = "engine"  # about the engine that the result is made for
    SERVE = "serve"  # the command that serves the result, with a placeholder for its path
    NOT_READ_BACK = "not-read-back"  # `eval` and `verify` cannot read the result


class Note(str):
    """One sentence for the user about a plan, with its kind."""

    __slots__ = ("kind",)
    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind = NoteKind.FACT) -> Self:
        """Return a note of a kind."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note


def choice(text: str) -> Note:
    """Return the note about an option that was left open: which value was chosen, and why."""
    return Note(f"chosen: {text}", NoteKind.CHOICE)


def kind_of(note: str) -> NoteKind:
    """Return the kind of a note; plain text is a fact."""
    return note.kind if isinstance(note, Note) else NoteKind.FACT


@dataclass(frozen=True, slots=True)
class RunningNames:
    """Names that modules of a result have when transformers runs it.

    Attributes:
        modules: of quantized linears, by their names in files.
        kept: all linears that are not quantized.
    """

    modules: Mapping[str, str]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunWork:
    """Work of a run, for a forecast of its time and of its files (`quantforge.planning.run_work`)."""

    source_bytes: int  # of all weight files of the source
    reads: int  # how often these are read
    output_bytes: int
    states_bytes: int  # of hidden states, beside the output where activations wait on the disk
    guide_bytes: int  # of what a backward pass keeps there
    operations: Mapping[str, float]  # of float32, or as many as take as long, by step


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Everything that is decided before a weight is read."""

    model: str
    model_type: str
    method: str
    transforms: tuple[str, ...]
    rounder: str
    format: str
    tensors: tuple[TensorPlan, ...]
    shards: tuple[tuple[str, ...], ...]  # output tensor names in file order, per shard
    output_bytes: int  # of all weight files, headers included
    peak_memory_bytes: int  # predicted, above what the imports take
    engines: tuple[EngineVerdict, ...] = ()
    substitutions: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()  # of the source, see `quantforge.planning.notes`
    late: tuple[str, ...] = ()  # tensors that are rounded after the last block: a quantized head
    needs: tuple[str, ...] = ()  # statistics that calibration observes (`model.statistics`)
    guide: int = 0  # strips of rows with a guided Hessian of their own; 0: plain ones
    tune: int = 0  # epochs in which scales, norms and codes are learned after rounding; 0: none
    untie: bool = False  # the tied head is stored on its own
    name: str = ""  # of the result, where none is given: see `quantforge.planning.naming`
    work: RunWork | None = None  # of a run that quantizes
    running: RunningNames | None = None  # known when the result is published

    def __repr__(self) -> str:
        """Return a line for a person: what is made of which model, and how much of it."""
        return (
            f"Plan(model={self.model!r}, method={self.method!r}, format={self.format!r}, name={self.name!r},"
            f" quantized={len(self.quantized())} of {len(self.tensors)} tensors, output_bytes={self.output_bytes},"
            f" bits_per_weight={self.bits_per_weight:.3f}, peak_memory_bytes={self.peak_memory_bytes},"
            f" substitutions={len(self.substitutions)})"
        )

    def quantized(self) -> tuple[TensorPlan, ...]:
        """Return the tensors that are quantized, in file order."""
        return tuple(tensor for tensor in self.tensors if tensor.action is Action.QUANTIZE)

    @property
    def bits_per_weight(self) -> float:
        """Return the bits stored per weight of the quantized tensors, scales and zeros included; NaN without any."""
        return _bits(self.quantized())

    @property
    def bits_per_weight_in_blocks(self) -> float:
        """Return those of the quantized tensors of blocks, which `allocate` plans; NaN without any."""
        return _bits([tensor for tensor in self.quantized() if tensor.block >= 0])

    @property
    def bits_per_weight_total(self) -> float:
        """Return the bits stored per weight of all tensors that are written; NaN without any."""
        return _bits([tensor for tensor in self.tensors if tensor.action is not Action.DROP])

    @property
    def density(self) -> str:
        """Return the figures of bits per weight as text."""
        if not self.quantized():
            return f"nothing quantized, {self.bits_per_weight_total:.3f} bits per weight"
        inside = "all in blocks"
        if any(tensor.block < 0 for tensor in self.quantized()):
            inside = f"{self.bits_per_weight_in_blocks:.3f} in blocks".replace("nan", "none")
        inside += f" ({self.bits_per_weight_total:.3f} over all tensors)"
        return f"{self.bits_per_weight:.3f} bits per quantized weight, {inside}"


def _bits(tensors: Sequence[TensorPlan]) -> float:
    """Return the bits stored per weight of some tensors; NaN without any."""
    weights = sum(math.prod(tensor.shape) for tensor in tensors)
    return 8 * sum(tensor.output_bytes for tensor in tensors) / weights if weights else math.nan


_NAMED = 3  # plans by name before the others are counted


def decisions(plan: Plan) -> list[str]:
    """Return what a plan chose for a user who left it open, and what it substitutes."""
    return [
        *(note for note in plan.notes if kind_of(note) is NoteKind.CHOICE),
        *substituted(plan),
    ]


def decisions_of(plans: Mapping[str, Plan]) -> list[str]:
    """Return the decisions of several plans, alike ones once, each with the names of its plans before it."""
    owners: dict[str, list[str]] = {}
    for name, plan in plans.items():
        for said in decisions(plan):
            owners.setdefault(said, []).append(name)
    return [f"{_named(names, len(plans))}: {said}" for said, names in owners.items()]


def substituted(plan: Plan) -> list[str]:
    """Return the substitutions of a plan in words, alike ones together: those are of tensors."""
    alike = Counter((event.kind, event.detail) for event in plan.substitutions)
    first = {(event.kind, event.detail): event.where for event in reversed(plan.substitutions)}
    return [
        f"{kind}: {first[kind, detail]}: {detail}"
        if count == 1
        else f"{kind}: {detail}: {count} tensors, the first is {first[kind, detail]}"
        for (kind, detail), count in alike.items()
    ]


def _named(names: list[str], plans: int) -> str:
    if 1 < len(names) == plans:
        return f"all {plans}"
    more = len(names) - _NAMED
    return f"{', '.join(names[:_NAMED])}{f' and {more} more' if more > 0 else ''}"
