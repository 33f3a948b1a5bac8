"""The format in which an engine loads a quantized model, found by planning the export into each."""

from __future__ import annotations

from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.formats import FORMATS, Verdict, detect, targets
from quantforge.planning.conversion import DECODED, plan_export
from quantforge.recipe import Recipe


def format_for(checkpoint: Checkpoint, engine: str, parallel: int = 1) -> str:
    """Return the format in which an engine loads a quantized checkpoint, that of the least change.

    Its own comes first, then exact ones that headers settle, those that values decide, and inexact ones. ``parallel``
    is the number of devices that the model is split over.

    Raises:
        RefusedError: there is none; every reason is given.
    """
    source = detect(checkpoint.config).KEY
    formats = dict.fromkeys((source, *targets.candidates(engine), *FORMATS))
    found: list[tuple[int, str]] = []
    reasons = []
    for key in formats:
        if key == DECODED:
            continue
        try:
            plan = plan_export(
                checkpoint, Recipe(format=key, engine=engine, tensor_parallel=parallel)
            )
        except (RefusedError, InputError, UsageError) as error:
            reasons.append(f"{key}: {error.message}")
            continue
        fits = {layer.fit.verdict for layer in plan.layers.values()}
        rank = 2 if Verdict.INEXACT in fits else int(Verdict.READ in fits)
        found.append((0 if key == source else rank, key))
    if not found:
        raise RefusedError(
            f"{engine} loads these numbers in no format: {'; '.join(reasons)}",
            f"quantize the original model with --for {engine}",
        )
    return min(found, key=lambda item: item[0])[1]
