"""The plan as data: what happens to every tensor, and what the result will be. This module does not import torch.

What a plan has chosen and substituted is shown to the user before the work begins (`decisions`).
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
    """What a plan does with a source tensor.

    A kept tensor is not quantized, but its values may change: transforms fold scales into norms and biases, sparse
    linears get zeros, and tuning learns the gains of norms.
    """

    QUANTIZE = "quantize"
    KEEP = "keep"
    DROP = "drop"
    MEASURE = "measure"  # not in the source: measured in calibration


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Header of one tensor in a file of any format: name, dtype as in safetensors, shape.

    GGUF blocks are ``U8`` tensors ``[rows, bytes per row]``. ``data`` has the content of a small tensor that describes
    another one (its shape, how it is packed), if it was read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(default=b"", compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Return the size of its data in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class FileTensorInfo:
    """One tensor as described by its file: dtype in the file's own terms, shape in elements, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file_name: str = ""  # the name in the file, if it differs


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The exact layout of one weight file, before any tensor is computed.

    Attributes:
        name: path inside the stage.
        size: bytes of the whole file; bytes that are neither fixed nor part of a tensor are zero.
        fixed: byte strings that are known in advance, with their offsets; the header comes first.
        places: every tensor of the file, with the offset of its first byte.
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
    """The plan for one source tensor: what is done with it, by which rule, and what is written for it."""

    name: str  # name in the source checkpoint
    dtype: str
    shape: tuple[int, ...]
    action: Action
    rule: str
    scheme: LayerScheme | None = None
    outputs: tuple[StoredTensor, ...] = ()
    block: int = -1  # index of the decoder block, -1 outside of the blocks
    shared: str = ""  # name of the input that it shares with other linears, "" if none is declared
    transposed: bool = False  # stored [in_features, out_features] (gpt2's Conv1D)
    codes_transposed: bool = False  # its codes are stored transposed too
    has_group_index: bool = False  # an index assigns columns to groups (desc_act)
    heads: int = 0  # GGUF: number of heads within which rotary pairs of rows are reordered
    plus_one: bool = False  # GGUF: one is added to the stored values (norms)
    negate_exp: bool = False  # GGUF: stored as minus the exponential of its values (Mamba's A_log)
    strip_by_strip: bool = (
        False  # can be rounded and written in strips of rows if no statistics are used
    )
    expert: int = -1  # index of the expert that it belongs to, -1 for other tensors
    sparse: bool = False  # kept, with zeros in the recipe's sparsity pattern

    @property
    def output_bytes(self) -> int:
        """Return the number of bytes written for this tensor."""
        return sum(
            [tensor.nbytes for tensor in self.outputs]
        )  # a list is faster here: called for every expert

    @property
    def matrix(self) -> tuple[int, int]:
        """Return ``(out_features, in_features)`` of a linear weight."""
        first, second = self.shape
        return (second, first) if self.transposed else (first, second)


@strict_fields
@dataclass(frozen=True, slots=True)
class Serving:
    """How the result will be served, for the command that serves it. It does not affect the result.

    Attributes:
        context: maximum number of tokens of a sequence, or None.
        cache: type of the KV cache, or None.
        devices: number of tensor-parallel devices.
    """

    context: int | None = None
    cache: str | None = None
    devices: int = 1


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """Whether an engine loads the result.

    Attributes:
        engine: name of the engine.
        loads: whether it loads the result; None if that was not tried.
        reason: why it does not load it or was not tried; advice if it does.
        note: advice for an engine that was not tried.
    """

    engine: str
    loads: bool | None
    reason: str = ""
    note: str = ""

    @property
    def word(self) -> str:
        """Return the verdict as one word for tables."""
        return "not tried" if self.loads is None else ("yes" if self.loads else "no")


class NoteKind(StrEnum):
    """Kinds of notes; programs select notes by kind, never by their text."""

    FACT = "fact"
    CHOICE = "choice"  # an option that was left open and how it was set
    SOURCE = "source"  # the source is read with changes: an adapter, fewer experts, a rotation
    EMBEDDING = "embedding"  # the share of embedding and head in the bytes
    TEMPLATE = "template"  # chat templates that a format changes or leaves out
    ENGINE = "engine"  # about the engine that the result is made for
    SERVE = "serve"  # the command that serves the result, with a placeholder for its path
    NOT_READ_BACK = "not-read-back"  # `eval` and `verify` cannot read the result


class Note(str):
    """One sentence about a plan for the user, with its kind."""

    __slots__ = ("kind",)
    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind = NoteKind.FACT) -> Self:
        """Return a note of a kind."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note


def choice(text: str) -> Note:
    """Return a note on an option that the user left open: the chosen value, and why."""
    return Note(f"chosen: {text}", NoteKind.CHOICE)


def kind_of(note: str) -> NoteKind:
    """Return the kind of a note; plain text is a fact."""
    return note.kind if isinstance(note, Note) else NoteKind.FACT


@dataclass(frozen=True, slots=True)
class RunningNames:
    """Names of a result's modules when transformers runs it.

    Attributes:
        modules: names of quantized linears, by their names in the files.
        kept: names of all linears that are not quantized.
    """

    modules: Mapping[str, str]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunWork:
    """Work of a run, from which its time and disk space are forecast (`quantforge.planning.run_work`)."""

    source_bytes: int  # of all weight files of the source
    source_reads: int  # how often the source's weight files are read
    output_bytes: int
    # Bytes of hidden states, on disk in addition to the output if activations are stored there
    states_bytes: int
    guide_bytes: int  # on disk during the backward pass of a guide
    operations: Mapping[str, float]  # by step: float32 operations, or as many as take equally long


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
    peak_memory_bytes: int  # predicted, in addition to what imports take
    engines: tuple[EngineVerdict, ...] = ()
    substitutions: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    not_copied: tuple[
        str, ...
    ] = ()  # notes on source files that are not copied (`quantforge.planning.notes`)
    tensors_after_blocks: tuple[
        str, ...
    ] = ()  # tensors that are quantized after the last block: a quantized head
    needs: tuple[str, ...] = ()  # statistics that calibration collects (`model.statistics`)
    # Number of strips of rows with their own guided Hessian; 0 for plain Hessians
    guided_hessians: int = 0
    tune: int = 0  # tuning epochs after rounding; 0 for none
    unties_head: bool = False  # whether a tied head is stored separately
    name: str = ""  # default name of the result (`quantforge.planning.naming`)
    work: RunWork | None = None  # None for an export
    running: RunningNames | None = None  # set when the result is published

    def __repr__(self) -> str:
        """Return a one-line summary for a user."""
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
        """Return the bits per weight of quantized tensors, including scales and zero points; NaN without any."""
        return _bits(self.quantized())

    @property
    def bits_per_weight_in_blocks(self) -> float:
        """Return the bits per weight of quantized tensors in the blocks, as `allocate` counts; NaN without any."""
        return _bits([tensor for tensor in self.quantized() if tensor.block >= 0])

    @property
    def bits_per_weight_total(self) -> float:
        """Return the bits per weight of all written tensors; NaN without any."""
        return _bits([tensor for tensor in self.tensors if tensor.action is not Action.DROP])

    @property
    def density(self) -> str:
        """Return all figures of bits per weight as text."""
        if not self.quantized():
            return f"nothing quantized, {self.bits_per_weight_total:.3f} bits per weight"
        block_text = "all in blocks"
        if any(tensor.block < 0 for tensor in self.quantized()):
            block_text = f"{self.bits_per_weight_in_blocks:.3f} in blocks".replace("nan", "none")
        block_text += f" ({self.bits_per_weight_total:.3f} over all tensors)"
        return f"{self.bits_per_weight:.3f} bits per quantized weight, {block_text}"


def _bits(tensors: Sequence[TensorPlan]) -> float:
    """Return the bits stored per weight of some tensors; NaN without any."""
    weights = sum(math.prod(tensor.shape) for tensor in tensors)
    return 8 * sum(tensor.output_bytes for tensor in tensors) / weights if weights else math.nan


_MAX_NAMES = 3  # plans that are named before the others are counted


def decisions(plan: Plan) -> list[str]:
    """Return the notes on options that the user left open, and on substitutions."""
    return [
        *(note for note in plan.notes if kind_of(note) is NoteKind.CHOICE),
        *substitution_notes(plan),
    ]


def decisions_by_plan(plans: Mapping[str, Plan]) -> list[str]:
    """Return the decisions of several plans, equal ones once, each prefixed with the names of its plans."""
    owners: dict[str, list[str]] = {}
    for name, plan in plans.items():
        for decision in decisions(plan):
            owners.setdefault(decision, []).append(name)
    return [f"{_plan_names(names, len(plans))}: {decision}" for decision, names in owners.items()]


def substitution_notes(plan: Plan) -> list[str]:
    """Return the substitutions of a plan as text, equal ones merged."""
    counts = Counter((event.kind, event.detail) for event in plan.substitutions)
    first = {(event.kind, event.detail): event.where for event in reversed(plan.substitutions)}
    return [
        f"{kind}: {first[kind, detail]}: {detail}"
        if count == 1
        else f"{kind}: {detail}: {count} tensors, the first is {first[kind, detail]}"
        for (kind, detail), count in counts.items()
    ]


def _plan_names(names: list[str], plans: int) -> str:
    if 1 < len(names) == plans:
        return f"all {plans}"
    num_more = len(names) - _MAX_NAMES
    return f"{', '.join(names[:_MAX_NAMES])}{f' and {num_more} more' if num_more > 0 else ''}"
