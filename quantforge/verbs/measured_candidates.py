"""Candidates of an allocation, measured; an interrupted measurement is gone on with.

What is measured of a block is written down beside the result that is being made. It does not depend on the size that is
asked for, only on the model, the candidates and the calibration rows.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quantforge.checkpoint.disk import place_of_run
from quantforge.checkpoint.lock import Lock
from quantforge.checkpoint.stage import unwritable
from quantforge.execution.journal import Workspace
from quantforge.execution.progress import phase
from quantforge.results.publish import taken
from quantforge.verbs.mixture_search import MixtureSearch

_DIGEST = 12  # hex digits in the name of the directory in which a measurement is kept


@contextmanager
def measured(
    search: MixtureSearch, beside: Path | None, share: float = 1.0
) -> Iterator[dict[str, list[float]]]:
    """Measure the candidates, for a body that uses what was found: nats of each linear under each of them.

    What was measured is kept in a directory ``beside`` until the body ends without an error; the same search goes on
    with it. Without one it is kept nowhere.

    Args:
        search: of which candidates.
        beside: the directory in which a result is to lie.
        share: of the work of the verb that this is.

    Raises:
        InputError: a weight, an activation or a gradient is not finite.
        RefusedError: gradients of the model are not computed, or more events than the policy allows.
        BusyError: another run measures the same.
    """
    import torch

    from quantforge.execution.calibration import calibrated_for
    from quantforge.execution.candidate_errors import candidate_errors
    from quantforge.execution.resumption import fingerprint_of
    from quantforge.numerics.team import reproducible

    settings, plans = search.settings, [*search.plans.values()]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with reproducible():
        with phase("reading", 0.05 * share, "calibration text"):
            source, files = taken(search.source, search.before, settings)
            calibrated = calibrated_for(source, plans[0], settings)
            assert calibrated is not None
            settings.policy.check(calibrated.events)
            for event in calibrated.events:
                settings.note(f"{event.kind}: {event.detail}")
        recipe = search.wanted.to_toml()
        fingerprint = fingerprint_of(recipe, files, calibrated, settings.device, None)
        fingerprint["candidates"] = ", ".join(search.plans)
        with _kept(beside, fingerprint) as work:
            with phase("measuring", 0.9 * share):
                found = candidate_errors(source, plans, calibrated.sample, settings, work)
            yield found
            work.remove()


@contextmanager
def _kept(beside: Path | None, fingerprint: Mapping[str, str]) -> Iterator[Workspace]:
    """Open the directory of a measurement, which no other run has at the same time."""
    if beside is None:
        with tempfile.TemporaryDirectory(prefix="quantforge-allocate-") as scratch:
            yield Workspace(Path(scratch) / "journal", fingerprint)
        return
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    place = place_of_run(beside / f"allocate-{digest[:_DIGEST]}")
    lock = Lock(place, "measures the same candidates for a recipe in this folder")
    try:
        lock.take()
    except OSError as error:
        raise unwritable(beside, error) from error
    try:
        work = Workspace(lock.directory / "journal", fingerprint)
        try:
            yield work
        except BaseException as error:
            error.add_note(
                f"the same command again goes on from what was measured, which {place} keeps until then"
                f" (to give it up: rm -r {shlex.quote(str(place))})"
            )
            raise
        finally:
            work.close()
    finally:
        lock.release()
