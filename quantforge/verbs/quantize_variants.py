"""Quantize variants: several recipes of one model, whose calibration rows pass each block once for all of them.

Each variant keeps its own stage, lock, journal and writer, so that its bytes and its way of going on are those of the
separate command. Variants that leave the source's blocks as they are and ask for the same rows are run in lock step;
transforms, block methods, quantized inputs of the next block and mixtures of experts are made one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from quantforge.checkpoint.disk import place_of_run
from quantforge.checkpoint.hub import resolve
from quantforge.errors import QuantForgeError, UsageError
from quantforge.execution.progress import followed, phase
from quantforge.formats.opening import open_model
from quantforge.planning.cited_files import cited
from quantforge.settings import Settings
from quantforge.verbs.asked_result import AskedResult, Outcome, Variant, wanted_of
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.imatrix import with_importance
from quantforge.verbs.quantize import sample_of, working
from quantforge.verbs.run_inputs import RunInputs


@dataclass(frozen=True, slots=True)
class _Ready:
    place: int
    wanted: AskedResult
    inputs: RunInputs
    settings: Settings
    held: ExitStack  # the stage


@torch_defaults()
def quantize_variants(
    model: str | Path, variants: Sequence[Variant], settings: Settings | None = None
) -> list[Outcome]:
    """Quantize a model by several recipes; the same call again goes on after any interruption.

    Args:
        model: as of `quantize`.
        variants: what is wanted, each with an output of its own.
        settings: how to run; ``join`` is for one result.

    Returns:
        The outcomes, in the order of the variants.

    Raises:
        UsageError: two variants have one output.
        QuantForgeError: as `quantize`; what headers and places tell of any variant is refused before work on any.
    """
    settings = settings or Settings()
    if settings.join:
        raise UsageError("several variants: processes share one result", "leave --join out")
    places = [variant.out and place_of_run(variant.out.absolute()) for variant in variants]
    for place, variant in zip(places, variants, strict=True):
        if place is not None and places.count(place) > 1:
            raise UsageError(f"{variant.out}: two variants have this output", "name another one")
    with followed(settings.progress), ExitStack() as stages:
        with phase("planning", 0.01, "headers of the model"):
            checkpoint = open_model(resolve(str(model), settings.offline))
        asked = []
        for variant in variants:
            recipe, own = with_importance(model, variant.recipe, settings, None)
            asked.append((variant, *cited(recipe, own)))
        wanted, refusals = [], []
        for variant, recipe, own in asked:
            try:
                wanted.append(wanted_of(checkpoint, Variant(recipe, variant.out), own))
            except QuantForgeError as error:
                refusals.append((variant, error))
        if refusals:
            _refuse(refusals)
        outcomes: dict[int, Outcome] = {}
        ready = []
        for number, (result, (_, _, own)) in enumerate(zip(wanted, asked, strict=True)):
            held = stages.enter_context(ExitStack())
            finished = result.finished(own) or result.begun(held, own)
            if finished is not None:
                outcomes[number] = finished
                continue
            ready.append((number, result, own, held))
        opened = [
            _Ready(number, result, result.read(own), own, held)
            for number, result, own, held in ready
        ]
        while opened:
            group = [other for other in opened if _together(opened[0], other)]
            opened = [other for other in opened if other not in group]
            with phase("", 0.94 * len(group) / len(ready)):
                outcomes.update(_carried_out(group))
        return [outcomes[number] for number in range(len(variants))]


def _refuse(refusals: Sequence[tuple[Variant, QuantForgeError]]) -> None:
    """Raise the first refusal, with the others in its hint."""
    (variant, error), *others = refusals
    error.message = f"{variant.out}: {error.message}"
    more = [f"{other.out}: {refused.message}" for other, refused in others]
    error.hint = "; ".join(filter(None, [error.hint, *more]))
    error.args = (error.message,)
    raise error


def _together(first: _Ready, other: _Ready) -> bool:
    """Return whether two variants may share the pass of the rows."""
    if first is other:
        return True
    one_inputs, two_inputs = first.inputs, other.inputs
    if sample_of(one_inputs) is None or sample_of(two_inputs) is None:
        return False
    a, b = one_inputs.planned, two_inputs.planned
    return (
        a.recipe.calibration == b.recipe.calibration
        and one_inputs.source == two_inputs.source
        and [tensor.stored for tensor in a.matched.tensors]
        == [tensor.stored for tensor in b.matched.tensors]
        and all(_leaves_source(ready) for ready in (first, other))
    )


def _leaves_source(ready: _Ready) -> bool:
    from quantforge.execution.lockstep import leaves_source

    recipe, checkpoint = ready.inputs.planned.recipe, ready.inputs.checkpoint
    whole = not checkpoint.facts and recipe.prune_experts is None
    return whole and leaves_source(ready.inputs.planned)


def _carried_out(group: Sequence[_Ready]) -> dict[int, Outcome]:
    """Run variants in lock step, and publish them."""
    from quantforge.execution.lockstep import execute_together
    from quantforge.numerics.team import reproducible

    with ExitStack() as files:
        opened = []
        for ready in group:
            files.enter_context(ready.held.pop_all())  # left once it is published
            opened.append(
                files.enter_context(working(ready.inputs, ready.wanted.stage, ready.settings))
            )
        with reproducible(), phase("rounding", 0.95):
            execute_together([work.run for work in opened], sample_of(group[0].inputs))
    return {ready.place: work.outcome[0] for ready, work in zip(group, opened, strict=True)}
