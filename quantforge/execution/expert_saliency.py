"""Saliency of experts, by which ``--prune-experts`` chooses the experts to remove.

The saliency of an expert is the mean, over the calibration tokens routed to it, of the norm of its output times the
router weight (REAP, arXiv 2510.13999): how much the output of the layer would change without it. Rows pass through the
unmodified source, so that each layer is judged by its inputs in the complete model. An expert that receives no token
has saliency 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantforge.architectures.match import match_tensors
from quantforge.files.without_experts import RemovedExperts, plan_pruning

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.execution.calibration import CalibrationData
    from quantforge.files.reader import Checkpoint
    from quantforge.recipe import CalibrationOptions, Recipe
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample


def choose_removed_experts(
    source: Checkpoint,
    recipe: Recipe,
    calibrated: CalibrationData,
    settings: Settings,
    directory: Path,
) -> RemovedExperts:
    """Choose the experts that ``--prune-experts`` removes.

    Args:
        source: checkpoint with all experts.
        recipe: the share of experts to remove from each layer, and how to run the calibration rows.
        calibrated: calibration rows.
        settings: how to run.
        directory: directory for hidden states on disk.

    Raises:
        InputError: as `expert_saliency`; else as `plan_pruning`.
    """
    assert recipe.prune_experts is not None
    pruning = plan_pruning(source, recipe.prune_experts)
    states_directory = directory if settings.activations == "disk" else None
    rows, options = calibrated.sample, recipe.calibration
    return pruning.choose_experts(
        expert_saliency(source, rows, options, settings.device, states_directory)
    )


def expert_saliency(
    source: Checkpoint,
    rows: Tensor | Sample,
    options: CalibrationOptions,
    device: str,
    activations: Path | None = None,
) -> dict[int, list[float]]:
    """Return the saliency of each expert, ordered by number, by the index of its layer.

    Args:
        source: a model with a declared architecture.
        rows: calibration tokens ``[rows, length]``, or rows with images.
        options: micro-batch size and precision.
        device: device on which the blocks run.
        activations: directory for hidden states on disk, None to keep them in memory.

    Raises:
        InputError: a weight or an activation is not finite.
    """
    from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

    stored = [entry.to_stored_tensor() for entry in source.entries.values()]
    model_layout = match_tensors(source.config, stored)
    mixtures = [index for index, kind in enumerate(model_layout.layers) if kind.stacks]
    saliency: dict[int, list[float]] = {}
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
                saliency[block.index] = norms
            if block.index == mixtures[-1]:
                break
    return saliency
