"""Journal of a run: records the finished units, so that the same command resumes after an interruption.

Weights are written directly to the preallocated files of the stage. A unit of work (the tensors outside of the blocks,
or one block) is done when its bytes are on disk and its line is in the journal, in that order. Each line begins with a
digest of itself. A fingerprint of everything that determines a byte of the result (recipe, source, calibration tokens,
device, versions) prevents resuming a different run.

From top to bottom: records of finished units; the journal's directory and files; comparison of fingerprints, and which
journal a run opens.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.artifacts import manifest
from quantforge.errors import InputError, IntegrityError
from quantforge.events import Event
from quantforge.execution.units import unit_name_of
from quantforge.files.disk import (
    DISK,
    atomic_file,
    make_directory,
    open_existing,
    open_to_append,
    write_errors,
)
from quantforge.files.opener import FILES, parse_object, read_object
from quantforge.files.stage import Stage
from quantforge.plans import Plan
from quantforge.recipe import difference_line, recipe_differences
from quantforge_files import system
from quantforge_files.roles import JOURNAL as JOURNAL_ROLE

if TYPE_CHECKING:
    from quantforge.execution.calibration import CalibrationData

Record = dict[str, Any]  # keys: "events", "metrics", "checksums", "transform"
FINGERPRINT_FILE = "fingerprint.json"
SCHEMA = "quantforge.journal/2"
SCHEMA_OF_NONE = "quantforge.journal/1"  # of a fingerprint without the field
RECIPE_KEY = "recipe"  # key of the recipe's TOML in a fingerprint
JOURNAL_FILE = "journal.jsonl"
_DIGEST_DIGITS = 16  # hex digits at the beginning of a line
_SHA256 = re.compile("[0-9a-f]{64}")


def merge_records(record: Record, other: Record) -> None:
    """Merge the events and figures of ``other`` into ``record``, in place."""
    for key, value in other.items():
        if isinstance(value, list):
            record[key] = [*record.get(key, []), *value]
        else:
            record[key] = {**record.get(key, {}), **value}


def events_of(records: Iterable[Record]) -> list[Event]:
    """Return all events of the records, in order."""
    return [Event(**event) for record in records for event in record.get("events", [])]


def figures_of(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """Return the figures (such as errors) of each rounded tensor, by name."""
    metrics: dict[str, dict[str, float]] = {}
    for record in records:
        for name, values in record.get("metrics", {}).items():
            metrics[name] = {**metrics.get(name, {}), **values}
    return metrics


def count_scaled_activations(records: Iterable[Record]) -> tuple[int, int] | None:
    """Return how many activations got scale factors, and for how many factors were searched; None without a search."""
    is_scaled = [
        transform_record["family"] != "none"
        for record in records
        for transform_record in record.get("transform", {}).values()
        if "family" in transform_record
    ]
    return (sum(is_scaled), len(is_scaled)) if is_scaled else None


class Journal:
    """Journal directory next to an output. The caller holds the output's lock.

    Attributes:
        directory: path of the journal; hidden states on disk are stored here too.
        done: records of the finished units, by unit name.
        resumed: whether the journal already had finished units when it was opened.

    Raises:
        IntegrityError: the directory belongs to a different run (the message lists the differences), or is damaged.
        ResourceError: the disk is full.
    """

    def __init__(self, directory: Path, fingerprint: Mapping[str, str]) -> None:
        self.directory = directory
        self.done: dict[str, dict[str, Any]] = {}
        path = directory / FINGERPRINT_FILE
        if path.exists() and written(directory):
            check_fingerprint(path, fingerprint)
            self.done = self._read()
        else:
            with write_errors(directory, 0):
                shutil.rmtree(directory, ignore_errors=True)
                make_directory(directory)
                write_fingerprint(directory, fingerprint)
        self.resumed = bool(self.done)
        with write_errors(directory / JOURNAL_FILE, 0):
            self._journal = open_to_append(directory / JOURNAL_FILE)

    def _read(self) -> dict[str, dict[str, Any]]:
        """Read the complete lines; truncate a line cut off by a kill, so that its unit is done again."""
        path = self.directory / JOURNAL_FILE
        records, length = read_records(self.directory)
        if written(self.directory) > length:
            with write_errors(path, 0):
                descriptor = open_existing(path)
                os.ftruncate(descriptor, length)
                os.close(descriptor)
        return records

    def commit(self, unit: str, record: Mapping[str, Any]) -> None:
        """Append the record of a unit whose bytes are already on disk."""
        entry = {"unit": unit, **record}
        line = encode_line(entry)
        with write_errors(self.directory / JOURNAL_FILE, len(line)):
            if os.write(self._journal, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            system.sync_file(self._journal)
        self.done[unit] = entry

    def close(self) -> None:
        """Close the journal but keep its files, so that the run can be resumed."""
        if self._journal >= 0:
            os.close(self._journal)
        self._journal = -1

    def remove(self) -> None:
        """Close and delete the journal, after publication or when the run cannot be finished."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def read_records(directory: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the records of a journal by unit name, and the number of bytes in its complete lines.

    Raises:
        IntegrityError: a line is damaged.
    """
    path = directory / JOURNAL_FILE
    if not path.exists():
        return {}, 0
    *lines, _ = FILES.read(path, JOURNAL_ROLE, directory).split(b"\n")
    decoded = [decode_line(line, path, directory) for line in lines]
    return {str(record["unit"]): record for record in decoded}, sum(len(line) + 1 for line in lines)


def recorded_fingerprint(directory: Path) -> dict[str, str]:
    """Return the fingerprint stored in a journal; empty if it cannot be read."""
    try:
        return read_object(directory / FINGERPRINT_FILE, JOURNAL_ROLE, directory)
    except InputError:
        return {}


def written(directory: Path) -> int:
    """Return the size of a journal in bytes; 0 means that no unit was finished."""
    try:
        return (directory / JOURNAL_FILE).stat().st_size
    except OSError:
        return 0


def write_fingerprint(directory: Path, fingerprint: Mapping[str, str]) -> None:
    """Write the fingerprint of a run durably."""
    write_durably(directory / FINGERPRINT_FILE, json.dumps(dict(fingerprint), indent=1).encode())


def check_fingerprint(
    path: Path, fingerprint: Mapping[str, str], directory: Path | None = None
) -> None:
    """Check that the fingerprint of an unfinished run equals that of this one.

    Args:
        path: path of the fingerprint file.
        fingerprint: fingerprint of this run.
        directory: directory of a shared run that the user should delete to start afresh; by default that of the file.

    Raises:
        IntegrityError: they differ (the message lists the differences), or the file is damaged.
    """
    try:
        earlier = read_object(path, JOURNAL_ROLE, path.parent)
    except InputError as error:
        raise damaged_journal_error(path, path.parent) from error
    if differ := _differences(earlier, fingerprint):
        restart_hint = f"start afresh: with --overwrite, or after rm -r {path.parent}"
        if (
            directory is not None
        ):  # shared runs have no --overwrite, and a process may still be running
            restart_hint = (
                f"when no process works on it any more, start afresh after rm -r {directory}"
            )
        schemas = [
            str(document.get("schema", SCHEMA_OF_NONE)) for document in (earlier, fingerprint)
        ]
        if schemas[0] != schemas[1]:
            raise IntegrityError(
                f"{path.parent}: holds an unfinished run with a journal of schema {schemas[0]:.60}, and this version"
                f" of quantforge resumes {schemas[1]}",
                f"finish it with the version that began it, or {restart_hint}",
                file=str(path),
            )
        raise IntegrityError(
            f"{path.parent}: holds an unfinished run that differs in: {'; '.join(differ)}",
            f"finish it with its own command, or {restart_hint}",
            file=str(path),
        )


def _differences(recorded: Mapping[str, Any], current: Mapping[str, str]) -> list[str]:
    """Describe the differences between two fingerprints, with both values unless they are digests."""
    descriptions = []
    for key in sorted({*recorded, *current}):
        values = [str(record.get(key, "")) for record in (recorded, current)]
        if values[0] == values[1]:
            continue
        if key == RECIPE_KEY:
            descriptions += recipe_differences(*values)
        else:
            has_no_digest = not any(_SHA256.fullmatch(value) for value in values)
            descriptions.append(
                difference_line(key, *(value or "none" for value in values))
                if has_no_digest
                else key
            )
    return descriptions


def encode_line(entry: Mapping[str, Any]) -> bytes:
    """Encode a record as a journal line: a digest and the record as JSON."""
    return _with_digest(json.dumps(entry).encode()) + b"\n"


def decode_line(line: bytes, path: Path, directory: Path) -> dict[str, Any]:
    """Decode a journal line without its newline; ``path`` and ``directory`` are used in errors.

    Raises:
        IntegrityError: the digest does not match, or the record names no unit.
    """
    data = line[_DIGEST_DIGITS + 1 :]
    if _with_digest(data) != line:
        raise damaged_journal_error(path, directory)
    try:
        record: dict[str, Any] = parse_object(data, path, JOURNAL_ROLE, loose=True)
        return {**record, "unit": record["unit"]}
    except (InputError, KeyError) as error:
        raise damaged_journal_error(path, directory) from error


def damaged_journal_error(path: Path, directory: Path) -> IntegrityError:
    """Return the error for a damaged file in the directory of a journal."""
    return IntegrityError.at(
        path, "the journal of the interrupted run is damaged", f"start afresh: rm -r {directory}"
    )


def _with_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_DIGITS].encode() + b" " + data


def write_durably(path: Path, data: bytes) -> None:
    """Write a file of the journal atomically and sync it to disk."""
    with atomic_file(path, path.with_suffix(".new").name) as descriptor:
        DISK.write_at(descriptor, memoryview(data), 0)
    DISK.sync(path.parent)


def resume_or_create_journal(stage: Stage, fingerprint: Mapping[str, str]) -> Journal:
    """Open the journal next to the stage, resuming a matching run; errors as `Journal`."""
    if stage.empty:  # the files of the journal's run were published or removed
        if written(stage.journal):
            shutil.rmtree(stage.units, ignore_errors=True)
        shutil.rmtree(stage.journal, ignore_errors=True)
    journal = Journal(stage.journal, fingerprint)
    if not journal.resumed:
        stage.clear()
    return journal


def check_unshared_journal(stage: Stage, fingerprint: Mapping[str, str]) -> None:
    """Refuse to begin a shared run where an unshared run with a different fingerprint was interrupted.

    Raises:
        IntegrityError: the fingerprints differ.
    """
    path = stage.journal / FINGERPRINT_FILE
    if not stage.empty and path.exists():
        check_fingerprint(path, fingerprint, stage.journal.parent)


def check_versions(stage: Stage) -> None:
    """Refuse to share a run with processes that use different library versions.

    Raises:
        IntegrityError: the versions differ; the message lists them.
    """
    if not stage.path.exists():
        return
    recorded, current = recorded_fingerprint(stage.journal), _versions()
    names = [name for name in current if recorded.get(name, current[name]) != current[name]]
    if names:
        run_directory = stage.journal.parent
        differ = "; ".join(difference_line(name, recorded[name], current[name]) for name in names)
        raise IntegrityError(
            f"{run_directory}: holds an unfinished run that differs in: {differ}",
            "give the command with the same versions everywhere; or, when no process works on it any more,"
            f" begin afresh with these: rm -r {run_directory}",
            file=str(stage.journal),
        )


def _versions() -> dict[str, str]:
    return {f"version of {name}": text for name, text in manifest.versions().items()}


def run_fingerprint(
    recipe: str,
    source: Mapping[str, Any],
    calibrated: CalibrationData | None,
    device: str,
    imatrix: Path | None,
) -> dict[str, str]:
    """Return everything that determines a byte of the result, by the name under which a mismatch is reported.

    ``recipe`` is the recipe as TOML.
    """
    return {
        "schema": SCHEMA,
        RECIPE_KEY: recipe,
        "calibration": calibrated.sample.report.digest if calibrated else "",
        "device": device.partition(":")[0],  # each rank may use another of several GPUs
        **({"imatrix": manifest.sha256(imatrix, None)} if imatrix else {}),
        **_versions(),
        **{f"source file {name}": entry["sha256"] for name, entry in source["files"].items()},
    }


def finished_tensor_names(plan: Plan, units: Mapping[str, Any]) -> list[str]:
    """Return the names of the stored tensors that the finished units have written."""
    return [
        output.name
        for tensor in plan.tensors
        if unit_name_of(tensor, plan) in units
        for output in tensor.outputs
    ]
