"""A result that is there already: a run was killed after its publication, and the same command is given again."""

from __future__ import annotations

from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.events import Event
from quantforge.execution.journal import recorded_fingerprint
from quantforge.execution.resumption import fingerprint_of
from quantforge.planning.planner import Planned
from quantforge.recipe import to_toml
from quantforge.results import manifest
from quantforge.results.publish import source_of
from quantforge.settings import Settings


def events_of_finished(
    checkpoint: Checkpoint, planned: Planned, stage: Stage, settings: Settings
) -> tuple[Event, ...] | None:
    """Return the events of the result of this very command, and forget its journal; None if it is still to be made.

    After such a kill the journal lies beside the result, and no stage any more.

    Raises:
        RefusedError: more events than the policy allows.
        BusyError: the run that makes the result has not ended.
    """
    if settings.overwrite or stage.path.exists() or not stage.journal.is_dir():
        return None
    document = manifest.read(stage.out)
    if document is None:
        return None
    source, recipe = source_of(checkpoint), planned.recipe
    wanted = fingerprint_of(recipe, source, None, settings.device, settings.imatrix)
    found = {**recorded_fingerprint(stage.journal), "calibration": ""}
    if (found, document.get("recipe"), document.get("source")) != (wanted, to_toml(recipe), source):
        return None
    events = tuple(Event(**event) for event in document.get("events", ()))
    settings.policy.check(events)
    stage.forget()
    return events
