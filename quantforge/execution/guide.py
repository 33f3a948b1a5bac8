"""Weights of calibration tokens for guided statistics: a unit of a run before its blocks.

A backward pass (`guidance.backward`) leaves them in a file beside the journal; `guided_rounding` rounds under
them. A run that is killed afterwards goes on from that file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.errors import IntegrityError, RefusedError
from quantforge.execution.progress import tell
from quantforge.execution.journal import Record
from quantforge.execution.unit_output import checksum
from quantforge.planning.guidance import guided
from quantforge.quantizers.guidance.token_weights import TokenWeights

if TYPE_CHECKING:
    import torch

    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.planning.planner import Planned
    from quantforge.quantizers.guidance.gradients import OutputGradients
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample

FILE = "guide.f32"  # in the directory of the journal


@contextmanager
def token_weights(
    planned: Planned, directory: Path, shape: torch.Size, strips: int, record: Record | None
) -> Iterator[TokenWeights]:
    """Open the file of weights of a run.

    Args:
        planned: with the linears that are quantized.
        directory: of the journal.
        shape: of the rows: how many, and their length.
        strips: of each linear.
        record: of the unit in which an interrupted run has made it; None makes it anew.

    Raises:
        IntegrityError: the file of the interrupted run is not what its record says.
    """
    linears = guided(planned.plan.tensors, planned.matched)
    experts = {name for name, tensor in linears.items() if tensor.expert >= 0}
    every = [name for name in linears if name not in experts]
    runs = None if record is None else record.get("runs", {})
    path = directory / FILE
    with TokenWeights(path, every, (*shape, strips), sorted(experts), runs) as weights:
        for name, expected in record["guide"].items() if record else ():
            if checksum(weights.of(name), 0) != expected:
                raise IntegrityError(
                    f"{path}: the weights of {name} are not what the interrupted run had written",
                    f"start afresh: rm -r {directory}",
                    file=str(path),
                )
        yield weights


def observe_gradients(
    weights: TokenWeights,
    checkpoint: Checkpoint,
    planned: Planned,
    sample: Sample,
    settings: Settings,
    directory: Path,
) -> Record:
    """Fill the file of weights by a backward pass; return the record of the unit, with checksums by linear.

    Raises:
        InputError: a weight, an activation or a gradient is not finite.
        RefusedError: a block hands more to later ones than its states, or a linear does not read every token once.
    """
    from quantforge.quantizers.guidance.backward import (
        backward,  # with transformers, which takes seconds
    )

    options = planned.recipe.calibration
    total = len(sample.ids) * len([*weights.linears])

    def visit(seen: OutputGradients) -> None:
        tell(f"gradients of {seen.name}", share=weights.count / total)
        weights(seen)

    backward(
        checkpoint, planned.matched, sample, visit, seed=options.seed,
        micro_batch=options.micro_batch, device=settings.device, activations=directory,
    )  # fmt: skip
    missing = [name for name in weights.linears if weights.rows_seen[name] != len(sample.ids)]
    if missing:
        raise RefusedError(
            f"{missing[0]}: gradients of its output were not seen once for every calibration row",
            f"--ignore '{missing[0]}' leaves it as it is",
            tensor=missing[0],
        )
    weights.finish()
    sums = {name: checksum(weights.of(name), 0) for name in weights.linears}
    return {"guide": sums, "runs": weights.runs}
