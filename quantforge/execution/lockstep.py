"""Runs of one source in lock step: calibration rows pass each block once, and every run rounds what it observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantforge.execution.observers import Observer, wanted_of
from quantforge.execution.progress import tell
from quantforge.model.statistics import Statistic, Statistics
from quantforge.quantizers import block_method_of

if TYPE_CHECKING:
    from quantforge.execution.calibrated_block import CalibratedBlock
    from quantforge.execution.execute import Run
    from quantforge.model.block import BlockPart
    from quantforge.planning.planner import Planned
    from quantforge_calibration.sampler import Sample


@dataclass(frozen=True, slots=True, eq=False)
class SeenTogether:
    """Observers of a run that looked at a block, with the statistics that the run asked for, by shared input."""

    observers: Sequence[Observer]
    statistics: Mapping[str, Statistics]


def leaves_source(planned: Planned) -> bool:
    """Return whether blocks keep the source's weights and states, so that runs may share a pass."""
    plan = planned.plan
    stacks = any(kind.stacks for kind in planned.matched.layers)
    from_source = planned.recipe.calibration.propagate == "source"
    return from_source and not (
        stacks or plan.guide or plan.transforms or block_method_of(plan.rounder)
    )


def observe_together(
    blocks: Sequence[CalibratedBlock], part: BlockPart, *, advance: bool
) -> list[SeenTogether]:
    """Pass the rows through a block once for several runs, and return what each would have observed alone.

    Sums of one statistic do not depend on the others. A run sees only those that it asked for, because what a rounder
    does may depend on which are there.
    """
    watching = [block.watching(part) for block in blocks]
    needs: dict[str, frozenset[Statistic]] = {}
    for observers, read in watching:
        for key in read:
            needs[key] = needs.get(key, frozenset()) | wanted_of(observers)
    tell(f"block {part.index}: observing", share=0.0)
    everyone = [observer for observers, _ in watching for observer in observers]
    with ExitStack() as hooks:
        for observer in everyone:
            hooks.enter_context(observer.listening(part.module))
        found = part.observe(
            needs, advance=advance, whole=any(observer.whole for observer in everyone)
        )
    return [
        SeenTogether(
            observers,
            {key: found[key].only(wanted_of(observers)) for key in read if key in found},
        )
        for observers, read in watching
    ]


def execute_together(runs: Sequence[Run], sample: Sample | None) -> None:
    """Execute runs of one source in lock step; the rows pass each block once for all of them.

    Several runs have to leave the source as it is (`leaves_source`) and to have equal calibration options.
    Errors as `Run.execute`.
    """
    learns = any(run.learns for run in runs)
    with torch.no_grad(), torch.inference_mode(mode=not learns):
        for run in runs:
            run.begin(calibrated=sample is not None)
        if sample is not None:
            with ExitStack() as guides:
                for run in runs:
                    guides.enter_context(run.guided(sample))
                _stream(runs, sample)
            for run in runs:
                run.tune(sample)
        for run in runs:
            run.finish(calibrated=sample is not None)


def _stream(runs: Sequence[Run], sample: Sample) -> None:
    """Pass the calibration rows through the blocks as far as any unit of any run needs them."""
    last = max(run.last for run in runs)
    if last < 0:
        return
    with runs[0].streaming(sample) as stream:
        for part in stream:
            ends = part.index == last  # nobody reads what it computes
            missing = [run for run in runs if not run.has(part.index)]
            seen: Mapping[int, SeenTogether] = {}
            if len(missing) > 1:
                blocks = [run.block for run in missing]
                found = observe_together(blocks, part, advance=not ends)
                seen = {id(run): one for run, one in zip(missing, found, strict=True)}
            for run in runs:
                run.pass_block(part, seen.get(id(run)), ends=ends)
            if ends:
                break
            if not part.advanced:
                part.advance()
        for run in runs:
            if run.late:
                run.pass_head(stream)
