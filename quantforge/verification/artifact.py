"""An artifact understood from its headers: the format's layers, and every tensor with its place in the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantforge.architectures.match import Matched, MatchedTensor
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError
from quantforge.formats import Format, ModuleLayout, detect
from quantforge.formats.decoded import decoded
from quantforge.formats.matching import match_quantized
from quantforge.formats.opening import open_model
from quantforge.packers.tensor import QuantizedTensor
from quantforge.plans import StoredTensor
from quantforge.quantizers import prepared, source_transforms
from quantforge.results import manifest
from quantforge.verification.findings import Report

NUMBERS = ("not-finite", "scale", "zero-convention")
COMPARED = (
    "configuration", "keys", "side-files", "kept-changed", "fold", "noise", "groups", "swapped",
)  # fmt: skip
STRUCTURE = (
    "incomplete", "nothing-quantized", "ignore-list", "siblings", "vocabulary", "engine", "foreign",
    "settings",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact; ``layouts`` by module name."""

    checkpoint: Checkpoint
    form: Format
    layouts: Mapping[str, ModuleLayout]
    matched: Matched

    def layout(self, tensor: MatchedTensor) -> ModuleLayout | None:
        """Return the layout of a quantized weight, None for a tensor that is stored as it is."""
        return self.layouts.get(tensor.stored.name.removesuffix(".weight"))

    def unpack(self, layout: ModuleLayout) -> QuantizedTensor:
        """Read a quantized weight; errors as the format's ``unpack``."""
        stored = {name: self.checkpoint.read(name) for name in layout.stored}
        return self.form.unpack(layout, stored)


@dataclass(frozen=True, slots=True)
class Original:
    """Model that an artifact is compared with; a quantized source is read decoded."""

    checkpoint: Checkpoint
    matched: Matched

    @property
    def _head(self) -> str:
        architecture = self.matched.architecture
        return f"{architecture.head}.weight" if architecture else "lm_head.weight"

    @property
    def _embedding(self) -> str:
        architecture = self.matched.architecture
        return f"{architecture.embedding}.weight" if architecture else "model.embed_tokens.weight"

    def weight(self, name: str) -> Tensor | None:
        """Return a weight by its canonical name in float32, linears as ``[out, in]``; None where there is none."""
        found = self.matched.by_name.get(name)
        if found is None and self.matched.tied and name == self._head:
            found = self.matched.by_name.get(self._embedding)
        if found is None:
            return None
        value = self.checkpoint.read(found.stored.name).float()
        return value.T.contiguous() if found.transposed else value


def whole_transforms(document: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the transforms of the whole source that a result has had, by its manifest and by what that passes on."""
    found: tuple[str, ...] = ()
    while isinstance(document, Mapping):
        method = document.get("method")
        found = (*(source_transforms(method) if isinstance(method, str) else ()), *found)
        document = document.get("lineage")
    return found


def open_source(path: Path, transforms: tuple[str, ...] = ()) -> Original:
    """Open a source; errors as `open_model` and `match`.

    Transforms of the whole source are applied, unless the source is itself a result that has had them.
    """
    checkpoint = open_model(path)
    form = detect(checkpoint.config)
    stored = _headers(checkpoint)
    layouts = {item.module: item for item in form.layouts(checkpoint.config, stored)}
    matched = match_quantized(checkpoint, layouts, stored)
    plain = decoded(checkpoint) if layouts else checkpoint
    if not transforms or whole_transforms(manifest.read(path)):
        return Original(plain, matched)
    changed = prepared(plain, transforms)
    return Original(changed, match_quantized(changed, {}, _headers(changed)))


def open_artifact(report: Report) -> Artifact | None:
    """Open the artifact of a report; whatever is in the way becomes a finding, and the rest is skipped."""
    path = report.path
    try:
        checkpoint = open_model(path)
        report.model_type = str(checkpoint.config.get("model_type", ""))
        form = detect(checkpoint.config)
        report.format = form.KEY
        stored = _headers(checkpoint)
        layouts = {item.module: item for item in form.layouts(checkpoint.config, stored)}
    except InputError as error:
        _stop(report, error.fault, error)
        return None
    try:
        matched = match_quantized(checkpoint, layouts, stored)
    except InputError as error:
        _stop(report, "incomplete", error)
        return None
    return Artifact(checkpoint, form, layouts, matched)


def _headers(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    return {name: entry.stored() for name, entry in checkpoint.entries.items()}


def _stop(report: Report, check: str, error: InputError) -> None:
    report.add(check, error.tensor or error.file or report.path.name, error.message)
    rest = {*STRUCTURE, *NUMBERS, *COMPARED, "logits"} - {check}
    report.skip("the artifact cannot be read that far", *sorted(rest))
