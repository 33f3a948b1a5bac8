"""A result that is there already: a run was killed after its publication, and the same command is given again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from quantforge.checkpoint.publish_file import MODELFILE, projector_name
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.errors import BusyError
from quantforge.events import Event
from quantforge.execution.claims import Claims
from quantforge.execution.journal import recorded_fingerprint
from quantforge.execution.resumption import fingerprint_of
from quantforge.planning.planner import Planned
from quantforge.results import manifest
from quantforge.results.provenance import STATEMENT
from quantforge.results.publish import source_of
from quantforge.results.signing import signature_of
from quantforge.settings import Settings


def events_of_finished(
    checkpoint: Checkpoint, planned: Planned, stage: Stage, settings: Settings
) -> tuple[Event, ...] | None:
    """Return the events of the result of this very command, and forget its journal; None if it is still to be made.

    After such a kill the journal lies beside the result, and no stage any more. Of a shared run, another process may
    have published.

    Raises:
        RefusedError: more events than the policy allows.
        BusyError: the run that makes the result has not ended.
    """
    if settings.overwrite or stage.path.exists():
        return None
    if not settings.join and not stage.journal.is_dir():
        return None
    document = manifest.read(stage.out)
    if document is None:
        return None
    if not is_whole(document, stage) or not _is_what_is_asked(document, stage, settings):
        return None
    source, recipe = source_of(checkpoint), planned.recipe.to_toml()
    if (document.get("recipe"), document.get("source")) != (recipe, source):
        return None
    if settings.join:
        same = document.get("versions") == manifest.versions()
    else:
        wanted = fingerprint_of(recipe, source, None, settings.device, settings.imatrix)
        same = {**recorded_fingerprint(stage.journal), "calibration": ""} == wanted
    if not same:
        return None
    events = tuple(Event(**event) for event in document.get("events", ()))
    settings.policy.check(events)
    if settings.join:
        forget(stage)
    else:
        stage.forget(Claims(stage.units, ()).remove)
    return events


def is_whole(document: Mapping[str, Any], stage: Stage) -> bool:
    """Return whether every file of a manifest is there with its size; what is inside of them is for `verify`."""
    root = stage.out if stage.out.is_dir() else stage.out.parent
    try:
        return all(
            (root / name).lstat().st_size == stated["bytes"]
            for name, stated in document["outputs"].items()
        )
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def _is_what_is_asked(document: Mapping[str, Any], stage: Stage, settings: Settings) -> bool:
    """Return whether a result has the files beside it that the settings ask for."""
    names = tuple(document["outputs"])
    tower = projector_name(stage.out)
    beside = {STATEMENT: settings.provenance, MODELFILE: settings.modelfile, tower: settings.mmproj}
    return all(
        not asked or any(name.endswith(ending) for name in names)
        for ending, asked in beside.items()
    ) and (settings.sign is None or signature_of(stage.out).exists())


def forget(stage: Stage) -> None:
    """Remove what a shared run that is over has left beside its output, unless another process is about it."""
    with suppress(BusyError):
        stage.forget(Claims(stage.units, ()).remove)
