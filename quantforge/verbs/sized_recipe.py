"""The recipe of a result of a given size: candidates are measured, and a mixture of them is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantforge.checkpoint.hub import resolve
from quantforge.execution.progress import phase
from quantforge.formats.opening import open_model
from quantforge.planning import naming
from quantforge.planning.cited_files import cited
from quantforge.recipe import Recipe
from quantforge.results.significant import significant
from quantforge.settings import Settings, check_device
from quantforge.verbs.asked_size import AskedSize
from quantforge.verbs.job import plan_job
from quantforge.verbs.measured_candidates import measured
from quantforge.verbs.mixture_search import search_of


@contextmanager
def sized_recipe(
    model: str | Path, asked: AskedSize, out: Path | None, settings: Settings
) -> Iterator[tuple[Recipe, Path]]:
    """Find the recipe that `allocate` writes, and say where the result goes: ``out``, or where `naming` says.

    What was measured is kept beside the result until the body ends. The plan of a likely mixture is announced before.

    Raises:
        QuantForgeError: as `quantforge.verbs.allocate`, and what of the result is refused, before anything is measured.
    """
    check_device(settings.device)
    place = resolve(str(model), settings.offline)
    with phase("planning", 0.01, "headers of the model"):
        search = search_of(model, asked, settings, out)
        likely, planned = search.likely()
        out = out or naming.place(planned.plan.name, place)
        likely, own = cited(likely, settings)
        job = plan_job(open_model(place), likely, out, own)
        if not job.stage.begun:
            with job.stage:  # refuses what lies there, before anything is measured
                pass
        job.announce()
    with measured(search, out.absolute().parent, 0.7) as nats:
        found = search.found(nats, str(asked.target or asked.like))
        settings.note(
            f"found: {found.bits:.3g} bits per weight, expected KL {significant(found.nats)}; rounding by that recipe"
        )
        yield found.recipe, out
