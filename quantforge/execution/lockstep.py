"""Runs of one source in lock step: calibration rows pass each block once, and every run rounds what it observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from quantforge.execution.calibrated_block import observe_together

if TYPE_CHECKING:
    from quantforge.execution.calibrated_block import SeenTogether
    from quantforge.execution.execute import Run
    from quantforge_calibration.sampler import Sample


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
            _stream(runs, sample)
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
