"""A checkpoint some of whose tensors are computed when they are read: what a transform of the whole source hands on.

Computed tensors are float32, whatever type their entry states: who rounds them starts from the exact value, and who
keeps them rounds them to the stated type.
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

ADAPTER = "adapter"  # the subject of what is said of one that is merged as it is read
KEPT_EXPERTS = "kept_experts"  # likewise, where others are removed
ROTATION = "rotation"  # likewise, of one whose channels are rotated
RUNNING = "layout"  # the subject of what is said of a source in the form of the running model, see `Checkpoint.facts`
# Takes the checkpoint to read from, and returns rows ``first:last`` of the new tensor.
Rows = Callable[[Checkpoint, int, int], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class PreparedCheckpoint(Checkpoint):
    """Checkpoint of which some tensors are computed.

    Attributes:
        inner: what it is computed from.
        computed: by the name of the tensor.
        own_facts: what there is to say of this view alone, see `Checkpoint.facts`.
        own_declared: declarations that this view was made by, see `Checkpoint.declared`.
    """

    inner: Checkpoint
    computed: Mapping[str, Rows]
    own_facts: Mapping[str, str]
    own_declared: DerivedDeclarations | None

    def read(self, name: str) -> torch.Tensor:
        """Read or compute a tensor."""
        rows = self.computed.get(name)
        if rows is None:
            return self.inner.read(name)
        return rows(self.inner, 0, self.entries[name].shape[0])

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read or compute rows of a tensor."""
        rows = self.computed.get(name)
        return rows(self.inner, first, last) if rows else self.inner.read_rows(name, first, last)

    @property
    def facts(self) -> Mapping[str, str]:
        """Return what there is to say of the views one over the other, the innermost first."""
        return {**self.inner.facts, **self.own_facts}

    @property
    def declared(self) -> DerivedDeclarations | None:
        """Return the declarations by which this view, or one below, was made (as `Checkpoint`)."""
        return self.own_declared or self.inner.declared

    @property
    def opened(self) -> Checkpoint:
        """Return the checkpoint that was opened."""
        return self.inner.opened

    def with_checksums(self, checksums: Mapping[Path, Checksums]) -> Self:
        """Return the checkpoint with checksums of its files (as `Checkpoint`)."""
        return replace(self, inner=self.inner.with_checksums(checksums))


def prepared_checkpoint(
    inner: Checkpoint,
    computed: Mapping[str, Rows],
    *,
    config: dict[str, Any] | None = None,
    added: Mapping[str, TensorEntry] | None = None,
    left_out: Collection[str] = (),
    facts: Mapping[str, str] | None = None,
    declared: DerivedDeclarations | None = None,
) -> PreparedCheckpoint:
    """Return a checkpoint with computed tensors.

    Args:
        inner: what they are computed from.
        computed: how, by name.
        config: the new configuration, where it changes.
        added: entries of computed tensors that ``inner`` does not have, with type and shape; the rest is not read.
        left_out: tensors of ``inner`` that the model no longer has: others are computed from them.
        facts: see `Checkpoint.facts`.
        declared: see `Checkpoint.declared`.
    """
    common = {item.name: getattr(inner, item.name) for item in fields(Checkpoint)}
    kept = {name: entry for name, entry in inner.entries.items() if name not in left_out}
    common["entries"] = dict(sorted({**kept, **(added or {})}.items()))
    if config is not None:
        common["config"] = config
    return PreparedCheckpoint(
        **common, inner=inner, computed=computed, own_facts=facts or {}, own_declared=declared
    )
