"""Allocate: bits for each group of linears, so that a model of a given size diverges least from its source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from quantforge.checkpoint.disk import check_new, save
from quantforge.errors import UsageError
from quantforge.execution.progress import followed, phase
from quantforge.planning.allocation import Allocated
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource
from quantforge.settings import Settings, check_device
from quantforge.verbs.asked_size import AskedSize, width_left_open
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.given_options import checks_options
from quantforge.verbs.measured_candidates import measured
from quantforge.verbs.mixture_search import search_of


@checks_options(RecipeOptions)
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
        candidates: schemes to choose from; those that the format holds in usual widths when left out.
        options: choices that override the recipe; an ``engine`` leaves the candidates that it loads mixed.

    Raises:
        UsageError: the target is no size, a method that rounds otherwise, or a width beside the candidates.
        RefusedError: the target is out of reach, the format or the engine takes no mixture, or gradients of the model
            are not computed.
    """
    settings, wanted = settings or Settings(), width_left_open(recipe, options)
    asked = AskedSize(target, like, candidates, wanted)
    if out is not None:
        check_new(Path(out), "--output", overwrite=settings.overwrite)
    check_device(settings.device)
    with followed(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            search = search_of(model, asked, settings, None)
            if settings.serving.cache and search.target.load is None:
                raise UsageError(
                    f"--cache {settings.serving.cache}: of how many tokens",
                    "e.g. --target 24GB@32k",
                )
            events = (event for one in search.plans.values() for event in one.plan.substitutions)
            settings.policy.check([*events])
        with measured(search, Path(out).absolute().parent if out is not None else None) as nats:
            found = search.found(nats, str(target or like))
            if out is not None:
                save(Path(out), found.written(), overwrite=settings.overwrite)
    return found
