"""Verify an artifact: files, structure, tensors and logits, in this order, as far as it can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantforge.architectures.match import ModelLayout
from quantforge.artifacts import manifest
from quantforge.errors import InputError
from quantforge.formats.configuration import quantization_config
from quantforge.formats.match_quantized import match_quantized
from quantforge.planning.notes import CHANGE_FACTS
from quantforge.progress import phase, report_step
from quantforge.quantizers import RTN, is_sparse
from quantforge.verification.consistency import check_consistency
from quantforge.verification.files import (
    SourceMatch,
    check_manifest,
    check_source,
    verify_signature,
)
from quantforge.verification.findings import COMPARED, WITHOUT_SOURCE, Report, Severity
from quantforge.verification.gguf_keys import check_gguf_keys, check_tower_file
from quantforge.verification.opening import (
    Artifact,
    DeclaredChanges,
    SourceModel,
    check_adapter,
    folds_scales,
    open_artifact,
    open_source,
)
from quantforge.verification.side_files import check_extra_files, check_side_files
from quantforge.verification.structure import check_structure
from quantforge.verification.tensors import TensorChecks

# Checks whose errors prevent the forward pass.
_FORWARD_BLOCKERS = {"unreadable", "incomplete", "ignore-list"}


@torch.no_grad()
def verify(
    path: Path,
    source: Path | None = None,
    *,
    engine: str | None = None,
    forward: bool = True,
    device: str = "cpu",
    key: Path | None = None,
    adapter: Path | None = None,
) -> Report:
    """Verify an artifact of any readable format; defects are recorded in the report.

    Args:
        path: the artifact.
        source: the model that it was made from.
        engine: the inference engine that must load it, as named by ``quantforge formats``.
        forward: whether to run the model once.
        device: where it runs.
        key: the public key of the signer.
        adapter: the adapter that was merged into the source.

    Raises:
        InputError: nothing exists at ``path``, the source or the key cannot be read, or an adapter is missing.
        IntegrityError: the adapter is not the one that the manifest records, or it records none.
        UsageError: an adapter without a source, an unknown engine, or no library for signatures.
    """
    if not path.exists():
        raise InputError(
            "no such file or directory", "check the path", file=str(path), subject=str(path)
        )
    report = Report(path, source)
    report_step("files and digests")
    document = check_manifest(report)
    declared = DeclaredChanges.from_manifest(document)
    check_adapter(document, source, adapter)
    verify_signature(report, key)
    # Without a manifest, factors may have been folded: they are searched for.
    folded = not document or folds_scales(document)
    derive = source is not None and folded
    artifact = open_artifact(report, derive=derive or forward)
    if artifact is None:
        if source:  # the source, and the vision tower of a GGUF file, are checked even then
            check_tower_file(report, open_source(source, declared, adapter, derive=derive))
        return report
    original = None
    if source:
        match = check_source(report, artifact, document, source)
        if match is SourceMatch.SWAPPED:
            return report
        if match is SourceMatch.COMPARABLE:
            artifact, original = _open_matching_source(artifact, source, declared, adapter)
    else:
        report.skip("no source was named (--source)", *COMPARED)
    check_structure(report, artifact, engine, original)
    check_extra_files(report, artifact, original)
    check_consistency(report, artifact)
    if original is None:
        report.partial.update(WITHOUT_SOURCE)
    else:
        check_side_files(report, artifact, original)
        check_gguf_keys(report, artifact, original)
    blocking = {
        f.check for f in report.findings if f.severity is Severity.ERROR
    } & _FORWARD_BLOCKERS
    if not forward:
        report.skip("not asked for (--no-forward)", "logits")
    elif blocking:
        report.skip(f"not run after these errors: {', '.join(sorted(blocking))}", "logits")
    tuned = any(recipe.tune for recipe in manifest.recipes_in_lineage(document))
    method = str((document or {}).get("method") or "")
    checks = TensorChecks(
        report,
        artifact,
        original,
        device=device,
        forward=forward and not blocking,
        rounded_to_nearest=adapter is None and _is_rounded_to_nearest(document),
        sparsifier=method if is_sparse(method) else "",
        may_be_folded=folded,
        tuned=tuned,
    )
    with phase("tensors and logits", 1.0):
        checks.run()
    if not tuned and not folds_scales(document):
        report.unrecorded_factors = sorted({*checks.scaled_modules})
    if checks.sparse_tensors:
        report.notes.append(
            f"{len(checks.sparse_tensors)} tensors were made sparse, for example {checks.sparse_tensors[0]}"
        )
    elif original is not None:
        _check_if_copy(report, artifact, original)
    return report


def _open_matching_source(
    artifact: Artifact, source: Path, declared: DeclaredChanges, adapter: Path | None
) -> tuple[Artifact, SourceModel]:
    """Open the source so that both models are matched with derived declarations, or neither; errors as `open_source`.

    Derived declarations use the names of the running model, which in many families differ from those in files.
    """
    has_single_experts = any(tensor.expert >= 0 for tensor in artifact.model_layout.tensors)
    derive = _is_derived(artifact.model_layout)
    original = open_source(source, declared, adapter, one_by_one=has_single_experts, derive=derive)
    if derive and original.model_layout.architecture is None:
        checkpoint = artifact.checkpoint
        model_layout = match_quantized(checkpoint, artifact.layouts, checkpoint.stored_tensors())
        artifact = replace(artifact, model_layout=model_layout)
    return artifact, original


def _is_derived(model_layout: ModelLayout) -> bool:
    return (
        model_layout.architecture is not None and model_layout.architecture.derivation is not None
    )


def _is_rounded_to_nearest(document: Mapping[str, Any] | None) -> bool:
    """Return whether a manifest records that every tensor was rounded to nearest with absmax scales."""
    if (
        document is None
        or document.get("method") != RTN
        or len([*manifest.iterate_lineage(document)]) > 1
    ):
        return False
    return all(
        recipe.scales == "absmax" and not recipe.tune
        for recipe in manifest.recipes_in_lineage(document)
    )


def _check_if_copy(report: Report, artifact: Artifact, source: SourceModel) -> None:
    """Report a directory of unquantized weights that all equal the source's: it is a copy, not a result."""
    if (
        artifact.layouts
        or quantization_config(source.checkpoint.original.config)  # a quantized source, decoded
        or not report.path.is_dir()
        or not source.checkpoint.source_notes.keys().isdisjoint(CHANGE_FACTS)
    ):
        return  # it is quantized, a file, or the whole source was changed
    entries, source_entries = artifact.checkpoint.entries, source.checkpoint.entries
    is_changed = any(
        name not in source_entries or source_entries[name].dtype != entry.dtype
        for name, entry in entries.items()
    )
    if not is_changed and not any(item.check == "unquantized-changed" for item in report.findings):
        report.warn("nothing-quantized", report.path.name, "every tensor equals the source's")
