"""Rotations folded into weights: an orthogonal matrix spreads outliers over all channels, at no cost at run time.

With a Hadamard matrix ``Q`` with random signs, the residual stream ``x`` becomes ``x Q``: the embedding becomes
``E Q``, writers become ``Q^T W`` (and their biases), readers become ``W diag(g) Q`` with the gain ``g`` of the
preceding norm, which becomes one (QuaRot, Ashkboos et al., arXiv 2404.00456; R1 of SpinQuant, arXiv 2405.16406).
Nothing is computed at run time, so that any format and engine can hold the result. Rotations of the values of heads
(R2) are omitted: they gave no improvement (docs/results/quality.md).

A head tied to the embedding becomes a separate tensor, because it absorbs the gain of the last norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from quantforge.architectures.configuration import tied_head_mismatch, untie_config
from quantforge.architectures.match import match_tensors, needs_architecture
from quantforge.architectures.residual_stream import find_residual_stream
from quantforge.errors import RefusedError
from quantforge.files.computed_tensors import ROTATION, ComputeRows, with_computed_tensors
from quantforge.files.reader import Checkpoint
from quantforge.numerics.hadamard import Rotation, has_hadamard

if TYPE_CHECKING:
    from torch import Tensor

NAME = "rotate"
SIGN_SEED = 0  # seed of the random signs


def prepare(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose residual stream is rotated and whose norms have gain 1.

    Raises:
        InputError: the family has no declarations.
        RefusedError: not all readers and writers of the residual stream are known, or there is no Hadamard matrix of
            its size.
    """
    model_layout = match_tensors(
        source.config, [entry.to_stored_tensor() for entry in source.entries.values()]
    )
    if model_layout.architecture is None or model_layout.dimensions is None:
        raise needs_architecture(model_layout, NAME)
    stream = find_residual_stream(model_layout, f"--method {NAME}")
    rotation, offset = (
        _make_rotation(model_layout.dimensions.hidden),
        model_layout.architecture.norm_offset,
    )
    stored = {name: tensor.header.name for name, tensor in model_layout.by_name.items()}
    head, embedding = (
        f"{name}.weight"
        for name in (model_layout.architecture.head, model_layout.architecture.embedding)
    )
    rotated = partial(RotatedTensorReader, rotation=rotation, offset=offset, last=LastTensorCache())
    computed_tensors: dict[str, ComputeRows] = {
        stored[name]: rotated(stored[name], rotated_axis.axis, stored.get(rotated_axis.norm, ""))
        for name, rotated_axis in stream.axes.items()
    }
    computed_tensors |= {stored[norm]: ConstantGainReader(1.0 - offset) for norm in stream.norms}
    description = (
        f"residual stream ({rotation.size}) by a Hadamard matrix under signs of seed {SIGN_SEED};"
        f" {len(stream.norms)} norms in their readers"
    )
    if not model_layout.tied:
        return with_computed_tensors(source, computed_tensors, source_notes={ROTATION: description})
    base = model_layout.by_name[embedding].header
    duplicate = stored[head] if model_layout.stores_tied_head else ""
    computed_tensors[head] = rotated(base.name, 1, stored[stream.norms[0]], duplicate=duplicate)
    new_entries = {head: replace(source.entries[base.name], name=head)}
    description += f"; the head stored on its own, {base.nbytes:,} bytes before rounding"
    config = untie_config(source.config)
    return with_computed_tensors(
        source,
        computed_tensors,
        config=config,
        new_entries=new_entries,
        source_notes={ROTATION: description},
    )


@dataclass(frozen=True, slots=True)
class RotatedTensorReader:
    """Reader of a tensor whose channels are rotated.

    Attributes:
        base: name of the stored tensor.
        axis: axis of the channels.
        gain: stored name of the norm whose gain is folded in first; "" for none.
        rotation: rotation of the channels.
        offset: offset that norms add to their stored weights.
        last: cache of the last computed tensor, if each row depends on all rows.
        duplicate: name of a stored tensor that must have equal values; "" for none.
    """

    base: str
    axis: int
    gain: str
    rotation: Rotation
    offset: float
    last: LastTensorCache
    duplicate: str = ""

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` in float32."""
        rows = checkpoint.entries[self.base].shape[0]
        if self.axis == 0 and last - first < rows:
            return self.last.of(self, checkpoint, rows)[first:last].clone()
        return self.rotated(checkpoint, first, last)

    def rotated(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return rotated rows; all rows if the rows are the channels."""
        import torch

        stored = checkpoint.read_rows(self.base, first, last)
        if self.duplicate and not torch.equal(
            stored, checkpoint.read_rows(self.duplicate, first, last)
        ):
            raise tied_head_mismatch(self.base, self.duplicate)
        value = stored.to(torch.float32, copy=True)
        if self.gain:
            gain = checkpoint.read(self.gain).float() + self.offset
            value *= gain.view(-1, *[1] * (value.dim() - 1 - self.axis))
        self.rotation.rotate_axis(value, self.axis)
        return value


class LastTensorCache:
    """Thread-safe cache of the last computed tensor."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._key: tuple[str, Checkpoint] | None = None
        self._value: Tensor | None = None

    def of(self, reader: RotatedTensorReader, checkpoint: Checkpoint, rows: int) -> Tensor:
        """Return all rows of a tensor; the caller must not change them."""
        with self._lock:
            cached_key = self._key
            if (
                self._value is None
                or cached_key is None
                or cached_key[0] != reader.base
                or cached_key[1] is not checkpoint
            ):
                self._value = self._key = None
                self._value = reader.rotated(checkpoint, 0, rows)
                self._key = (reader.base, checkpoint)
            return self._value


@dataclass(frozen=True, slots=True)
class ConstantGainReader:
    """Reader of the constant gain of a norm whose weight was folded into its readers."""

    value: float

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return ``last - first`` equal values in float32."""
        import torch

        del checkpoint
        return torch.full((last - first,), self.value)


def _make_rotation(size: int) -> Rotation:
    if not has_hadamard(size):
        raise RefusedError(
            f"--method {NAME}: no Hadamard matrix of {size} channels is known here",
            "leave it out: the rest of the method works without it",
        )
    return Rotation(size, f"residual stream {SIGN_SEED}")
