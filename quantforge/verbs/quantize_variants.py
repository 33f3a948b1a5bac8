"""Quantize variants: several recipes of one model, whose calibration rows pass each block once for all of them.

Each variant keeps its own stage, lock, journal and writer, so that its bytes and its way of going on are those of the
separate command. Variants that ask for the same rows are run in lock step, those whose transforms change a block last;
guides, quantized inputs of the next block, ranges measured behind transforms and mixtures of experts are made one after
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from quantforge.checkpoint.disk import place_of_run
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import QUANTIZATION
from quantforge.errors import QuantForgeError, UsageError
from quantforge.execution.progress import followed, phase
from quantforge.formats.opening import open_model
from quantforge.planning.cited_files import cited
from quantforge.planning.planned_run import check_text
from quantforge.settings import Settings
from quantforge.verbs.asked_result import AskedResult, Outcome, Variant, wanted_of
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.imatrix import with_importance
from quantforge.verbs.quantize import sample_of, working
from quantforge.verbs.run_inputs import RunInputs


@dataclass(frozen=True, slots=True)
class AskedVariant:
    """A variant that can be made, as far as headers tell, and its settings."""

    wanted: AskedResult
    settings: Settings


@dataclass(frozen=True, slots=True)
class ReadyVariant:
    """A variant that this process makes.

    Attributes:
        number: among all that are asked for.
        asked: what it is.
        inputs: what decides its bytes.
        held: the stage, entered.
    """

    number: int
    asked: AskedVariant
    inputs: RunInputs
    held: ExitStack


@torch_defaults()
def quantize_variants(
    model: str | Path, variants: Sequence[Variant], settings: Settings | None = None
) -> list[Outcome]:
    """Quantize a model by several recipes; the same call again goes on after any interruption.

    Args:
        model: as of `quantize`.
        variants: what is wanted, each with an output of its own.
        settings: how to run; with ``join`` see `join_variants`.

    Returns:
        The outcomes, in the order of the variants.

    Raises:
        UsageError: two variants have one output, or processes would share them.
        QuantForgeError: as `quantize`; what headers and places tell of any variant is refused before work on any.
    """
    settings = settings or Settings()
    if settings.join:
        raise UsageError("several variants: processes share releases and sweeps", "leave join out")
    with followed(settings.progress), ExitStack() as stages:
        outcomes: dict[int, Outcome] = {}
        begun = []
        for number, one in enumerate(asked_variants(model, variants, settings)):
            held = stages.enter_context(ExitStack())
            finished = one.wanted.finished(one.settings) or one.wanted.begun(held, one.settings)
            if finished is not None:
                outcomes[number] = finished
                continue
            begun.append((number, one, held))
        opened = []
        with phase("reading", 0.05):
            for number, one, held in begun:
                with phase("", 1 / len(begun)):
                    inputs = one.wanted.read(one.settings)
                opened.append(ReadyVariant(number, one, inputs, held))
        while opened:
            group = [other for other in opened if together(opened[0], other)]
            opened = [other for other in opened if other not in group]
            with phase("", 0.94 * len(group) / len(begun)):
                outcomes.update(carry_out(group))
        return [outcomes[number] for number in range(len(variants))]


def asked_variants(
    model: str | Path, variants: Sequence[Variant], settings: Settings
) -> list[AskedVariant]:
    """Plan all variants; errors as `quantize_variants`."""
    places = [variant.out and place_of_run(variant.out.absolute()) for variant in variants]
    for place, variant in zip(places, variants, strict=True):
        if place is not None and places.count(place) > 1:
            raise UsageError(f"{variant.out}: two variants have this output", "name another one")
    with phase("planning", 0.01, "headers of the model"):
        checkpoint = open_model(resolve(str(model), settings.offline))
    cites = []
    for variant in variants:
        recipe, own = with_importance(model, variant.recipe, settings, None)
        cites.append((variant, *cited(recipe, own)))
    found, refusals = [], []
    for variant, recipe, own in cites:
        try:
            wanted = wanted_of(checkpoint, Variant(recipe, variant.out), own)
            check_text(wanted.planned, checkpoint, own)
            found.append(AskedVariant(wanted, own))
        except QuantForgeError as error:
            refusals.append((variant, error))
    if refusals:
        _refuse(refusals)
    return found


def _refuse(refusals: Sequence[tuple[Variant, QuantForgeError]]) -> None:
    """Raise the first refusal, with the others in its hint."""
    (variant, error), *others = refusals
    error.message = f"{variant.out}: {error.message}"
    more = [f"{other.out}: {refused.message}" for other, refused in others]
    error.hint = "; ".join(filter(None, [error.hint, *more]))
    error.args = (error.message,)
    raise error


def together(first: ReadyVariant, other: ReadyVariant) -> bool:
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
        and all(_shares_pass(ready) for ready in (first, other))
    )


def _shares_pass(ready: ReadyVariant) -> bool:
    from quantforge.execution.lockstep import shares_pass

    recipe, checkpoint = ready.inputs.planned.recipe, ready.inputs.checkpoint
    whole = checkpoint.facts.keys() <= {QUANTIZATION} and recipe.prune_experts is None
    return whole and shares_pass(ready.inputs.planned)


def carry_out(group: Sequence[ReadyVariant]) -> dict[int, Outcome]:
    """Run variants in lock step, and publish them; errors as `quantize`."""
    from quantforge.execution.lockstep import execute_together
    from quantforge.numerics.team import reproducible

    with ExitStack() as files:
        opened = []
        for ready in group:
            files.enter_context(ready.held.pop_all())  # left once it is published
            run = working(ready.inputs, ready.asked.wanted.stage, ready.asked.settings)
            opened.append(files.enter_context(run))
        with reproducible(), phase("rounding", 0.95):
            execute_together([work.run for work in opened], sample_of(group[0].inputs))
    return {ready.number: work.outcome[0] for ready, work in zip(group, opened, strict=True)}
