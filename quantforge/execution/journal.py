"""The journal of a run: what is done, so that the same command goes on after any kill.

Weights go straight into the preallocated files of the stage; a unit of work (the tensors outside of the blocks, or
one block) is done when its bytes are on the disk and its line is in the journal, in that order. Every line begins with
a digest of itself. A fingerprint over everything that decides a byte of the result (recipe, source, calibration
tokens, device, versions) guards against resuming something else.

From top to bottom: the record of a finished unit; the journal's directory and its files; what a resumed run has to
agree in, and which journal it opens.
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
from quantforge.execution.units import unit_of
from quantforge.files.disk import (
    DISK,
    make_folder,
    open_existing,
    open_to_append,
    whole_file,
    writing,
)
from quantforge.files.opener import FILES, parse_object, read_object
from quantforge.files.stage import Stage
from quantforge.plans import Plan
from quantforge.recipe import both, differences
from quantforge.settings import Settings
from quantforge_files import system
from quantforge_files.roles import JOURNAL as JOURNAL_ROLE

if TYPE_CHECKING:
    from quantforge.execution.calibration import Calibrated
    from quantforge.execution.claims import Claims

Record = dict[str, Any]  # of a unit: "events", "figures", "sums", "transform"
FINGERPRINT = "fingerprint.json"
RECIPE = "recipe"  # the key of its TOML in a fingerprint
JOURNAL = "journal.jsonl"
_DIGEST = 16  # hex digits at the beginning of a line
_SHA256 = re.compile("[0-9a-f]{64}")


def merge(record: Record, other: Record) -> None:
    """Add the events and figures of a step to those of its part."""
    for key, value in other.items():
        if isinstance(value, list):
            record[key] = [*record.get(key, []), *value]
        else:
            record[key] = {**record.get(key, {}), **value}


def events_of(records: Iterable[Record]) -> list[Event]:
    """Return every event, in the order of the parts."""
    return [Event(**event) for record in records for event in record.get("events", [])]


def figures_of(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """Return the figures of every rounded tensor, by name."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        for name, values in record.get("figures", {}).items():
            found[name] = {**found.get(name, {}), **values}
    return found


def scaled_of(records: Iterable[Record]) -> tuple[int, int] | None:
    """Return for how many activations factors were better than none, and for how many they were searched; or None."""
    searched = [
        figures["family"] != "none"
        for record in records
        for figures in record.get("transform", {}).values()
        if "family" in figures
    ]
    return (sum(searched), len(searched)) if searched else None


class Journal:
    """The journal directory beside an output. The caller holds the output's lock.

    Attributes:
        directory: where it is; hidden states on disk live there too.
        done: the records of the finished units, by unit.
        resumed: whether there were any when it was opened.

    Raises:
        IntegrityError: the directory belongs to a run that differs (the message names in what), or is damaged.
        ResourceError: the disk is full.
    """

    def __init__(self, directory: Path, fingerprint: Mapping[str, str]) -> None:
        self.directory = directory
        self.done: dict[str, dict[str, Any]] = {}
        path = directory / FINGERPRINT
        if path.exists() and written(directory):
            check_same(path, fingerprint)
            self.done = self._read()
        else:
            with writing(directory, 0):
                shutil.rmtree(directory, ignore_errors=True)
                make_folder(directory)
                write_fingerprint(directory, fingerprint)
        self.resumed = bool(self.done)
        with writing(directory / JOURNAL, 0):
            self._journal = open_to_append(directory / JOURNAL)

    def _read(self) -> dict[str, dict[str, Any]]:
        """Read whole lines; a line cut by a kill is dropped, and its unit is done again."""
        path = self.directory / JOURNAL
        records, length = records_of(self.directory)
        if written(self.directory) > length:
            with writing(path, 0):
                descriptor = open_existing(path)
                os.ftruncate(descriptor, length)
                os.close(descriptor)
        return records

    def commit(self, unit: str, record: Mapping[str, Any]) -> None:
        """Write one line for a unit whose bytes are already on the disk."""
        entry = {"unit": unit, **record}
        line = line_of(entry)
        with writing(self.directory / JOURNAL, len(line)):
            if os.write(self._journal, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            system.sync(self._journal)
        self.done[unit] = entry

    def close(self) -> None:
        """Close the journal and keep it: the run can be resumed."""
        if self._journal >= 0:
            os.close(self._journal)
        self._journal = -1

    def remove(self) -> None:
        """Close the journal and delete it: the run is published, or cannot be finished."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def records_of(directory: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the records of a journal by their units, and how many bytes its whole lines have.

    Raises:
        IntegrityError: a line is damaged.
    """
    path = directory / JOURNAL
    if not path.exists():
        return {}, 0
    *lines, _ = FILES.read(path, JOURNAL_ROLE, directory).split(b"\n")
    found = [record_of(line, path, directory) for line in lines]
    return {str(record["unit"]): record for record in found}, sum(len(line) + 1 for line in lines)


def recorded_fingerprint(directory: Path) -> dict[str, str]:
    """Return the fingerprint of the run that a journal is of; empty if it cannot be read."""
    try:
        return read_object(directory / FINGERPRINT, JOURNAL_ROLE, directory)
    except InputError:
        return {}


def written(directory: Path) -> int:
    """Return how many bytes a journal has: with none there is nothing to go on with, and nothing to lose."""
    try:
        return (directory / JOURNAL).stat().st_size
    except OSError:
        return 0


def write_fingerprint(directory: Path, fingerprint: Mapping[str, str]) -> None:
    """Write down what a run is of, durably."""
    write_durably(directory / FINGERPRINT, json.dumps(dict(fingerprint), indent=1).encode())


def check_same(path: Path, fingerprint: Mapping[str, str], directory: Path | None = None) -> None:
    """Compare the fingerprint of an unfinished run with that of this one.

    Args:
        path: of the file.
        fingerprint: of this run.
        directory: of a run that processes share, which a person removes to start afresh; where the file is, if it is
            left out.

    Raises:
        IntegrityError: it differs (the message names in what), or is damaged.
    """
    try:
        earlier = read_object(path, JOURNAL_ROLE, path.parent)
    except InputError as error:
        raise damaged(path, path.parent) from error
    if differ := _differences(earlier, fingerprint):
        afresh = f"start afresh: with --overwrite, or after rm -r {path.parent}"
        if directory is not None:  # --overwrite is not shared, and somebody may be at work
            afresh = f"when no process works on it any more, start afresh after rm -r {directory}"
        raise IntegrityError(
            f"{path.parent}: holds an unfinished run that differs in: {'; '.join(differ)}",
            f"finish it with its own command, or {afresh}",
            file=str(path),
        )


def _differences(there: Mapping[str, Any], here: Mapping[str, str]) -> list[str]:
    """Return in what two fingerprints differ, with both values where they tell a person anything."""
    told = []
    for key in sorted({*there, *here}):
        values = [str(found.get(key, "")) for found in (there, here)]
        if values[0] == values[1]:
            continue
        if key == RECIPE:
            told += differences(*values)
        else:
            plain = not any(_SHA256.fullmatch(value) for value in values)
            told.append(both(key, *(value or "none" for value in values)) if plain else key)
    return told


def line_of(entry: Mapping[str, Any]) -> bytes:
    """Return the line of a finished unit: a digest, and its record as JSON."""
    return _line(json.dumps(entry).encode()) + b"\n"


def record_of(line: bytes, path: Path, directory: Path) -> dict[str, Any]:
    """Return the record of a line without its end, which stands in the file ``path`` of a ``directory``.

    Raises:
        IntegrityError: the digest is another one, or it names no unit.
    """
    data = line[_DIGEST + 1 :]
    if _line(data) != line:
        raise damaged(path, directory)
    try:
        record: dict[str, Any] = parse_object(data, path, JOURNAL_ROLE, loose=True)
        return {**record, "unit": record["unit"]}
    except (InputError, KeyError) as error:
        raise damaged(path, directory) from error


def damaged(path: Path, directory: Path) -> IntegrityError:
    """Return the error for a file, in the directory of a journal, that is not as it was written."""
    return IntegrityError.at(
        path, "the journal of the interrupted run is damaged", f"start afresh: rm -r {directory}"
    )


def _line(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest()[:_DIGEST].encode() + b" " + data


def write_durably(path: Path, data: bytes) -> None:
    """Write a file of the journal whole, or not at all."""
    with whole_file(path, path.with_suffix(".new").name) as descriptor:
        DISK.write_at(descriptor, memoryview(data), 0)
    DISK.sync(path.parent)


def journal_of(stage: Stage, fingerprint: Mapping[str, str]) -> Journal:
    """Return the journal of this run beside the stage, or of the run that it goes on with; errors as `Journal`."""
    if stage.empty:  # what the journal speaks of was published or removed
        if written(stage.journal):
            shutil.rmtree(stage.units, ignore_errors=True)
        shutil.rmtree(stage.journal, ignore_errors=True)
    work = Journal(stage.journal, fingerprint)
    if not work.resumed:
        stage.clear()
    return work


def open_journal(
    stage: Stage, claims: Claims, fingerprint: Mapping[str, str], settings: Settings
) -> Journal:
    """Return the journal of this run, or of the unfinished one that it goes on with.

    An overwrite ends an unfinished run that it cannot go on with. The caller holds the lock of the output.

    Raises:
        IntegrityError: another run is unfinished here, or its journal is damaged, and nothing is to be overwritten.
    """
    work = None
    try:
        work = journal_of(stage, fingerprint)
        claims.check(fingerprint)
    except IntegrityError as error:
        if work is not None:
            work.close()
        if not settings.overwrite:
            raise
        settings.note(f"{error.message}; it is ended, because --overwrite is given")
        claims.remove()
        shutil.rmtree(stage.journal, ignore_errors=True)
        stage.clear()
        work = journal_of(stage, fingerprint)
    return work


def check_journal(stage: Stage, fingerprint: Mapping[str, str]) -> None:
    """Refuse to begin a shared run where another has stopped that was not shared.

    Raises:
        IntegrityError: its journal is of something else.
    """
    path = stage.journal / FINGERPRINT
    if not stage.empty and path.exists():
        check_same(path, fingerprint, stage.journal.parent)


def check_versions(stage: Stage) -> None:
    """Refuse to share with a process that makes a result here with other versions than this one has.

    Raises:
        IntegrityError: naming them.
    """
    if not stage.path.exists():
        return
    there, here = recorded_fingerprint(stage.journal), _versions()
    names = [name for name in here if there.get(name, here[name]) != here[name]]
    if names:
        place = stage.journal.parent
        differ = "; ".join(both(name, there[name], here[name]) for name in names)
        raise IntegrityError(
            f"{place}: holds an unfinished run that differs in: {differ}",
            "give the command with the same versions everywhere; or, when no process works on it any more,"
            f" begin afresh with these: rm -r {place}",
            file=str(stage.journal),
        )


def _versions() -> dict[str, str]:
    return {f"version of {name}": text for name, text in manifest.versions().items()}


def fingerprint_of(
    recipe: str,
    source: Mapping[str, Any],
    calibrated: Calibrated | None,
    device: str,
    imatrix: Path | None,
) -> dict[str, str]:
    """Return everything that decides a byte of the result, by the name under which a mismatch is reported.

    ``recipe`` is its TOML.
    """
    return {
        RECIPE: recipe,
        "calibration": calibrated.sample.report.digest if calibrated else "",
        "device": device.partition(":")[0],  # of several GPUs each rank has its own
        **({"imatrix": manifest.sha256(imatrix, None)} if imatrix else {}),
        **_versions(),
        **{f"source file {name}": entry["sha256"] for name, entry in source["files"].items()},
    }


def done_tensors(plan: Plan, units: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that the finished units have written."""
    return [
        output.name
        for tensor in plan.tensors
        if unit_of(tensor, plan) in units
        for output in tensor.outputs
    ]
