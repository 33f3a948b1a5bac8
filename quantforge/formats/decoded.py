"""A quantized checkpoint as if it were not: its weights decoded as they are read.

For those who have nothing better to quantize from. What the first quantization has lost stays lost, which is why the
run that reads through this records an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quantforge.architectures import architecture_of
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.seal import Seal
from quantforge.formats import ModuleLayout, detect, kv_scales

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DecodedCheckpoint(Checkpoint):
    """Checkpoint whose quantized layers are read decoded.

    Attributes:
        inner: the quantized one.
        layouts: its layers, by the name of the weight.
        turned: weights that the family stores as ``[in_features, out_features]``; a square one looks the same.
    """

    inner: Checkpoint
    layouts: Mapping[str, ModuleLayout]
    turned: frozenset[str]

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor; of a quantized layer, the float32 weight that its codes stand for."""
        layout = self.layouts.get(name)
        if layout is None:
            return self.inner.read(name)
        stored = {part: self.inner.read(part) for part in layout.stored}
        weight = detect(self.inner.config).unpack(layout, stored).decode()
        return weight.T.contiguous() if name in self.turned else weight

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows of a tensor; of a quantized layer by way of all of them."""
        if name in self.layouts:
            return self.read(name)[first:last]
        return self.inner.read_rows(name, first, last)

    @property
    def opened(self) -> Checkpoint:
        """Return the quantized checkpoint."""
        return self.inner.opened

    def sealed(self, seals: Mapping[Path, Seal]) -> Self:
        """Return the checkpoint with seals on its files (as `Checkpoint`)."""
        return replace(self, inner=self.inner.sealed(seals))


def decoded(checkpoint: Checkpoint) -> DecodedCheckpoint:
    """Show a quantized checkpoint as float32 weights; errors as the format's ``layouts``."""
    form = detect(checkpoint.config)
    headers = {name: entry.stored() for name, entry in checkpoint.entries.items()}
    layouts = form.layouts(checkpoint.config, headers)
    architecture = architecture_of(checkpoint.config)
    linears = architecture.linears if architecture and architecture.transposed else ()
    turned = {
        f"{layout.module}.weight"
        for layout in layouts
        if any(layout.module.endswith(f".{linear}") for linear in linears)
    }
    used = {name for layout in layouts for name in layout.stored}
    used |= kv_scales.found(checkpoint.config, headers).stored
    entries = {name: entry for name, entry in checkpoint.entries.items() if name not in used}
    for layout in layouts:
        name = f"{layout.module}.weight"
        any_part = checkpoint.entries[layout.stored[0]]
        shape = layout.shape[::-1] if name in turned else layout.shape
        entries[name] = replace(any_part, name=name, dtype="F32", shape=shape)
    config = plain_config(checkpoint)
    common = {item.name: getattr(checkpoint, item.name) for item in fields(Checkpoint)}
    common |= {"config": config, "entries": dict(sorted(entries.items()))}
    return DecodedCheckpoint(
        **common,
        inner=checkpoint,
        layouts={f"{layout.module}.weight": layout for layout in layouts},
        turned=frozenset(turned),
    )


def plain_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the configuration without the keys that say how the weights are held."""
    held = {"quantization_config", "gguf_types"}
    return {key: value for key, value in checkpoint.config.items() if key not in held}
