"""A view of a checkpoint in which some tensors are computed when they are read: the result of transforming a source.

Computed tensors are float32, whatever type their entry declares: quantizers start from the exact value, and code that
keeps a tensor unquantized rounds it to the declared type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quantforge.files.checksums import Checksums
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry

if TYPE_CHECKING:
    import torch

    from quantforge.architectures.match import DerivedDeclarations

# Subjects of `Checkpoint.source_notes`: an adapter that is merged as tensors are read, experts that remain when others
# are removed, rotated channels, and a source in the layout of the running model.
ADAPTER = "adapter"
KEPT_EXPERTS = "kept_experts"
ROTATION = "rotation"
LAYOUT = "layout"
# Takes the checkpoint to read from, and returns rows ``first:last`` of the new tensor.
ComputeRows = Callable[[Checkpoint, int, int], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class ComputedCheckpoint(Checkpoint):
    """A checkpoint in which some tensors are computed.

    Attributes:
        inner: the checkpoint that they are computed from.
        computed: functions that compute rows, by tensor name.
        own_source_notes: what this view adds to `Checkpoint.source_notes`.
        own_declarations: declarations that this view was made with, see `Checkpoint.derived_declarations`.
    """

    inner: Checkpoint
    computed: Mapping[str, ComputeRows]
    own_source_notes: Mapping[str, str]
    own_declarations: DerivedDeclarations | None

    def read(self, name: str) -> torch.Tensor:
        """Read or compute a tensor."""
        compute_rows = self.computed.get(name)
        if compute_rows is None:
            return self.inner.read(name)
        return compute_rows(self.inner, 0, self.entries[name].shape[0])

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read or compute rows of a tensor."""
        compute_rows = self.computed.get(name)
        return (
            compute_rows(self.inner, first, last)
            if compute_rows
            else self.inner.read_rows(name, first, last)
        )

    @property
    def source_notes(self) -> Mapping[str, str]:
        """Return the notes of all views, the innermost first."""
        return {**self.inner.source_notes, **self.own_source_notes}

    @property
    def derived_declarations(self) -> DerivedDeclarations | None:
        """Return the declarations that this view, or one below it, was made with."""
        return self.own_declarations or self.inner.derived_declarations

    @property
    def original(self) -> Checkpoint:
        """Return the checkpoint as it was opened, without views."""
        return self.inner.original

    def with_checksums(self, checksums: Mapping[Path, Checksums]) -> Self:
        """Return the same view with checksums of its files."""
        return replace(self, inner=self.inner.with_checksums(checksums))


def with_computed_tensors(
    inner: Checkpoint,
    computed: Mapping[str, ComputeRows],
    *,
    config: dict[str, Any] | None = None,
    new_entries: Mapping[str, TensorEntry] | None = None,
    removed: Collection[str] = (),
    source_notes: Mapping[str, str] | None = None,
    declared: DerivedDeclarations | None = None,
) -> ComputedCheckpoint:
    """Return a view of a checkpoint with computed tensors.

    Args:
        inner: the checkpoint that they are computed from.
        computed: functions that compute rows, by tensor name.
        config: the new configuration if it changes.
        new_entries: entries (type and shape) of computed tensors that ``inner`` does not have.
        removed: tensors of ``inner`` that the model no longer has, since others are computed from them.
        source_notes: see `Checkpoint.source_notes`.
        declared: see `Checkpoint.derived_declarations`.
    """
    fields_of_inner = {item.name: getattr(inner, item.name) for item in fields(Checkpoint)}
    unchanged = {name: entry for name, entry in inner.entries.items() if name not in removed}
    fields_of_inner["entries"] = dict(sorted({**unchanged, **(new_entries or {})}.items()))
    if config is not None:
        fields_of_inner["config"] = config
    return ComputedCheckpoint(
        **fields_of_inner,
        inner=inner,
        computed=computed,
        own_source_notes=source_notes or {},
        own_declarations=declared,
    )
