"""Runs of one source in lock step: calibration rows pass each block once, and every run rounds what it observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantforge.execution.observers import Observer, observes_twice, wanted_of
from quantforge.execution.progress import tell
from quantforge.model.statistics import Statistic, Statistics

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


def shares_pass(planned: Planned) -> bool:
    """Return whether a run may share a pass: it reads a block only before it changes that."""
    plan = planned.plan
    stacks = any(kind.stacks for kind in planned.matched.layers)
    return not (stacks or plan.guide or observes_twice(plan))


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
            needs,
            advance=advance,
            keep=max(block.kept_rows for block in blocks),
            whole=any(observer.whole for observer in everyone),
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

    Several runs have to share the pass (`shares_pass`) and to have equal calibration options.
    Errors as `Run.execute`.
    """
    learns = any(run.tuned.any for run in runs)
    with torch.inference_mode(mode=not learns), torch.no_grad():
        for run in runs:
            run.begin(calibrated=sample is not None, runs=len(runs))
        if sample is not None:
            with ExitStack() as guides:
                for run in runs:
                    guides.enter_context(run.guided(sample))
                _stream(runs, sample)
            for run in runs:
                run.tuned.rest(sample)
        for run in runs:
            run.finish(calibrated=sample is not None)


def _stream(runs: Sequence[Run], sample: Sample) -> None:
    """Pass the calibration rows through the blocks as far as any unit of any run needs them."""
    last = max(run.last for run in runs)
    if last < 0:
        return
    with ExitStack() as streams:
        tuning = runs[0].tuned.streaming(sample) if runs[0].tuned.follows_any else None
        stream = streams.enter_context(tuning or runs[0].streaming(sample))
        for part in stream:
            if tuning is not None:
                tuning.begin_result()
            ends = part.index == last and tuning is None  # nobody reads what it computes
            missing = [run for run in runs if not run.has(part.index)]
            seen: dict[int, SeenTogether] = {}
            if len(missing) > 1:
                keys, blocks = map(id, missing), [run.block for run in missing]
                seen = dict(
                    zip(keys, observe_together(blocks, part, advance=not ends), strict=True)
                )
            changed = False
            for run in sorted(runs, key=lambda run: run.block.changes):
                if changed and run in missing:
                    part.restore()
                run.pass_block(part, seen.pop(id(run), None), ends=ends)
                changed = changed or (run in missing and run.block.changes)
            if ends:
                break
            if not part.advanced:
                part.advance()
            if tuning is not None:
                runs[0].tuned.block(tuning, part)
            if part.index == last:
                break
        for run in runs:
            if run.late:
                run.pass_head(stream)
