"""Saliency of experts: what a mixture would miss, by which `--prune-experts` chooses those that go.

Of an expert it is the mean, over the calibration tokens that the router sends to it, of the norm of what it returns
times the router's weight (REAP, arXiv 2510.13999): the part of the mixture's output that is gone without it. Rows pass
the source as it is, so that every layer is judged by what reaches it in the whole model. An expert that no token is
sent to has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantforge.architectures.match import match_tensors
from quantforge.files.without_experts import Removed, pruning_of

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.execution.calibration import Calibrated
    from quantforge.files.reader import Checkpoint
    from quantforge.recipe import CalibrationOptions, Recipe
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample


def removed_experts(
    source: Checkpoint, recipe: Recipe, calibrated: Calibrated, settings: Settings, directory: Path
) -> Removed:
    """Return the experts that ``--prune-experts`` removes.

    Args:
        source: with all of them.
        recipe: the share of every layer that is removed, and how the rows pass.
        calibrated: the rows.
        settings: how to run.
        directory: for hidden states on disk.

    Raises:
        InputError: as `expert_saliency`; else as `pruning_of`.
    """
    assert recipe.prune_experts is not None
    pruning = pruning_of(source, recipe.prune_experts)
    place = directory if settings.activations == "disk" else None
    rows, options = calibrated.sample, recipe.calibration
    return pruning.choose(expert_saliency(source, rows, options, settings.device, place))


def expert_saliency(
    source: Checkpoint,
    rows: Tensor | Sample,
    options: CalibrationOptions,
    device: str,
    activations: Path | None = None,
) -> dict[int, list[float]]:
    """Return the saliency of the experts of each layer that has any, by its index, in the order of their numbers.

    Args:
        source: a model with declarations.
        rows: calibration tokens ``[rows, length]``, or rows with images.
        options: how they pass.
        device: where.
        activations: directory for hidden states on disk, None to keep them in memory.

    Raises:
        InputError: a weight or an activation is not finite.
    """
    from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

    stored = [entry.header() for entry in source.entries.values()]
    model_layout = match_tensors(source.config, stored)
    mixtures = [index for index, kind in enumerate(model_layout.layers) if kind.stacks]
    found: dict[int, list[float]] = {}
    with (
        torch.inference_mode(),
        ModelStream(
            source, model_layout, rows, micro_batch=options.micro_batch, device=device,
            activations=activations, precision=options.precision,
        ) as stream,
    ):  # fmt: skip
        for block in stream:
            norms = block.advance()
            if block.experts is not None:
                found[block.index] = norms
            if block.index == mixtures[-1]:
                break
    return found
