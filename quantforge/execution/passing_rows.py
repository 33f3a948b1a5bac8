"""Calibration rows on their way through the blocks of a model, as a run asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.model.observe import Accumulator
from quantforge.planning.planner import Planned
from quantforge.quantizers import needs
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.model.statistics import Statistics
    from quantforge.model.stream import ModelStream
    from quantforge_calibration.sampler import Sample


def stream_of(
    checkpoint: Checkpoint, planned: Planned, sample: Sample, settings: Settings, directory: Path
) -> ModelStream:
    """Return the blocks with the rows that reach them; ``directory`` is for hidden states on disk."""
    from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

    options = planned.recipe.calibration
    return ModelStream(
        checkpoint, planned.matched, sample.ids, micro_batch=options.micro_batch, device=settings.device,
        activations=directory if settings.activations == "disk" else None, precision=options.precision,
    )  # fmt: skip


def observe_head(planned: Planned, stream: ModelStream) -> Statistics:
    """Observe what a quantized head reads, the output of the final norm, when the rows are behind the last block."""
    total = Accumulator(needs(planned.plan.rounder, importance=planned.recipe.rounding.weighs))
    for states in stream.final_hidden():
        total.add(states.reshape(-1, states.shape[-1]))
    return total.result()
