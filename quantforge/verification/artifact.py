"""An artifact understood from its headers: the format's layers, and every tensor with its place in the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quantforge.architectures.draft_kinds import type_of
from quantforge.architectures.expert_sets import has_single_experts
from quantforge.architectures.match import Matched, MatchedTensor
from quantforge.checkpoint.fewer_experts import fewer_experts
from quantforge.checkpoint.fewer_heads import fewer_heads
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.unstacked import UnstackedCheckpoint
from quantforge.errors import InputError, NotReadError
from quantforge.formats import Format, ModuleLayout, detect
from quantforge.formats.decoded import decoded
from quantforge.formats.gguf import KEY
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.formats.matching import match_quantized
from quantforge.formats.opening import open_model, open_plain_source
from quantforge.model.running_form import running_form
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.single_experts import one_by_one as one_by_one_of
from quantforge.plans import StoredTensor
from quantforge.quantizers import prepared
from quantforge.results import manifest
from quantforge.runtime.load import Loaded, load
from quantforge.verification.findings import Report
from quantforge.verification.stated_changes import StatedChanges, stated_adapter

NUMBERS = ("not-finite", "scale", "zero-convention")
COMPARED = (
    "source", "configuration", "keys", "side-files", "kept-changed", "fold", "noise", "groups",
    "swapped",
)  # fmt: skip
STRUCTURE = (
    "incomplete", "nothing-quantized", "ignore-list", "siblings", "vocabulary", "engine", "foreign",
    "settings",
)  # fmt: skip

AS_IT_IS = StatedChanges()


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact.

    Attributes:
        layouts: the quantized linears, by module name as stored.
        running: its tensors are shaped as transformers' modules hold them when they run, by its manifest.
    """

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


def open_source(
    path: Path,
    stated: StatedChanges = AS_IT_IS,
    adapter: Path | None = None,
    *,
    one_by_one: bool = False,
    derive: bool = False,
) -> Original:
    """Open a source; errors as `open_model` and `match`.

    It is changed as the result's manifest states, unless it is itself a result that has had that.

    Args:
        path: the source.
        stated: by the result's manifest.
        adapter: directory of what is merged into it.
        one_by_one: read experts one by one, in whatever way its files hold them.
        derive: derive the declarations of a family that has none (`match_quantized`); factors are found by them.
    """
    document = manifest.read(path)
    had = StatedChanges.of(document)
    merged = stated_adapter(document)
    had_adapter = merged is not None and bool(merged.source)
    checkpoint = open_plain_source(path, None if had_adapter else adapter)
    form = detect(checkpoint.config)
    stored = _headers(checkpoint)
    layouts = {item.module: item for item in form.layouts(checkpoint.config, stored)}
    matched = match_quantized(checkpoint, layouts, stored, derive=derive)
    plain = decoded(checkpoint) if layouts else checkpoint
    if stated.running and (view := running_form(plain)) is not plain:
        plain, matched = view, match_quantized(view, {}, _headers(view), derive=derive)
    if one_by_one and (view := one_by_one_of(plain)) is not plain:
        plain, matched = view, match_quantized(view, {}, _headers(view))
    if stated.headless and not had.headless:
        plain = fewer_heads(plain)
        matched = match_quantized(plain, {}, _headers(plain), derive=derive)
    if stated.removed is not None and had.removed is None:
        plain = fewer_experts(plain, stated.removed)
        matched = match_quantized(plain, {}, _headers(plain))
    if not stated.transforms or had.transforms:
        return Original(plain, matched)
    changed = prepared(plain, stated.transforms)
    return Original(changed, match_quantized(changed, {}, _headers(changed), derive=derive))


def open_artifact(report: Report, *, derive: bool = False) -> Artifact | None:
    """Open the artifact of a report; whatever is in the way becomes a finding, and the rest is skipped.

    ``derive``: as that of `open_source`; where experts are stored one by one it is always done.
    """
    path, checkpoint = report.path, None
    try:
        checkpoint = open_model(path)
        report.notes += [checkpoint.quantization] if checkpoint.quantization else []
        report.model_type = type_of(checkpoint.config)
        form = detect(checkpoint.config)
        report.format = form.KEY
        stored = _headers(checkpoint)
        layouts = {item.module: item for item in form.layouts(checkpoint.config, stored)}
    except NotReadError as error:
        _leave(report, error, checkpoint)
        return None
    except InputError as error:
        _stop(report, error.fault, error)
        return None
    try:
        derive = derive or has_single_experts(stored)
        matched = match_quantized(checkpoint, layouts, stored, derive=derive)
    except InputError as error:
        _stop(report, "incomplete", error)
        return None
    running = StatedChanges.of(manifest.read(path)).running
    return Artifact(checkpoint, form, layouts, matched, running)


def _headers(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    return {name: entry.stored() for name, entry in checkpoint.entries.items()}


def _leave(report: Report, error: NotReadError, opened: Checkpoint | None) -> None:
    """Say that what is of a kind that is not read cannot be judged; its headers were (``opened``: of a directory)."""
    report.unjudged = error.message.removeprefix(f"{report.path}: ")
    if opened is not None:
        held, files = len(opened.entries), len(opened.shards)
        report.notes.append(
            f"its headers are sound: {held} tensors, which fill {files} file(s) to the end"
        )
    elif report.path.is_file():
        file = read_gguf(report.path)
        report.format, report.model_type = KEY, file.value("general.architecture", str)
        report.notes.append(
            f"its header is sound: {len(file.tensors)} tensors, which fill the file to its end"
        )
    rest = {"unreadable", *STRUCTURE, *NUMBERS, *COMPARED, "logits"}
    report.skip(report.unjudged, *sorted(rest))


def _stop(report: Report, check: str, error: InputError) -> None:
    file, said = Path(error.file or report.path.name), error.message
    named = file.relative_to(report.path) if report.path in file.parents else file
    report.add(check, error.tensor or str(named), said.removeprefix(f"{report.path}: "))
    rest = {*STRUCTURE, *NUMBERS, *COMPARED, "logits"} - {check}
    report.skip("the artifact cannot be read that far", *sorted(rest))
