"""The files of a release against its manifest: missing, changed, added.

``README.md`` may change: figures of an evaluation are written into it later. A signature may be added; it is checked
when a key is named.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.publish_file import set_of, side_of
from quantforge.checkpoint.result_place import OF_DIRECTORY
from quantforge.errors import InputError, IntegrityError
from quantforge.results import manifest
from quantforge.results.handed import away, put_back
from quantforge.results.signing import check_signature, signature_of
from quantforge.verification.findings import Report


def check_release(report: Report) -> dict[str, Any] | None:
    """Compare every file with the manifest, if there is one; return it."""
    path = report.path
    place = side_of(path) if path.is_file() else path / manifest.NAME
    if not place.exists():
        if path.is_dir() and path.name == "stage" and path.parent.name.endswith(".qf"):
            report.add("manifest", path.name, "a run that has not ended; repeat its command")
        report.skip("there is no manifest", "manifest")
        return None
    document = manifest.read(path)
    stated = document.get("outputs") if document else None
    if document is None or not isinstance(stated, Mapping):
        report.add("manifest", place.name, f"is no manifest of the kind {manifest.SCHEMA}")
        return None
    _compare(report, stated, path.parent if path.is_file() else path)
    if gone := away(path, document):
        report.notes.append(put_back(gone, path))
    if called := document.get(manifest.CALLED):
        report.notes.append(
            f"the manifest calls {side_of(path, '').name} by another name: {called}"
        )
    for name in sorted(_present(path) - set(stated)):
        report.add("manifest", name, "is not listed in the manifest")
    return document


def check_signed(report: Report, key: Path | None) -> None:
    """Check the signature with a public key; skip that without one.

    Raises:
        UsageError, InputError: as `check_signature`; an IntegrityError becomes a finding.
    """
    place = signature_of(report.path)
    if key is None:
        there = "" if place.exists() else ", and there is no signature"
        report.skip(f"no key was named (--key){there}", "signature")
        return
    try:
        report.unsigned = check_signature(report.path, key)
    except IntegrityError as error:
        report.add("signature", place.name, error.message)


def _present(path: Path) -> set[str]:
    """Return the names of the files of a release that a manifest lists: of a file, that and the parts of its set."""
    if path.is_dir():
        there = {str(item.relative_to(path)) for item in FILES.below(path)}
        return there - manifest.MUTABLE - {OF_DIRECTORY, manifest.NAME}
    return {path.name, *(one.name for one in set_of(path) if one.exists())}


def _compare(report: Report, stated: Mapping[str, Any], root: Path) -> None:
    for name, entry in sorted(stated.items()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            report.add("manifest", name, "is no name of a file inside of the release")
            continue
        file = root / name
        if not os.path.isfile(file):  # noqa: PTH113 - Path's raises if no file can be called so
            report.add("manifest", name, "is listed in the manifest and missing")
        elif name not in manifest.MUTABLE:
            whole = entry if isinstance(entry, Mapping) else {}
            # Of another size, it needs no digest: it may be a terabyte of nothing.
            other = whole.get("bytes") != file.stat().st_size
            if other or _digest(file, root) != whole.get("sha256"):
                report.add("manifest", name, "its SHA-256 is not that of the manifest")


def _digest(file: Path, root: Path) -> str:
    """Return the digest of a file inside of the release; empty if it may not be read as part of it."""
    try:
        return manifest.sha256(file, root)
    except InputError:
        return ""
