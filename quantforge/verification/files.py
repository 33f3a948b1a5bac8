"""Check files as a whole: digests against the manifest, the signature, and the recorded source.

``README.md`` may differ from the manifest, because evaluations add figures to it later.

A manifest records digests of files, not of tensors. If the same tensors are split into other files, digests cannot tell
whether the source is the recorded one; that is a warning, and the tensors are compared anyway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from quantforge.artifacts import manifest
from quantforge.artifacts.signing import check_signature, signature_path
from quantforge.errors import InputError, IntegrityError
from quantforge.files.hub import source_name
from quantforge.files.opener import FILES
from quantforge.files.output_names import part_paths, side_path
from quantforge.files.previous_output import DIRECTORY_SIGNATURE, SCHEMA
from quantforge.files.reader import Checkpoint
from quantforge.formats.open_model import open_model
from quantforge.progress import report_step
from quantforge.verification.findings import CHECKS, COMPARED, FILE_CHECKS, Report
from quantforge.verification.opening import Artifact

_WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_DIGEST_DIGITS = 12  # digits of a digest in messages
# Largest ratio of header bytes between two ways to split the same tensors into files.
_MAX_HEADER_RATIO = 4


def check_manifest(report: Report) -> dict[str, Any] | None:
    """Compare every file with the manifest; return the manifest, None if there is no readable one."""
    path = report.path
    manifest_file = manifest.manifest_path(path)
    if not manifest_file.exists():
        if path.is_dir() and path.name == "stage" and path.parent.name.endswith(".qf"):
            text = "an unfinished run: repeat its command to finish it"
            report.add("manifest", path.name, text)
        report.skip("there is no manifest", "manifest")
        return None
    document = manifest.read_manifest(path)
    if document is None:
        report.add(
            "manifest",
            manifest_file.name,
            manifest.other_schema(path) or f"is not a valid {SCHEMA} document",
        )
        return None
    outputs = document["outputs"]
    _compare_with_manifest(report, outputs, path.parent if path.is_file() else path)
    for name in sorted(_files_to_list(path) - outputs.keys()):
        report.add("manifest", name, "is not listed in the manifest")
    if name := document.get(manifest.RECORDED_NAME):
        report.notes.append(
            f"the manifest calls {side_path(path, '').name} by another name: {name}"
        )
    return document


def verify_signature(report: Report, key: Path | None) -> None:
    """Verify the signature with a public key; skip the check if there is no key.

    Raises:
        UsageError, InputError: as `check_signature`.
    """
    signature_file = signature_path(report.path)
    if key is None:
        missing_text = "" if signature_file.exists() else ", and there is no signature"
        report.skip(f"no key was named (--key){missing_text}", "signature")
        return
    try:
        report.unsigned = check_signature(report.path, key)
    except IntegrityError as error:
        report.add("signature", signature_file.name, error.message)


def _files_to_list(path: Path) -> set[str]:
    """Return the names of the files that a manifest has to list."""
    if path.is_file():
        return {
            path.name,
            *(part_path.name for part_path in part_paths(path) if part_path.exists()),
        }
    names = {str(file.relative_to(path)) for file in FILES.list_files_below(path)}
    return names - manifest.MUTABLE - {DIRECTORY_SIGNATURE, manifest.NAME}


def _compare_with_manifest(
    report: Report, outputs: Mapping[str, Mapping[str, Any]], root: Path
) -> None:
    for name, entry in sorted(outputs.items()):
        file = root / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            report.add("manifest", name, "the manifest lists it, outside of the result")
        elif not os.path.isfile(file):  # noqa: PTH113 - Path's raises if no file can be called so
            report.add("manifest", name, "is listed in the manifest and missing")
        elif name not in manifest.MUTABLE and not _matches_entry(file, entry, root):
            report.add("manifest", name, "its SHA-256 is not that of the manifest")


def _matches_entry(file: Path, entry: Mapping[str, Any], root: Path) -> bool:
    """Return whether a file has the size and digest of its manifest entry; False outside of ``root``."""
    if entry["bytes"] != file.stat().st_size:  # no need to read what may be a terabyte of zeros
        return False
    try:
        return bool(manifest.sha256(file, root) == entry["sha256"])
    except InputError:
        return False


class SourceMatch(Enum):
    """How the model given as the source relates to the artifact."""

    COMPARABLE = "the recorded source, or one that no digest rules out"
    OTHER = "another model"
    SWAPPED = "a result that was made from the artifact"


@dataclass(frozen=True, slots=True)
class _RecordedSource:
    """A source in a manifest: its name, file sizes by SHA-256, and sorted sizes of its weight files."""

    name: str
    files: Mapping[str, int]
    weights: Sequence[int]

    def __str__(self) -> str:
        largest = max(self.files, key=lambda digest: (self.files[digest], digest))
        return f"{self.name} (SHA-256 {largest[:_DIGEST_DIGITS]}...)"


def check_source(
    report: Report, artifact: Artifact, document: Mapping[str, Any] | None, source: Path
) -> SourceMatch:
    """Check that the source is one that the manifest, or a manifest of its lineage, records.

    Only weight files count: a model may have been renamed, or its card rewritten.

    Args:
        report: gets the findings.
        artifact: the opened artifact.
        document: its manifest; None without one.
        source: the model named with ``--source``.

    Raises:
        InputError: a file of the source cannot be read.
    """
    recorded = _recorded_sources(document)
    source_checkpoint, source_label, artifact_name = (
        open_model(source),
        source_name(source)[0],
        report.path.name,
    )
    report_step("the source's digests")
    if _is_one_of(artifact.checkpoint.original, _recorded_sources(manifest.read_manifest(source))):
        report.add(
            "source",
            artifact_name,
            f"{source_label} was made from {artifact_name}: are the two swapped?"
            " Usage: quantforge verify RESULT --source MODEL",
        )
        made_checks = {*FILE_CHECKS, "source"}
        report.skip(
            "result and source are swapped", *(name for name in CHECKS if name not in made_checks)
        )
        return SourceMatch.SWAPPED
    if not recorded:
        report.skip("no manifest records the digests of a source", "source")
        return SourceMatch.COMPARABLE
    if _is_one_of(source_checkpoint, recorded):
        return SourceMatch.COMPARABLE
    origin = f"by its manifest, it was made from {' or '.join(map(str, recorded))}"
    if split_record := next(
        (name for name in recorded if _split_differently(source_checkpoint, name)), None
    ):
        report.warn(
            "source",
            artifact_name,
            f"{origin}; {source_label} has as many bytes of tensors in other files"
            f" ({len(source_checkpoint.shards)}, not"
            f" {len(split_record.weights)}): they may be the same tensors, which digests of files cannot tell",
        )
    elif [*manifest.iterate_lineage(document)][
        -1
    ] == {}:  # an export of a result that had no manifest
        report.skip(f"{origin}, and no manifest says what that was made from", "source")
    else:
        report.add(
            "source",
            artifact_name,
            f"{origin}; {source_label} has different weights, and nothing else was compared with them: name the"
            " model it was made from with --source",
        )
        report.skip("the model named with --source is not the recorded one", *COMPARED[1:])
        return SourceMatch.OTHER
    return SourceMatch.COMPARABLE


def _recorded_sources(document: Mapping[str, Any] | None) -> list[_RecordedSource]:
    """Return the sources whose digests a manifest and its lineage record."""
    sources = []
    for item in manifest.iterate_lineage(document):
        source = item.get("source", {})
        files = {name: entry for name, entry in source.get("files", {}).items() if len(entry) == 2}
        if files:
            weights = (
                entry["bytes"] for name, entry in files.items() if name.endswith(_WEIGHT_SUFFIXES)
            )
            sizes = {entry["sha256"]: entry["bytes"] for entry in files.values()}
            sources.append(
                _RecordedSource(
                    source.get("model", "a model without a name"), sizes, sorted(weights)
                )
            )
    return sources


def _is_one_of(model: Checkpoint, recorded: Sequence[_RecordedSource]) -> bool:
    """Return whether one of the recorded sources has all weight files of a model.

    Files are digested only if their sizes match.
    """
    sizes = {path.stat().st_size for path in model.shards}
    candidates = [record for record in recorded if sizes <= {*record.files.values()}]
    root = model.path.parent if model.path.is_file() else model.path
    digests = {manifest.sha256(path, root) for path in model.shards} if candidates else set()
    return any(digests <= record.files.keys() for record in candidates)


def _split_differently(model: Checkpoint, recorded: _RecordedSource) -> bool:
    """Return whether a model may contain the recorded tensors in other files: equal bytes except for headers."""
    sizes = sorted(path.stat().st_size for path in model.shards)
    tensors = sum(tensor.nbytes for tensor in model.tensor_infos())
    headers = sum(recorded.weights) - tensors
    return sizes != recorded.weights and 0 < headers <= _MAX_HEADER_RATIO * (sum(sizes) - tensors)
