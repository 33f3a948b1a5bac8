"""Importance of input columns (imatrix): observe it on calibration rows, or read it from a llama.cpp imatrix file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.artifacts import manifest
from quantforge.errors import RefusedError
from quantforge.files.opener import changed_error
from quantforge.files.reader import Checkpoint
from quantforge.formats.gguf.importance_file import Imatrix, WeightImportance, read_imatrix
from quantforge.model.accumulator import Accumulator
from quantforge.model.statistics import Statistic, Statistics
from quantforge.planning.importance_check import importance_sizes, names_in_gguf
from quantforge.planning.planner import Planned
from quantforge.progress import report_step

if TYPE_CHECKING:
    from quantforge_calibration.sampler import Sample

_SQUARES = frozenset({Statistic.SQUARES})


@torch.inference_mode()
def observe_importance(
    checkpoint: Checkpoint,
    planned: Planned,
    sample: Sample,
    device: str,
    activations: Path | None = None,
) -> Imatrix:
    """Run the calibration rows through the model; return the mean square of each input column of every linear.

    ``activations`` is a directory for hidden states on disk, None to keep them in memory.

    Raises:
        InputError: a weight or an activation is not finite.
        RefusedError: the model has experts.
    """
    from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

    model_layout, options = planned.model_layout, planned.recipe.calibration
    if any(tensor.expert >= 0 for tensor in model_layout.tensors):
        raise RefusedError(
            f"{planned.plan.model}: it has experts, what each of them reads is not observed for an importance file,"
            " and one without them is not complete",
            "leave --imatrix out: --method gptq and awq observe every expert in calibration text",
        )
    imatrix_places = names_in_gguf(planned.plan.tensors, planned.model_layout)
    entries: dict[str, WeightImportance] = {}

    def add(weight: str, statistics: Statistics) -> None:
        if weight in imatrix_places and statistics.squares is not None:
            entries[imatrix_places[weight].name] = WeightImportance(
                statistics.squares.cpu()[None], statistics.tokens
            )

    with ModelStream(
        checkpoint, model_layout, sample, micro_batch=options.micro_batch, device=device,
        activations=activations, precision=options.precision,
    ) as stream:  # fmt: skip
        for block in stream:
            report_step(f"block {block.index}: observing", block.index, model_layout.blocks)
            block_statistics = block.observe(
                {shared.key: _SQUARES for shared in block.inputs}, advance=True
            )
            for shared in block.inputs:
                for linear in shared.linears:
                    add(block.stored_name(f"{linear}.weight"), block_statistics[shared.key])
            if not block.advanced:
                block.advance()
        total = Accumulator(_SQUARES)
        for states in stream.final_hidden():
            total.add(states.reshape(-1, states.shape[-1]))
    if model_layout.architecture is not None and not model_layout.tied:
        add(
            model_layout.by_name[f"{model_layout.architecture.head}.weight"].header.name,
            total.result(),
        )
    return Imatrix(entries, options.source, len(sample.ids), options.length)


def read_unchanged_importance(planned: Planned, path: Path) -> dict[str, Tensor]:
    """Read an importance file and check that it did not change while being read.

    Raises:
        InputError: as `read_importance`.
        IntegrityError: the file changed.
    """
    digest = manifest.sha256(path, None)
    importance = read_importance(path, planned)
    if manifest.sha256(path, None) != digest:
        raise changed_error(path)
    return importance


def read_importance(path: Path, planned: Planned) -> dict[str, Tensor]:
    """Read an importance file: mean squares ``[in_features]`` by the name of the source tensor.

    Raises:
        InputError: the file is damaged, or its number of columns differs from that of a weight.
    """
    imatrix_places = names_in_gguf(planned.plan.tensors, planned.model_layout)
    columns = [tensor for tensor in planned.plan.quantized() if tensor.name in imatrix_places]
    importance: dict[str, Tensor] = {}
    imatrix = read_imatrix(path, importance_sizes(columns, imatrix_places))
    for tensor in columns:
        location = imatrix_places[tensor.name]
        entry = imatrix.entries.get(location.name)
        if entry is not None:
            importance[tensor.name] = entry.means.view(-1, tensor.matrix[1])[
                max(0, location.expert)
            ]
    return importance
