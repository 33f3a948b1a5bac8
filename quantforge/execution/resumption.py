"""Going on with an interrupted run: what it has to agree in, its journal, and what it had finished."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.recipe_toml import both
from quantforge.checkpoint.stage import Stage
from quantforge.errors import IntegrityError
from quantforge.execution.journal import (
    FINGERPRINT,
    RECIPE,
    Workspace,
    check_same,
    recorded_fingerprint,
    written,
)
from quantforge.execution.units import unit_of
from quantforge.plans import Plan
from quantforge.results import manifest
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.execution.calibration import Calibrated
    from quantforge.execution.claims import Claims


def workspace_of(stage: Stage, fingerprint: Mapping[str, str]) -> Workspace:
    """Return the journal of this run beside the stage, or of the run that it goes on with; errors as `Workspace`."""
    if stage.empty:  # what the journal speaks of was published or removed
        if written(stage.journal):
            shutil.rmtree(stage.units, ignore_errors=True)
        shutil.rmtree(stage.journal, ignore_errors=True)
    work = Workspace(stage.journal, fingerprint)
    if not work.resumed:
        stage.clear()
    return work


def begun(
    stage: Stage, claims: Claims, fingerprint: Mapping[str, str], settings: Settings
) -> Workspace:
    """Return the journal of this run, or of the unfinished one that it goes on with.

    An overwrite ends an unfinished run that it cannot go on with. The caller holds the lock of the output.

    Raises:
        IntegrityError: another run is unfinished here, or its journal is damaged, and nothing is to be overwritten.
    """
    work = None
    try:
        work = workspace_of(stage, fingerprint)
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
        work = workspace_of(stage, fingerprint)
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
        stored.name
        for tensor in plan.tensors
        if unit_of(tensor, plan) in units
        for stored in tensor.stored
    ]
