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
    from quantforge.model.hidden_states import HiddenStates
    from quantforge.model.statistics import Statistics
    from quantforge.model.stream import ModelStream
    from quantforge_calibration.sampler import Sample


def stream_of(
    checkpoint: Checkpoint,
    planned: Planned,
    sample: Sample,
    settings: Settings,
    directory: Path,
    states: HiddenStates | None = None,
) -> ModelStream:
    """Return the blocks with the rows that reach them.

    Args:
        checkpoint: of the model.
        planned: the run.
        sample: the rows.
        settings: how it runs.
        directory: for hidden states, if they wait on disk.
        states: a store for those between blocks, wherever others wait.
    """
    from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

    options, disk = planned.recipe.calibration, settings.activations == "disk"
    return ModelStream(
        checkpoint, planned.matched, sample, micro_batch=options.micro_batch, device=settings.device,
        activations=states or (directory if disk else None), precision=options.precision,
    )  # fmt: skip


def observe_head(planned: Planned, stream: ModelStream) -> Statistics:
    """Observe what a quantized head reads, the output of the final norm, when the rows are behind the last block."""
    total = Accumulator(needs(planned.plan.rounder, importance=planned.recipe.rounding.weighs))
    for states in stream.final_hidden():
        total.add(states.reshape(-1, states.shape[-1]))
    return total.result()
