"""The source that is named against the one that manifests record: by the digests of its files of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge.checkpoint.reader import Checkpoint
from quantforge.execution.progress import tell
from quantforge.formats.opening import open_model
from quantforge.results import manifest
from quantforge.verification.artifact import Artifact
from quantforge.verification.findings import CHECKS, Report
from quantforge.verification.stated_changes import chain

_CHECK = "source"
_SHOWN = 12  # letters of a digest


def check_source(
    report: Report, artifact: Artifact, document: Mapping[str, Any] | None, source: Path
) -> bool:
    """Report a source that no manifest of the artifact's chain records.

    Names do not matter, nor do files beside the weights: a model may have been moved, its card rewritten.

    Args:
        report: of the artifact.
        artifact: as opened.
        document: its manifest, None without one.
        source: the source that is named.

    Returns:
        whether to compare with it: not where the source was made from the artifact.

    Raises:
        InputError: a file of the source cannot be read.
    """
    recorded = [item for item in map(_recorded, chain(document)) if item[1]]
    given = open_model(source)
    tell("the source's digests")
    if any(
        _made_of(artifact.checkpoint.opened, files)
        for _, files in map(_recorded, chain(manifest.read(source)))
    ):
        text = f"{source.name} was made from {report.path.name}: swapped?"
        report.add(_CHECK, report.path.name, f"{text} quantforge verify RESULT --source MODEL")
        done = {"manifest", "signature", _CHECK}
        report.skip("result and source are swapped", *(item for item in CHECKS if item not in done))
        return False
    if recorded and not any(_made_of(given, files) for _, files in recorded):
        made = " or ".join(f"{name} ({_told(files)})" for name, files in recorded)
        text = f"by its manifest it was made from {made}; the weights of {source.name} are others"
        report.add(_CHECK, report.path.name, text)
    if not recorded:
        report.skip("no manifest records the digests of a source", _CHECK)
    return True


def _recorded(document: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """Return the name of a source as a manifest states it, and the size of each file by its digest."""
    source = document.get("source")
    stated = source if isinstance(source, Mapping) else {}
    files = stated.get("files")
    entries = files.values() if isinstance(files, Mapping) else ()
    found = {
        entry["sha256"]: entry["bytes"]
        for entry in entries
        if isinstance(entry, Mapping)
        and isinstance(entry.get("sha256"), str)
        and isinstance(entry.get("bytes"), int)
    }
    return str(stated.get("model", "a source without a name")), found


def _made_of(model: Checkpoint, files: Mapping[str, int]) -> bool:
    """Return whether all files of weights of a model are among those with these sizes and digests."""
    root = model.path.parent if model.path.is_file() else model.path
    sizes = set(files.values())
    # A file of another size needs no digest.
    return all(path.stat().st_size in sizes for path in model.shards) and all(
        manifest.sha256(path, root) in files for path in model.shards
    )


def _told(files: Mapping[str, int]) -> str:
    digest = max(files, key=lambda one: (files[one], one))
    return f"SHA-256 {digest[:_SHOWN]}..."
