"""A result that lies at the place of a job already, made by this very command before it was killed, or earlier.

`earlier_outcome` finds the result of a run that was killed after it had published, or that another process published.
`is_made` decides for each of several results whether the one that is there is what would be made now.
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
from quantforge.files.output_names import MODELFILE, projector_name
from quantforge.files.stage import STAGE, Stage
from quantforge.recipe import recipe_differences
from quantforge.settings import Settings


def earlier_outcome(job: Job) -> Outcome | None:
    """Return the outcome of a job that this very command has done, and forget its journal; None if there is work left.

    Raises:
        RefusedError: more events than the policy allows.
        BusyError: the run that makes the result has not ended.
    """
    stage, settings = job.stage, job.settings
    if settings.overwrite or stage.path.exists():
        return None
    if not settings.join and not stage.journal.is_dir():
        return None
    document = manifest.read_manifest(stage.out)
    if document is None or not _is_whole(document, stage.out):
        return None
    if _missing_extras(document, stage.out, settings):
        return None
    source, recipe = describe_source(job.checkpoint), job.planned.recipe.to_toml()
    if (document.get("recipe"), document.get("source")) != (recipe, source):
        return None
    if settings.join:
        same = document.get("versions") == manifest.versions()
    else:
        wanted = run_fingerprint(recipe, source, None, settings.device, settings.imatrix)
        same = {**recorded_fingerprint(stage.journal), "calibration": ""} == wanted
    if not same:
        return None
    events = tuple(Event(**event) for event in document.get("events", ()))
    settings.policy.check(events)
    if settings.join:
        forget(stage)
    else:
        stage.forget(Claims(stage.units, ()).remove)
    return Outcome(stage.out, job.planned.plan, events, resumed=not settings.join)


def is_made(job: Job, files: Mapping[str, Any]) -> bool:
    """Return whether the result of a job is there, whole, and by this recipe from this source.

    Args:
        job: with an output.
        files: of the source, by `source_file_digests`.

    Raises:
        RefusedError: what lies there is something else.
    """
    out, settings = job.out, job.settings
    if _is_staged(out):  # its own command ends what was killed
        return False
    document = manifest.read_manifest(out)
    if document is not None and not settings.overwrite:
        _check_none_missing(document, out)
    if not os.path.lexists(out):
        return False
    stated = document or {}
    recipe, source = job.planned.recipe.to_toml(), stated.get("source", {})
    same = {
        "source": source.get("files") == files,
        "versions": stated.get("versions") == manifest.versions(),
        "files": document is not None and _is_whole(document, out, but=CARD),
    }
    other: list[str] = []
    if stated.get("recipe") != recipe:
        other += recipe_differences(stated.get("recipe", ""), recipe) or ["recipe"]
    other += [name for name, equal in same.items() if not equal]
    other += _missing_extras(stated, out, settings)
    if other and not settings.overwrite:
        raise RefusedError(
            f"{out}: is there, and differs from what would be made in: {'; '.join(other)}",
            "replace it with --overwrite, move it away, or choose another place",
            file=str(out),
        )
    return not other


def clear_run(out: Path) -> None:
    """Remove what the run of a result that is kept has left beside it, unless another process is about it."""
    if run_folder(out).is_dir() and not _is_staged(out):
        with suppress(OSError):  # of a directory that may only be read
            forget(Stage(out, overwrite=False))


def forget(stage: Stage) -> None:
    """Remove what a shared run that is over has left beside its output, unless another process is about it."""
    with suppress(BusyError):
        stage.forget(Claims(stage.units, ()).remove)


def made_again_after(out: Path) -> str:
    """Return what to type so that the same command makes a result again."""
    return f"mv {shlex.quote(str(out))}{'' if out.is_dir() else '*'} ELSEWHERE"


def _is_staged(out: Path) -> bool:
    """Return whether a run has yet to publish, or to remove what it has replaced."""
    return os.path.lexists(run_folder(out) / STAGE)


def _is_whole(document: Mapping[str, Any], out: Path, but: str = "") -> bool:
    """Return whether the files of a manifest are there with their sizes; what is inside of them is for `verify`."""
    root = out if out.is_dir() else out.parent
    entries = {name: entry for name, entry in document["outputs"].items() if name != but}
    try:
        return all((root / n).lstat().st_size == entry["bytes"] for n, entry in entries.items())
    except OSError:
        return False


def _check_none_missing(document: Mapping[str, Any], out: Path) -> None:
    """Refuse to make a result anew of which files are missing: somebody has removed or moved them."""
    root = out if out.is_dir() else out.parent
    for name in document["outputs"]:
        if name != CARD and not os.path.lexists(root / name):
            raise RefusedError(
                f"{root / name}: is not there, but the manifest of {out.name} lists it",
                f"put it back, or have all of it made again after: {made_again_after(out)}",
                file=str(root / name),
            )


def _missing_extras(document: Mapping[str, Any], out: Path, settings: Settings) -> list[str]:
    """Return what the settings ask for beside a result that is not there."""
    extras = {
        "provenance": (settings.provenance, STATEMENT),
        "modelfile": (settings.modelfile, MODELFILE),
        "mmproj": (settings.mmproj, projector_name(out)),
    }
    names = tuple(document.get("outputs", ()))
    missing = [
        name
        for name, (asked, ending) in extras.items()
        if asked and not any(one.endswith(ending) for one in names)
    ]
    signed = settings.sign is None or signature_path(out).exists()
    return missing if signed else [*missing, "signature"]
