"""Rotations folded into weights: an orthogonal matrix spreads every outlier over all channels, and costs nothing later.

With a Hadamard matrix ``Q`` under random signs, the residual stream ``x`` becomes ``x Q``: embedding ``E Q``, whatever
writes ``Q^T W`` (and its bias), whatever reads ``W diag(g) Q`` with the gain ``g`` of the norm before it, which becomes
one (QuaRot, Ashkboos et al., arXiv 2404.00456; R1 of SpinQuant, arXiv 2405.16406). The values of each attention head
become ``v R``, in the rows of ``W_v`` and in the columns that read them (R2). Nothing is computed while the model
runs, so that any format and any engine holds the result.

A head that was the embedding becomes one of its own: it has the gain of the last norm in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from quantforge.architectures.match import match, needs_architecture
from quantforge.architectures.matched import Matched
from quantforge.architectures.residual_stream import ResidualStream, residual_stream
from quantforge.architectures.tied_embeddings import untied
from quantforge.checkpoint.prepared import ROTATION, Rows, prepared_checkpoint
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import RefusedError
from quantforge.numerics.hadamard import Rotation, known

if TYPE_CHECKING:
    from torch import Tensor

NAME = "rotate"
SEED = 0  # of the signs


class Turn(NamedTuple):
    """One axis of a tensor, and how it is rotated.

    Attributes:
        axis: its number.
        rotation: of each run of so many channels.
        rows: the part of the axis that is rotated.
        gain: stored name of the norm whose gain is multiplied in first; "" for none.
    """

    axis: int
    rotation: Rotation
    rows: slice = slice(None)
    gain: str = ""


def prepare(source: Checkpoint) -> Checkpoint:
    """Return a source whose residual stream and values are rotated, and whose norms have gain 1.

    Raises:
        InputError: the family is not declared.
        RefusedError: it is not proven that all readers and writers of the residual stream are known, or no
            Hadamard matrix of its size is.
    """
    matched = match(source.config, [entry.stored() for entry in source.entries.values()])
    if matched.architecture is None or matched.dimensions is None:
        raise needs_architecture(matched, NAME)
    stream = residual_stream(matched, f"--method {NAME}")
    head = f"{matched.architecture.head}.weight"
    offset = matched.architecture.norm_offset
    stored = {name: tensor.stored.name for name, tensor in matched.by_name.items()}
    turns, last = _turns(matched, stream, stored), Last()
    computed: dict[str, Rows] = {
        stored[name]: Rotated(stored[name], tuple(found), offset, last)
        for name, found in turns.items()
    }
    computed |= {stored[norm]: Gain(1.0 - offset) for norm in stream.norms}
    facts = {ROTATION: _described(matched, stream)}
    if not matched.tied:
        return prepared_checkpoint(source, computed, facts=facts)
    embedding = stored[f"{matched.architecture.embedding}.weight"]
    (turn,) = turns[f"{matched.architecture.embedding}.weight"]
    gained = turn._replace(gain=stored[stream.norms[0]])
    computed[head] = Rotated(embedding, (gained,), offset, last)
    added = {head: replace(source.entries[embedding], name=head)}
    return prepared_checkpoint(
        source, computed, config=untied(source.config), added=added, facts=facts
    )


@dataclass(frozen=True, slots=True)
class Rotated:
    """Reader of a tensor with its turns.

    Attributes:
        base: the stored tensor.
        turns: one for each axis at most.
        offset: what norms add to their gains.
        last: keeps what strips are taken of, where each depends on all rows.
    """

    base: str
    turns: tuple[Turn, ...]
    offset: float
    last: Last

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` in float32."""
        start, stop = self._runs(checkpoint, first, last)
        if stop - start > last - first and stop - start == checkpoint.entries[self.base].shape[0]:
            return self.last.of(self, checkpoint, stop)[first:last].clone()
        return self.rotated(checkpoint, start, stop)[first - start : last - start]

    def rotated(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Return rows that are whole runs of what is rotated."""
        import torch

        value = checkpoint.read_rows(self.base, start, stop).to(torch.float32, copy=True)
        for turn in self.turns:
            axis = turn.axis
            if turn.gain:
                gain = checkpoint.read(turn.gain).float() + self.offset
                value *= gain.view(-1, *[1] * (value.dim() - 1 - axis))
            if axis == 0:
                low, high, _ = turn.rows.indices(checkpoint.entries[self.base].shape[0])
                turn.rotation.along(value[max(low - start, 0) : max(high - start, 0)], 0)
            else:
                turn.rotation.along(value, axis)
        return value

    def _runs(self, checkpoint: Checkpoint, first: int, last: int) -> tuple[int, int]:
        """Return the rows from which rows ``first:last`` are computed."""
        for turn in self.turns:
            if turn.axis == 0:
                size = turn.rotation.size
                low, high, _ = turn.rows.indices(checkpoint.entries[self.base].shape[0])
                if low < last and first < high:
                    start, stop = max(first, low), min(last, high)
                    first = min(first, start - (start - low) % size)
                    last = max(last, stop + (low - stop) % size)
        return first, last


class Last:
    """The tensor that was computed last, safe on several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._key: tuple[str, Checkpoint] | None = None
        self._value: Tensor | None = None

    def of(self, reader: Rotated, checkpoint: Checkpoint, rows: int) -> Tensor:
        """Return all rows of a tensor, which are not to be changed."""
        with self._lock:
            known = self._key
            if (
                self._value is None
                or known is None
                or known[0] != reader.base
                or known[1] is not checkpoint
            ):
                self._value = self._key = None
                self._value = reader.rotated(checkpoint, 0, rows)
                self._key = (reader.base, checkpoint)
            return self._value


@dataclass(frozen=True, slots=True)
class Gain:
    """Reader of the gain of a norm that its readers have taken."""

    value: float

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return ``last - first`` equal values in float32."""
        import torch

        del checkpoint
        return torch.full((last - first,), self.value)


def _turns(
    matched: Matched, stream: ResidualStream, stored: dict[str, str]
) -> dict[str, list[Turn]]:
    """Return the turns of every tensor, by canonical name."""
    assert matched.dimensions is not None
    whole = _rotation(matched.dimensions.hidden, "residual stream")
    head = _rotation(matched.dimensions.head, "values")
    found: dict[str, list[Turn]] = defaultdict(list)
    for name, place in stream.places.items():
        gain = stored[place.norm] if place.norm else ""
        found[name].append(Turn(place.axis, whole, gain=gain))
    for values in stream.values:
        for maker in values.makers:
            found[maker].append(Turn(0, head, values.rows))
        found[values.reader].append(Turn(1, head))
    return found


def _rotation(size: int, what: str) -> Rotation:
    if not known(size):
        raise RefusedError(
            f"--method {NAME}: no Hadamard matrix of {size} channels ({what}) is known here",
            "the same without it",
        )
    return Rotation(size, f"{what} {SEED}")


def _described(matched: Matched, stream: ResidualStream) -> str:
    """Say for people and for the manifest what was rotated."""
    architecture, dimensions = matched.architecture, matched.dimensions
    assert architecture is not None
    assert dimensions is not None
    words = [
        f"residual stream ({dimensions.hidden}) and values of heads ({dimensions.head})"
        f" by Hadamard matrices under signs of seed {SEED}"
    ]
    words.append(f"{len(stream.norms)} norms in their readers")
    if matched.tied:
        size = _bytes(matched, [f"{architecture.embedding}.weight"])
        words.append(f"the head stored on its own, {size:,} bytes before rounding")
    return "; ".join(words)


def _bytes(matched: Matched, names: Iterable[str]) -> int:
    return sum(matched.by_name[name].stored.nbytes for name in names)
