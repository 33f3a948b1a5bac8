"""Allocate: bits for each group of linears, so that a model of a given size diverges least from its source.

Three steps: plan candidates from headers (`plan_search`); measure what each costs each linear (`measured_errors`);
choose the mixture that loses least (`MixtureSearch.best_allocation`). `quantize` with a size does
the same and rounds by what was found, and `plan` with a size shows a likely mixture.

What is measured of a block is written down beside the result that is being made, and an interrupted measurement is
resumed. It does not depend on the size that is asked for, only on the model, the candidates and the calibration rows.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from quantforge.api.job import plan_job
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.artifacts.number_text import significant
from quantforge.artifacts.publish import digest_source
from quantforge.errors import UsageError
from quantforge.execution.journal import Journal
from quantforge.execution.progress import phase, report_to
from quantforge.files.disk import check_new, run_folder, save
from quantforge.files.hub import resolve
from quantforge.files.lock import Lock
from quantforge.files.stage import unwritable
from quantforge.formats.open_model import open_model
from quantforge.planning import naming
from quantforge.planning.allocation import (
    Allocated,
    MixtureSearch,
    plan_search,
)
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource
from quantforge.planning.size_target import SizeRequest, size_request
from quantforge.recipe import Recipe
from quantforge.settings import Settings, check_device

_DIGEST = 12  # hex digits in the name of the directory in which a measurement is kept


@check_arguments(RecipeOptions)
@torch_defaults()
def allocate(
    model: str | Path,
    target: str | None = None,
    out: str | Path | None = None,
    recipe: RecipeSource = None,
    settings: Settings | None = None,
    *,
    like: str | Path | None = None,
    candidates: str | Sequence[str] = (),
    **options: Unpack[RecipeOptions],
) -> Allocated:
    """Find the scheme of every linear with which a model of a given size diverges least from its source.

    Args:
        model: as of `quantize`.
        target: bits per weight inside of blocks (``3.5bpw``), bytes of all weight files (``18GB``, ``17GiB``), or
            memory of a device that holds the cache of a sequence as well (``24GB@32k``; ``24GB@8x32k`` of eight).
        out: a recipe file to write.
        recipe: what else is wanted; its method is gptq, and it names no width.
        settings: how it runs; ``overwrite`` replaces ``out``; the type of the cache, for a target of memory.
        like: in place of a target, a GGUF file or another quantized form of the same model: as many bytes as its files
            have. Its format is taken too where none is asked for.
        candidates: schemes to choose from, as a list or with commas between them; those that the format holds in usual
            widths when left out.
        options: choices that override the recipe; an ``engine`` leaves the candidates that it loads mixed.

    Raises:
        UsageError: the target is no size, a method that rounds otherwise, or a width beside the candidates.
        RefusedError: the target is out of reach, the format or the engine takes no mixture, or gradients of the model
            are not computed.
    """
    settings = settings or Settings()
    if target is None and like is None:
        raise UsageError(
            "no size is asked for: --target and --like",
            "give one: --target 3.5bpw, or --like FILE.gguf",
        )
    asked = size_request(target, like, candidates, recipe, options)
    if out is not None:
        check_new(Path(out), "--output", overwrite=settings.overwrite)
    check_device(settings.device)
    with report_to(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            search = plan_search(model, asked, settings, None)
            if settings.serving.cache and search.target.load is None:
                raise UsageError(
                    f"--cache {settings.serving.cache}: of how many tokens",
                    "e.g. --target 24GB@32k",
                )
            events = (
                event for one in search.candidate_plans.values() for event in one.plan.substitutions
            )
            settings.policy.check([*events])
        with measured_errors(
            search, Path(out).absolute().parent if out is not None else None
        ) as nats:
            found = search.best_allocation(nats)
            if out is not None:
                save(Path(out), found.written(), overwrite=settings.overwrite)
    return found


@contextmanager
def sized_recipe(
    model: str | Path, asked: SizeRequest, out: Path | None, settings: Settings
) -> Iterator[tuple[Recipe, Path]]:
    """Find the recipe that `allocate` writes, and say where the result goes: ``out``, or where `naming` says.

    What was measured is kept beside the result until the body ends. The plan of a likely mixture is announced before.

    Raises:
        QuantForgeError: as `allocate`, and what of the result is refused, before anything is measured.
    """
    check_device(settings.device)
    with phase("planning", 0.01, "headers of the model"):
        search = plan_search(model, asked, settings, out)
        likely, planned = search.estimate_mixture()
        place = resolve(str(model), settings.offline)
        out = out or naming.default_path(planned.plan.name, place)
        likely, own = strip_local_paths(likely, settings)
        job = plan_job(open_model(place), likely, out, own)
        if not job.stage.begun:
            with job.stage:  # refuses what lies there, before anything is measured
                pass
        job.check_text()
        settings.announce(job.planned.plan, job.stage.named)
    with measured_errors(search, out.absolute().parent, 0.7) as nats:
        found = search.best_allocation(nats)
        settings.note(
            f"found: {found.bits:.3g} bits per weight, expected KL {significant(found.nats)}; rounding by that recipe"
        )
        yield found.recipe, out


@contextmanager
def measured_errors(
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

    from quantforge.execution.calibration import draw_calibration_data
    from quantforge.execution.candidate_errors import candidate_errors
    from quantforge.execution.execute import RunInputs
    from quantforge.execution.journal import run_fingerprint
    from quantforge.numerics.threads import reproducible

    settings, plans = search.settings, [*search.candidate_plans.values()]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with reproducible():
        with phase("reading", 0.05 * share, "calibration text"):
            source, files = digest_source(search.source, search.small_files, settings)
            calibrated = draw_calibration_data(source, plans[0], settings)
            settings.policy.check(calibrated.events)
            for event in calibrated.events:
                settings.note(f"{event.kind}: {event.detail}")
        recipe = search.recipe.to_toml()
        fingerprint = run_fingerprint(recipe, files, calibrated, settings.device, None)
        fingerprint["candidates"] = ", ".join(search.candidate_plans)
        inputs = RunInputs(plans[0], settings, source, files, calibrated, {}, fingerprint)
        with _opened_journal(beside, fingerprint) as work:
            with phase("measuring", 0.9 * share):
                found = candidate_errors(inputs, calibrated.sample, plans, work)
            yield found
            work.remove()


@contextmanager
def _opened_journal(beside: Path | None, fingerprint: Mapping[str, str]) -> Iterator[Journal]:
    """Open the directory of a measurement, which no other run has at the same time."""
    if beside is None:
        with tempfile.TemporaryDirectory(prefix="quantforge-allocate-") as scratch:
            yield Journal(Path(scratch) / "journal", fingerprint)
        return
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    place = run_folder(beside / f"allocate-{digest[:_DIGEST]}")
    lock = Lock(place, "measures the same candidates for a recipe in this folder")
    try:
        lock.take()
    except OSError as error:
        raise unwritable(beside, error) from error
    try:
        work = Journal(lock.directory / "journal", fingerprint)
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
