"""``allocate``: choose a scheme for every linear, to diverge least from the source at a given size.

There are three steps: plan candidate schemes from headers (`plan_search`), measure the error that each candidate causes
in each linear (`measured_errors`), and choose the mixture with the smallest total error
(`MixtureSearch.best_allocation`). `quantize` with a target size does the same and then rounds with the mixture that was
found; `plan` with a target size shows an estimated mixture.

The errors of each block are saved next to the result that is being made, so that an interrupted measurement is resumed.
They do not depend on the requested size, only on the model, the candidates and the calibration rows.
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
from quantforge.files.disk import check_new_file, run_folder, save_file
from quantforge.files.hub import resolve_model
from quantforge.files.lock import Lock
from quantforge.files.stage import unwritable_error
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
from quantforge.progress import phase, report_to
from quantforge.recipe import Recipe
from quantforge.settings import Settings, check_device

_DIGEST_CHARS = 12  # hex digits in the name of the directory that stores a measurement


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
    """Choose a scheme for every linear, so that a model of a given size diverges least from its source.

    Args:
        model: as for `quantize`.
        target: bits per weight inside of blocks (``3.5bpw``), bytes of all weight files (``18GB``, ``17GiB``), or
            device memory that must also hold the KV cache of one sequence (``24GB@32k``) or several (``24GB@8x32k``).
        out: recipe file to write.
        recipe: all other choices; its method is gptq, and it names no bit width.
        settings: how to run; ``overwrite`` replaces ``out``; its cache type counts for a target in device memory.
        like: instead of a target, a GGUF file or another quantized version of the same model, whose file size becomes
            the target. Its format is used too unless another is requested.
        candidates: schemes to choose from, as a list or separated by commas; when left out, the usual widths that the
            format supports.
        options: choices that override the recipe; an ``engine`` restricts the candidates to schemes that it loads in a
            mixture.

    Raises:
        UsageError: the target is not a size, the method is not gptq, or a bit width is given besides candidates.
        RefusedError: the target cannot be reached, the format or engine supports no mixture of schemes, or gradients
            cannot be computed for the model.
    """
    settings = settings or Settings()
    if target is None and like is None:
        raise UsageError(
            "no size is asked for: --target and --like",
            "give one: --target 3.5bpw, or --like FILE.gguf",
        )
    request = size_request(target, like, candidates, recipe, options)
    if out is not None:
        check_new_file(Path(out), "--output", overwrite=settings.overwrite)
    check_device(settings.device)
    with report_to(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            search = plan_search(model, request, settings, None)
            if settings.serving.cache and search.target.load is None:
                raise UsageError(
                    f"--cache {settings.serving.cache}: of how many tokens",
                    "e.g. --target 24GB@32k",
                )
            events = (
                event
                for candidate in search.candidate_plans.values()
                for event in candidate.plan.substitutions
            )
            settings.policy.check([*events])
        with measured_errors(
            search, Path(out).absolute().parent if out is not None else None
        ) as kl_losses:
            allocated = search.best_allocation(kl_losses)
            if out is not None:
                save_file(Path(out), allocated.written(), overwrite=settings.overwrite)
    return allocated


@contextmanager
def sized_recipe(
    model: str | Path, request: SizeRequest, out: Path | None, settings: Settings
) -> Iterator[tuple[Recipe, Path]]:
    """Find the recipe for a target size, as `allocate` does; yield it with the path of the result.

    The path is ``out``, or the default of `naming`. The measurement stays next to the result until the body ends. The
    plan of an estimated mixture is announced first.

    Raises:
        QuantForgeError: as `allocate`; refusals of the result itself come before anything is measured.
    """
    check_device(settings.device)
    with phase("planning", 0.01, "headers of the model"):
        search = plan_search(model, request, settings, out)
        estimate, planned = search.estimate_mixture()
        model_path = resolve_model(str(model), settings.offline)
        out = out or naming.default_path(planned.plan.name, model_path)
        estimate, job_settings = strip_local_paths(estimate, settings)
        job = plan_job(open_model(model_path), estimate, out, job_settings)
        if not job.stage.has_earlier_run:
            with job.stage:  # refuses what lies there, before anything is measured
                pass
        job.check_text()
        settings.announce(job.planned.plan, job.stage.output_argument)
    with measured_errors(search, out.absolute().parent, 0.7) as kl_losses:
        allocated = search.best_allocation(kl_losses)
        settings.note(
            f"found: {allocated.bits:.3g} bits per weight, expected KL {significant(allocated.nats)};"
            " rounding by that recipe"
        )
        yield allocated.recipe, out


@contextmanager
def measured_errors(
    search: MixtureSearch, directory: Path | None, phase_share: float = 1.0
) -> Iterator[dict[str, list[float]]]:
    """Measure all candidates; yield the KL loss in nats of each linear, a list for each candidate.

    The measurement is saved in ``directory`` until the body ends without an error, and the same search resumes it. If
    ``directory`` is None, nothing is saved.

    Args:
        search: the candidates.
        directory: the parent directory of the result.
        phase_share: fraction of the whole progress that this measurement makes up.

    Raises:
        InputError: a weight, an activation or a gradient is not finite.
        RefusedError: gradients cannot be computed for the model, or there are more events than the policy allows.
        BusyError: another run is making the same measurement.
    """
    import torch

    from quantforge.execution.calibration import draw_calibration_data
    from quantforge.execution.candidate_errors import candidate_errors
    from quantforge.execution.journal import run_fingerprint
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.numerics.threads import reproducible

    settings, plans = search.settings, [*search.candidate_plans.values()]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with reproducible():
        with phase("reading", 0.05 * phase_share, "calibration text"):
            source, files = digest_source(search.source, search.small_files, settings)
            calibration = draw_calibration_data(source, plans[0], settings)
            settings.policy.check(calibration.events)
            for event in calibration.events:
                settings.note(f"{event.kind}: {event.detail}")
        recipe = search.recipe.to_toml()
        fingerprint = run_fingerprint(recipe, files, calibration, settings.device, None)
        fingerprint["candidates"] = ", ".join(search.candidate_plans)
        inputs = RunInputs(plans[0], settings, source, files, calibration, {}, fingerprint)
        with _open_journal(directory, fingerprint) as journal:
            with phase("measuring", 0.9 * phase_share):
                kl_losses = candidate_errors(inputs, calibration.sample, plans, journal)
            yield kl_losses
            journal.remove()


@contextmanager
def _open_journal(directory: Path | None, fingerprint: Mapping[str, str]) -> Iterator[Journal]:
    """Open and lock the journal of a measurement; it is temporary if ``directory`` is None."""
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="quantforge-allocate-") as scratch:
            yield Journal(Path(scratch) / "journal", fingerprint)
        return
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    run_directory = run_folder(directory / f"allocate-{digest[:_DIGEST_CHARS]}")
    lock = Lock(run_directory, "measures the same candidates for a recipe in this folder")
    try:
        lock.acquire()
    except OSError as error:
        raise unwritable_error(directory, error) from error
    try:
        journal = Journal(lock.directory / "journal", fingerprint)
        try:
            yield journal
        except BaseException as error:
            error.add_note(
                f"the same command again goes on from what was measured, which {run_directory} keeps until then"
                f" (to give it up: rm -r {shlex.quote(str(run_directory))})"
            )
            raise
        finally:
            journal.close()
    finally:
        lock.release()
