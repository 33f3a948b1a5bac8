"""Open an artifact and the source it was made from, so that they can be compared tensor by tensor.

Only headers are read here. An artifact is a checkpoint in some format: its layouts say which stored tensors form a
quantized weight, and its tensors are matched with the names that the model's family uses.

The source may have been changed as a whole before it was quantized: scales or rotations folded in, experts or draft
heads removed, an adapter merged. The manifest of the result declares that, or an earlier manifest that it includes
(``lineage``), if the result was made from another result. `open_source` applies the same changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from quantforge.architectures.draft_heads import model_type_or_draft
from quantforge.architectures.expert_sets import has_single_experts
from quantforge.architectures.match import MatchedTensor, ModelLayout
from quantforge.artifacts import manifest
from quantforge.errors import InputError, IntegrityError, NotReadError, UsageError
from quantforge.files import without_experts
from quantforge.files.computed_tensors import LAYOUT
from quantforge.files.reader import CONFIG_FILE, Checkpoint
from quantforge.formats import Format, ModuleLayout, detect_format
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.gguf import KEY
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.formats.match_quantized import match_quantized
from quantforge.formats.open_model import open_model, open_plain_source
from quantforge.formats.sources.adapter import open_adapter
from quantforge.model.transformers_layout import running_layout
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.local_paths import adapter_hint, check_adapter_given
from quantforge.planning.source_views import one_by_one as split_experts
from quantforge.plans import StoredTensor
from quantforge.quantizers import METHODS, MethodKind, apply_source_transforms, source_transforms
from quantforge.verification.findings import CHECKS, FILE_CHECKS, Report

# Name suffixes of codes or scales in supported formats.
_CODE_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale_inv", ".SCB", ".weight.absmax")


@dataclass(frozen=True, slots=True)
class DeclaredChanges:
    """Changes of the whole source that a manifest declares.

    Attributes:
        transforms: names of the transforms that were applied, in order.
        removed_experts: experts that were removed, by layer; None if all were kept.
        drops_draft_heads: whether draft heads were dropped.
        uses_running_layout: whether tensors are stored in the shapes that transformers' modules use.
    """

    transforms: tuple[str, ...] = ()
    removed_experts: without_experts.RemovedExperts | None = None
    drops_draft_heads: bool = False
    uses_running_layout: bool = False

    @classmethod
    def from_manifest(cls, document: Mapping[str, Any] | None) -> Self:
        """Return what a manifest declares, including the manifests of its lineage.

        Raises:
            InputError: the list of removed experts is malformed.
        """
        documents = [*manifest.iterate_lineage(document)]
        facts: dict[str, Any] = {}
        transforms: list[str] = []
        for item in reversed(documents):  # from the first result to the last
            facts |= item.get("source") or {}
            transforms += source_transforms(item.get("method") or "")
        experts = facts.get(without_experts.REMOVED_EXPERTS)
        return cls(
            tuple(transforms),
            None if experts is None else without_experts.parse_removed(str(experts)),
            without_experts.DROPPED_HEADS in facts,
            LAYOUT in facts,
        )


NO_CHANGES = DeclaredChanges()


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact.

    Attributes:
        checkpoint: the tensors as stored.
        format: module of the format.
        layouts: layouts of the quantized weights, by module name as stored.
        model_layout: the tensors by the names of the family, with quantized weights as if they were not quantized.
        uses_running_layout: whether, by its manifest, tensors are stored in the shapes that transformers' modules use.
    """

    checkpoint: Checkpoint
    format: Format
    layouts: Mapping[str, ModuleLayout]
    model_layout: ModelLayout
    uses_running_layout: bool = False

    def layout(self, tensor: MatchedTensor) -> ModuleLayout | None:
        """Return the layout of a quantized weight, or None for a tensor that is not quantized."""
        return self.layouts.get(tensor.header.name.removesuffix(".weight"))

    def unpack(self, layout: ModuleLayout) -> QuantizedTensor:
        """Read a quantized weight; errors as the format's ``unpack``."""
        stored = {name: self.checkpoint.read(name) for name in layout.tensor_names}
        return self.format.unpack(layout, stored)


@dataclass(frozen=True, slots=True)
class SourceModel:
    """The model that an artifact is compared with; if it is quantized, it is decoded when it is read."""

    checkpoint: Checkpoint
    model_layout: ModelLayout

    def weight(self, name: str) -> Tensor | None:
        """Return a float32 weight by its name in the family, linears as ``[out, in]``; None if it is missing."""
        family = self.model_layout.architecture
        head, embedding = (
            (family.head, family.embedding) if family else ("lm_head", "model.embed_tokens")
        )
        tensor = self.model_layout.by_name.get(name)
        if tensor is None and self.model_layout.tied and name == f"{head}.weight":
            tensor = self.model_layout.by_name.get(f"{embedding}.weight")
        if tensor is None:
            return None
        value = self.checkpoint.read(tensor.header.name).float()
        return value.T.contiguous() if tensor.transposed else value


def open_artifact(report: Report, *, derive: bool = False) -> Artifact | None:
    """Open the artifact of a report.

    If it cannot be opened, record a finding with the reason, skip the remaining checks, and return None.

    Args:
        report: the report, which names the artifact and receives its format and family.
        derive: see `open_source`; always true for experts that are stored one by one.
    """
    path, checkpoint = report.path, None
    try:
        checkpoint = open_model(path)
        report.notes += [checkpoint.declaration_note] if checkpoint.declaration_note else []
        report.model_type = model_type_or_draft(checkpoint.config)
        file_format = detect_format(checkpoint.config)
        report.format = file_format.KEY
        stored, layouts = _headers(checkpoint)
    except NotReadError as error:
        _skip_unsupported(report, error, checkpoint)
        return None
    except InputError as error:
        _report_unopenable(report, error.fault, error)
        return None
    try:
        derive = derive or has_single_experts(stored)
        model_layout = match_quantized(checkpoint, layouts, stored, derive=derive)
    except InputError as error:
        _report_unopenable(report, "incomplete", error)
        return None
    uses_running_layout = DeclaredChanges.from_manifest(
        manifest.read_manifest(path)
    ).uses_running_layout
    return Artifact(checkpoint, file_format, layouts, model_layout, uses_running_layout)


def open_source(
    path: Path,
    declared: DeclaredChanges = NO_CHANGES,
    adapter: Path | None = None,
    *,
    one_by_one: bool = False,
    derive: bool = False,
) -> SourceModel:
    """Open a source, and change it as the result's manifest declares.

    A source that is itself a result already contains the changes that its own manifest declares; these are not
    repeated.

    Args:
        path: the source.
        declared: changes that the result's manifest declares.
        adapter: directory of the adapter to merge.
        one_by_one: whether to present stacked experts one by one.
        derive: whether to derive declarations of an undeclared family by running its modules.

    Raises:
        InputError: as `open_model` and `match_quantized`.
    """
    document = manifest.read_manifest(path)
    source_changes, merged_adapter = (
        DeclaredChanges.from_manifest(document),
        manifest.recorded_adapter(document),
    )
    checkpoint = open_plain_source(
        path, None if merged_adapter and merged_adapter.source else adapter
    )
    stored, layouts = _headers(checkpoint)
    model_layout = match_quantized(checkpoint, layouts, stored, derive=derive)
    decoded = decode_checkpoint(checkpoint) if layouts else checkpoint
    view = running_layout(decoded) if declared.uses_running_layout else decoded
    if one_by_one:
        view = split_experts(view)
    if declared.drops_draft_heads and not source_changes.drops_draft_heads:
        view = without_experts.remove_draft_heads(view)
    if declared.removed_experts is not None and source_changes.removed_experts is None:
        view = without_experts.remove_experts(view, declared.removed_experts)
    if declared.transforms and not source_changes.transforms:
        view = apply_source_transforms(view, declared.transforms)
    if view is not decoded:
        model_layout = match_quantized(view, {}, _entries(view), derive=derive)
    return SourceModel(view, model_layout)


def folds_scales(document: Mapping[str, Any] | None) -> bool:
    """Return whether a method in a manifest or its lineage folds scales into weights (AWQ, SmoothQuant)."""
    methods = [
        method
        for item in manifest.iterate_lineage(document)
        for method in (item.get("method") or "").split("+")
    ]
    return any(
        method in METHODS and METHODS[method].kind is MethodKind.TRANSFORM for method in methods
    )


def check_adapter(
    document: Mapping[str, Any] | None, source: Path | None, adapter: Path | None
) -> None:
    """Check that ``--adapter`` names the adapter that the manifest declares; without a recipe, any may be named.

    Raises:
        UsageError: an adapter is given without a source to merge it into.
        InputError: the manifest declares an adapter and none is given.
        IntegrityError: it is another adapter, or the manifest declares none.
    """
    if source is None:
        if adapter is not None:
            text = f"--adapter {adapter}: is merged into a source, and none is named"
            raise UsageError(text, "name the source too: --source MODEL")
        return
    declared = manifest.recorded_adapter(document)
    if declared is None:
        return
    check_adapter_given(declared, adapter)
    if adapter is not None and not declared.source:
        text = f"--adapter {adapter}: by its manifest, the result was made without an adapter"
        raise IntegrityError(text, "leave --adapter out")
    if declared.sha256 and adapter is not None and open_adapter(adapter).digests != declared.sha256:
        text = f"--adapter {adapter}: not the adapter that the result was made with"
        raise IntegrityError(text, adapter_hint(declared))


def _entries(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    return checkpoint.stored_tensors()


def _headers(checkpoint: Checkpoint) -> tuple[dict[str, StoredTensor], dict[str, ModuleLayout]]:
    """Return the headers of the stored tensors, and the layouts of the quantized weights by module."""
    stored = _entries(checkpoint)
    layouts = detect_format(checkpoint.config).find_layouts(checkpoint.config, stored)
    return stored, {layout.module: layout for layout in layouts}


def _skip_unsupported(report: Report, error: NotReadError, checkpoint: Checkpoint | None) -> None:
    """Record that this kind of artifact is not supported, so that only its headers were checked.

    ``checkpoint`` is the checkpoint of a directory; None for a GGUF file.
    """
    report.unsupported = error.detail_about(report.path)
    if checkpoint is not None:
        tensors, files = len(checkpoint.entries), len(checkpoint.shards)
        report.notes.append(
            f"its headers are sound: {tensors} tensors fill {files} file(s) exactly"
        )
        if known_layout := next(
            (name for name in checkpoint.entries if name.endswith(_CODE_SUFFIXES)), None
        ):
            text = f"{report.unsupported}; but {known_layout} is of a layout that is read: is the name right?"
            report.warn("unreadable", CONFIG_FILE, text)
    elif report.path.is_file():
        file = read_gguf(report.path)
        report.format, report.model_type = KEY, file.value("general.architecture", str)
        report.notes.append(
            f"its header is sound: {len(file.tensors)} tensors fill the file exactly"
        )
    report.skip(report.unsupported, *(check for check in CHECKS if check not in FILE_CHECKS))


def _report_unopenable(report: Report, check: str, error: InputError) -> None:
    """Report why the artifact cannot be opened, and skip all checks that need it."""
    file = Path(error.file or report.path.name)
    relative = file.relative_to(report.path) if report.path in file.parents else file
    where = CONFIG_FILE if error.subject == CONFIG_FILE else str(relative)
    report.add(check, error.tensor or where, error.detail_about(report.path))
    made_checks = {*FILE_CHECKS, "unreadable", check}
    report.skip(
        "the artifact could not be opened", *(name for name in CHECKS if name not in made_checks)
    )
