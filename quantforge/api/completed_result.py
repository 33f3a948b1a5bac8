"""Detect that the result of a job exists already and is up to date.

`earlier_outcome` finds the result of a run that was killed after it had published it, or that another process
published. `is_up_to_date` decides for each of several results whether the existing one is what a new run would make.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantforge.api.job import Job, Outcome
from quantforge.artifacts import manifest
from quantforge.artifacts.card_figures import CARD
from quantforge.artifacts.provenance import STATEMENT
from quantforge.artifacts.publish import describe_source
from quantforge.artifacts.signing import signature_path
from quantforge.errors import BusyError, RefusedError
from quantforge.events import Event
from quantforge.execution.claims import Claims
from quantforge.execution.journal import recorded_fingerprint, run_fingerprint
from quantforge.files.disk import run_folder
from quantforge.files.output_names import MODELFILE_SUFFIX, projector_name
from quantforge.files.stage import STAGE_DIRECTORY, Stage
from quantforge.recipe import recipe_differences
from quantforge.settings import Settings


def earlier_outcome(job: Job) -> Outcome | None:
    """Return the outcome of a job that an identical run has finished, and remove its journal; None if work is left.

    Raises:
        RefusedError: there are more events than the policy allows.
        BusyError: the run that makes the result has not ended.
    """
    stage, settings = job.stage, job.settings
    if settings.overwrite or stage.path.exists():
        return None
    if not settings.join and not stage.journal.is_dir():
        return None
    document = manifest.read_manifest(stage.out)
    if document is None or not _is_complete(document, stage.out):
        return None
    if _missing_extras(document, stage.out, settings):
        return None
    source, recipe = describe_source(job.checkpoint), job.planned.recipe.to_toml()
    if (document.get("recipe"), document.get("source")) != (recipe, source):
        return None
    if settings.join:
        unchanged = document.get("versions") == manifest.versions()
    else:
        fingerprint = run_fingerprint(recipe, source, None, settings.device, settings.imatrix)
        unchanged = {**recorded_fingerprint(stage.journal), "calibration": ""} == fingerprint
    if not unchanged:
        return None
    events = tuple(Event(**event) for event in document.get("events", ()))
    settings.policy.check(events)
    if settings.join:
        forget(stage)
    else:
        stage.remove_leftovers(Claims(stage.units, ()).remove)
    return Outcome(stage.out, job.planned.plan, events, resumed=not settings.join)


def is_up_to_date(job: Job, source_files: Mapping[str, Any]) -> bool:
    """Return whether the result of a job exists, is complete, and has the job's recipe, source and versions.

    Args:
        job: the job.
        source_files: digests of the source, from `source_file_digests`.

    Raises:
        RefusedError: something else exists at the output path.
    """
    out, settings = job.out, job.settings
    if _has_stage(out):  # the killed run's own command finishes it
        return False
    document = manifest.read_manifest(out)
    if document is not None and not settings.overwrite:
        _check_no_missing_files(document, out)
    if not os.path.lexists(out):
        return False
    if text := manifest.other_schema(out):
        raise RefusedError(
            f"{manifest.manifest_path(out)}: {text}",
            "move the result away, or choose another place",
            file=str(out),
        )
    recorded = document or {}
    recipe, source = job.planned.recipe.to_toml(), recorded.get("source", {})
    unchanged = {
        "source": source.get("files") == source_files,
        "versions": recorded.get("versions") == manifest.versions(),
        "files": document is not None and _is_complete(document, out, ignored=CARD),
    }
    differences: list[str] = []
    if recorded.get("recipe") != recipe:
        differences += recipe_differences(recorded.get("recipe", ""), recipe) or ["recipe"]
    differences += [name for name, equal in unchanged.items() if not equal]
    differences += _missing_extras(recorded, out, settings)
    if differences and not settings.overwrite:
        raise RefusedError(
            f"{out}: is there, and differs from what would be made in: {'; '.join(differences)}",
            "replace it with --overwrite, move it away, or choose another place",
            file=str(out),
        )
    return not differences


def remove_run_files(out: Path) -> None:
    """Remove temporary files of the run that made a result, unless another process still uses them."""
    if run_folder(out).is_dir() and not _has_stage(out):
        with suppress(OSError):  # the directory may be read-only
            forget(Stage(out, overwrite=False))


def forget(stage: Stage) -> None:
    """Remove temporary files of a finished shared run, unless another process still uses them."""
    with suppress(BusyError):
        stage.remove_leftovers(Claims(stage.units, ()).remove)


def move_away_command(out: Path) -> str:
    """Return a shell command that moves a result away, so that the next run makes it again."""
    return f"mv {shlex.quote(str(out))}{'' if out.is_dir() else '*'} ELSEWHERE"


def _has_stage(out: Path) -> bool:
    """Return whether the stage of an unfinished run exists next to an output."""
    return os.path.lexists(run_folder(out) / STAGE_DIRECTORY)


def _is_complete(document: Mapping[str, Any], out: Path, ignored: str = "") -> bool:
    """Return whether all files of a manifest exist with their recorded sizes; contents are not checked."""
    root = out if out.is_dir() else out.parent
    entries = {name: entry for name, entry in document["outputs"].items() if name != ignored}
    try:
        return all((root / n).lstat().st_size == entry["bytes"] for n, entry in entries.items())
    except OSError:
        return False


def _check_no_missing_files(document: Mapping[str, Any], out: Path) -> None:
    """Raise `RefusedError` if the manifest lists a file that is missing: somebody removed or moved it."""
    root = out if out.is_dir() else out.parent
    for name in document["outputs"]:
        if name != CARD and not os.path.lexists(root / name):
            raise RefusedError(
                f"{root / name}: is not there, but the manifest of {out.name} lists it",
                f"put it back, or have all of it made again after: {move_away_command(out)}",
                file=str(root / name),
            )


def _missing_extras(document: Mapping[str, Any], out: Path, settings: Settings) -> list[str]:
    """Return the names of side files that the settings request and that are missing."""
    extras = {
        "provenance": (settings.provenance, STATEMENT),
        "modelfile": (settings.modelfile, MODELFILE_SUFFIX),
        "mmproj": (settings.mmproj, projector_name(out)),
    }
    names = tuple(document.get("outputs", ()))
    missing_files = [
        name
        for name, (requested, ending) in extras.items()
        if requested and not any(output.endswith(ending) for output in names)
    ]
    signed = settings.sign is None or signature_path(out).exists()
    return missing_files if signed else [*missing_files, "signature"]
