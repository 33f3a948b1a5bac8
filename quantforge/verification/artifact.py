"""An artifact understood from its headers: the format's layers, and every tensor with its place in the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantforge.architectures.expert_sets import has_single_experts
from quantforge.architectures.match import Matched, MatchedTensor
from quantforge.checkpoint.fewer_experts import FACT, Removed, fewer_experts, from_text
from quantforge.checkpoint.fewer_heads import FACT as HEADS
from quantforge.checkpoint.fewer_heads import fewer_heads
from quantforge.checkpoint.prepared import RUNNING
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.unstacked import UnstackedCheckpoint
from quantforge.errors import InputError, IntegrityError
from quantforge.formats import Format, ModuleLayout, detect
from quantforge.formats.decoded import decoded
from quantforge.formats.matching import match_quantized
from quantforge.formats.opening import open_model, open_plain_source
from quantforge.formats.sources.adapter import open_adapter
from quantforge.model.running_form import running_form
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.single_experts import one_by_one as one_by_one_of
from quantforge.plans import StoredTensor
from quantforge.quantizers import prepared, source_transforms
from quantforge.recipe import AdapterOptions, from_toml
from quantforge.results import manifest
from quantforge.runtime.load import Loaded, load
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
    """An opened artifact; ``layouts`` by module name; ``running``: its tensors have the form of the running model."""

    checkpoint: Checkpoint
    form: Format
    layouts: Mapping[str, ModuleLayout]
    matched: Matched
    running: bool = False

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

    def load(self, device: str, *, packed_experts: bool = True) -> Loaded:
        """Load the model as runs read it; errors as `quantforge.runtime.load.load`."""
        view = self.checkpoint
        view = view.inner if isinstance(view, UnstackedCheckpoint) else view
        known = view if view.facts else None
        path = self.checkpoint.path
        return load(path, device, packed_experts=packed_experts, source=known)

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


def stated_removal(document: Mapping[str, Any] | None) -> Removed | None:
    """Return the experts that a result lacks, by its manifest or by what that passes on; None where all are there.

    Raises:
        InputError: what it says of them is nothing like that.
    """
    while isinstance(document, Mapping):
        source = document.get("source")
        if isinstance(source, Mapping) and FACT in source:
            return from_text(str(source[FACT]))
        document = document.get("lineage")
    return None


def lacks_heads(document: Mapping[str, Any] | None) -> bool:
    """Return whether the heads for further tokens were dropped, by the manifest or by what that passes on."""
    return _states(document, HEADS)


def runs_as_stored(document: Mapping[str, Any] | None) -> bool:
    """Return whether a manifest, or what it passes on, says that tensors have the form of the running model."""
    return _states(document, RUNNING)


def _states(document: Mapping[str, Any] | None, fact: str) -> bool:
    """Return whether a manifest, or one that it passes on, states a fact of its source."""
    while isinstance(document, Mapping):
        source = document.get("source")
        if isinstance(source, Mapping) and fact in source:
            return True
        document = document.get("lineage")
    return False


def stated_adapter(document: Mapping[str, Any] | None) -> AdapterOptions:
    """Return the adapter that a result has had, by its manifest or by what that passes on."""
    while isinstance(document, Mapping):
        recipe = document.get("recipe")
        if isinstance(recipe, str) and recipe:
            return from_toml(recipe, "the recipe of its manifest").adapter
        document = document.get("lineage")
    return AdapterOptions()


def check_adapter(document: Mapping[str, Any] | None, adapter: Path | None) -> None:
    """Refuse a comparison without the adapter that the manifest of a result states, or with another.

    Raises:
        InputError, IntegrityError: saying which it was.
    """
    stated = stated_adapter(document)
    hint = f"--adapter DIR, of {stated.source}: SHA-256 {'; '.join(stated.sha256)}"
    if stated.source and adapter is None:
        raise InputError(f"it was made with the adapter {stated.source}", hint)
    if stated.sha256 and adapter is not None and open_adapter(adapter).digests != stated.sha256:
        raise IntegrityError(f"--adapter {adapter}: not the adapter that it was made with", hint)


def open_source(
    path: Path,
    transforms: tuple[str, ...] = (),
    adapter: Path | None = None,
    *,
    removed: Removed | None = None,
    headless: bool = False,
    running: bool = False,
    one_by_one: bool = False,
    derive: bool = False,
) -> Original:
    """Open a source; errors as `open_model` and `match`.

    Experts are removed, transforms of the whole source applied and the adapter merged, unless the source is itself a
    result that has had that.

    Args:
        path: the source.
        transforms: of the whole of it.
        adapter: directory of what is merged into it.
        removed: experts that the result lacks.
        headless: the result lacks the heads for further tokens.
        running: read it in the form of the running model.
        one_by_one: read experts one by one, in whatever way its files hold them.
        derive: as that of `match_quantized`: without declarations nobody knows what absorbed a factor.
    """
    had = manifest.read(path)
    checkpoint = open_plain_source(path, None if stated_adapter(had).source else adapter)
    form = detect(checkpoint.config)
    stored = _headers(checkpoint)
    layouts = {item.module: item for item in form.layouts(checkpoint.config, stored)}
    matched = match_quantized(checkpoint, layouts, stored, derive=derive)
    plain = decoded(checkpoint) if layouts else checkpoint
    if running and (view := running_form(plain)) is not plain:
        plain, matched = view, match_quantized(view, {}, _headers(view), derive=derive)
    if one_by_one and (view := one_by_one_of(plain)) is not plain:
        plain, matched = view, match_quantized(view, {}, _headers(view))
    if headless and not lacks_heads(had):
        plain = fewer_heads(plain)
        matched = match_quantized(plain, {}, _headers(plain), derive=derive)
    if removed is not None and stated_removal(had) is None:
        plain = fewer_experts(plain, removed)
        matched = match_quantized(plain, {}, _headers(plain))
    if not transforms or whole_transforms(had):
        return Original(plain, matched)
    changed = prepared(plain, transforms)
    return Original(changed, match_quantized(changed, {}, _headers(changed), derive=derive))


def open_artifact(report: Report, *, derive: bool = False) -> Artifact | None:
    """Open the artifact of a report; whatever is in the way becomes a finding, and the rest is skipped.

    ``derive``: as that of `open_source`; without, that is done where experts are stored one by one.
    """
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
        derive = derive or has_single_experts(stored)
        matched = match_quantized(checkpoint, layouts, stored, derive=derive)
    except InputError as error:
        _stop(report, "incomplete", error)
        return None
    running = runs_as_stored(manifest.read(path))
    return Artifact(checkpoint, form, layouts, matched, running)


def _headers(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    return {name: entry.stored() for name, entry in checkpoint.entries.items()}


def _stop(report: Report, check: str, error: InputError) -> None:
    report.add(check, error.tensor or error.file or report.path.name, error.message)
    rest = {*STRUCTURE, *NUMBERS, *COMPARED, "logits"} - {check}
    report.skip("the artifact cannot be read that far", *sorted(rest))
