"""Guided statistics: the loss's gradients weigh the calibration tokens of each strip of a matrix's rows.

A unit before the blocks makes the weights, by a backward pass (`quantforge.model.backward`), and leaves them in a file
beside the journal. A block is then observed by several passes: in each of them as many Hessians are summed as take no
more memory than those of its shared inputs would without a guide, and the strips that they belong to are rounded.

Matrices whose rows share parameters are rounded as one, under the mean of the weights of all their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.errors import IntegrityError, RefusedError
from quantforge.execution.progress import tell
from quantforge.execution.record import Record, checksum, merge
from quantforge.model.block import Weighed
from quantforge.model.statistics import Statistic, Statistics
from quantforge.model.token_weights import TokenWeights, clipped
from quantforge.numerics.allocator import trim
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.guidance import guided
from quantforge.quantizers import Rounded

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.execution.rounding import MatrixRounding
    from quantforge.model.block import BlockPart
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample

FILE = "guide.f32"  # in the directory of the journal


def opened_weights(planned: Planned, directory: Path, *, new: bool) -> TokenWeights:
    """Return the file of weights of a run, made anew or as an interrupted run has left it."""
    options = planned.recipe.calibration
    shape = (options.samples, options.length, planned.plan.guide)
    names = [*guided(planned.plan.tensors, planned.matched)]
    return TokenWeights(directory / FILE, names, shape, new=new)


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
    from quantforge.model.backward import backward  # with transformers, which takes seconds

    options = planned.recipe.calibration
    backward(
        checkpoint, planned.matched, sample.ids, weights, seed=options.seed,
        micro_batch=options.micro_batch, device=settings.device, activations=directory,
    )  # fmt: skip
    missing = sorted({*weights.linears} - weights.seen)
    if missing:
        raise RefusedError(
            f"{missing[0]}: no gradient of its output was seen",
            "leave --guide out",
            tensor=missing[0],
        )
    weights.finish()
    return {"guide": {name: checksum(weights.of(name), 0) for name in weights.linears}}


def check_weights(weights: TokenWeights, record: Record, directory: Path) -> None:
    """Compare the file of weights of an interrupted run with the record of its unit.

    Raises:
        IntegrityError: they differ.
    """
    for name, expected in record["guide"].items():
        if checksum(weights.of(name), 0) != expected:
            raise IntegrityError(
                f"{directory / FILE}: the weights of {name} are not what the interrupted run had written",
                f"start afresh: rm -r {directory}",
                file=str(directory / FILE),
            )


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows that are rounded under one Hessian.

    Attributes:
        key: of the shared input.
        linears: names inside of the block; several only where their rows share parameters.
        index: which of ``count`` strips of the rows.
        count: 1 for all rows.
    """

    key: str
    linears: tuple[str, ...]
    index: int = 0
    count: int = 1


class GuidedRounding:
    """Rounder of the linears of blocks under guided Hessians."""

    def __init__(self, planned: Planned, rounding: MatrixRounding, weights: TokenWeights) -> None:
        self._strips, self._rounding, self._weights = planned.plan.guide, rounding, weights

    def work(
        self,
        part: BlockPart,
        observed: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
        *,
        advance: bool,
    ) -> Record:
        """Observe, round and write the linears of a block; return its record.

        Args:
            part: the block, with the hidden states that reach it.
            observed: other statistics of its inputs, by key.
            targets: linears that are quantized.
            advance: whether the last pass replaces the hidden states by what the block returns.
        """
        record: Record = {}
        parts: dict[tuple[str, ...], list[tuple[dict[str, Rounded], float]]] = {}
        passes = [*_passes(part, [*self._all(part, targets)])]
        for index, strips in enumerate(passes):
            tell(f"block {part.index}: observing", share=index / len(passes))
            last = index == len(passes) - 1
            wanted = [
                Weighed(strip.key, frozenset({Statistic.HESSIAN}), self._of(part, strip, targets))
                for strip in strips
            ]
            found = part.observe_weighed(wanted, advance=advance and last)
            trim()
            for position, strip in enumerate(strips):
                tell(f"block {part.index}: rounding {', '.join(strip.linears)}")
                statistics = replace(
                    observed.get(strip.key, Statistics()),
                    tokens=found[position].tokens, hessian=found[position].hessian,
                )  # fmt: skip
                found[position] = Statistics()
                weights = {
                    targets[name].name: part.weight(name).tensor_split(strip.count)[strip.index]
                    for name in strip.linears
                }
                rounded = self._rounding.rounded(weights, statistics)
                size = _size(weights.values(), statistics)
                done = parts.setdefault(strip.linears, [])
                done.append((rounded, size))
                if len(done) == strip.count:
                    whole = {targets[name].name: part.weight(name) for name in strip.linears}
                    merge(record, self._rounding.write(_joined(done), whole, statistics))
                    del parts[strip.linears]
                trim()
        return record

    def _all(self, part: BlockPart, targets: Mapping[str, TensorPlan]) -> Iterator[Strip]:
        """Yield the strips of all linears, in computing order."""
        for shared in part.inputs:
            chosen = [name for name in shared.linears if name in targets]
            joint = tuple(name for name in chosen if _scheme(targets[name]).joint)
            if joint:
                yield Strip(shared.key, joint)
            for name in chosen:
                if name not in joint:
                    count = 1 if _scheme(targets[name]).whole else self._strips
                    yield from (
                        Strip(shared.key, (name,), index, count) for index in range(count)
                    )

    def _of(self, part: BlockPart, strip: Strip, targets: Mapping[str, TensorPlan]) -> Tensor:
        """Return the weights of the tokens for a strip ``[rows, length]``."""
        if strip.count > 1:
            (linear,) = strip.linears
            return clipped(self._weights.of(f"{part.name}.{linear}")[..., strip.index])
        rows = [targets[name].matrix[0] for name in strip.linears]
        found = [self._weights.of(f"{part.name}.{name}").mean(-1) for name in strip.linears]
        mean = sum(one.mul_(count / sum(rows)) for one, count in zip(found, rows, strict=True))
        assert isinstance(mean, Tensor)
        return clipped(mean)


def _scheme(tensor: TensorPlan):
    assert tensor.scheme is not None
    return tensor.scheme.weight


def _passes(part: BlockPart, strips: Sequence[Strip]) -> Iterator[list[Strip]]:
    """Yield strips together whose Hessians take no more than those of the shared inputs; one at least."""
    widths = {shared.key: part.weight(shared.linears[0]).shape[1] for shared in part.inputs}
    limit = sum(widths[key] ** 2 for key in {strip.key for strip in strips})
    together: list[Strip] = []
    for strip in strips:
        if together and sum(widths[one.key] ** 2 for one in [*together, strip]) > limit:
            yield together
            together = []
        together.append(strip)
    if together:
        yield together


def _size(weights, statistics: Statistics) -> float:
    """Return ``tr(W H W^T)`` of the diagonal of the Hessian: what relative errors are of."""
    assert statistics.hessian is not None
    diagonal = statistics.hessian.diagonal()
    return float(sum((weight.square() * diagonal).sum(dtype=torch.float64) for weight in weights))


def _joined(parts: Sequence[tuple[dict[str, Rounded], float]]) -> dict[str, Rounded]:
    """Return matrices whose strips were rounded one by one."""
    if len(parts) == 1:
        return parts[0][0]
    whole = sum(size for _, size in parts) or 1.0
    joined = {}
    for name, first in parts[0][0].items():
        strips = [rounded[name] for rounded, _ in parts]
        tensors = [strip.tensor for strip in strips]
        parameters = {
            key: torch.cat([tensor.parameters[key] for tensor in tensors])
            for key in first.tensor.parameters
        }
        codes = torch.cat([tensor.codes for tensor in tensors])
        events = tuple(dict.fromkeys(event for strip in strips for event in strip.events))
        figures = {key: sum(strip.figures[key] for strip in strips) for key in first.figures}
        errors = (strip.figures["error"] * size for strip, (_, size) in zip(strips, parts, strict=True))
        figures["error"] = sum(errors) / whole
        joined[name] = Rounded(
            QuantizedTensor(codes, parameters, first.tensor.scheme), events, figures
        )
    return joined
