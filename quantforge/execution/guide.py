"""Guided statistics: weights of calibration tokens from a backward pass, and rounding under Hessians that use them.

The weights are a unit of a run before its blocks. A backward pass (`guidance.backward`) leaves them in a file beside
the journal; a run that is killed afterwards resumes from that file.

Each strip of a matrix's rows is rounded under the Hessian of its own weights. A block is observed by several passes. In
each of them as many Hessians are summed as take no more memory than those of its shared inputs would without a guide,
and the strips that they belong to are rounded. Matrices whose rows share parameters are rounded as one, under the mean
of the weights of all their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quantforge.errors import IntegrityError, RefusedError
from quantforge.events import Event
from quantforge.execution.journal import Record, merge
from quantforge.execution.progress import tell
from quantforge.execution.unit_output import checksum
from quantforge.model.block import Weighed
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.allocator import trim
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.gradient_options import quantized_linears
from quantforge.quantizers import Rounded
from quantforge.quantizers.guidance.token_weights import TokenWeights, clipped

if TYPE_CHECKING:
    from quantforge.architectures import SharedInput
    from quantforge.execution.execute import RunInputs
    from quantforge.execution.rounding import MatrixRounding
    from quantforge.model.block import DecoderBlock
    from quantforge.model.expert_statistics import ExpertStatistics
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan
    from quantforge.quantizers.guidance.gradients import OutputGradients
    from quantforge.scheme import Scheme
    from quantforge_calibration.sampler import Sample

FILE = "guide.f32"  # in the directory of the journal
HESSIAN = frozenset({Statistic.HESSIAN})

# Returns the statistics that are wanted; the second: whether it is the last pass.
See = Callable[[Sequence[Weighed], bool], list[Statistics]]


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
    linears = quantized_linears(planned.plan.tensors, planned.model_layout)
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
    weights: TokenWeights, inputs: RunInputs, sample: Sample, directory: Path
) -> Record:
    """Fill the file of weights by a backward pass; return the record of the unit, with checksums by linear.

    Args:
        weights: the file.
        inputs: of the run.
        sample: the rows that have gradients.
        directory: of the journal, for hidden states.

    Raises:
        InputError: a weight, an activation or a gradient is not finite.
        RefusedError: a block hands more to later ones than its states, or a linear does not read every token once.
    """
    # With transformers, which takes seconds.
    from quantforge.quantizers.guidance.backward import backward

    options = inputs.planned.recipe.calibration
    total = len(sample.ids) * len([*weights.linears])

    def visit(seen: OutputGradients) -> None:
        tell(f"gradients of {seen.name}", share=weights.count / total)
        weights(seen)

    backward(
        inputs.checkpoint, inputs.planned.model_layout, sample, visit, seed=options.seed,
        micro_batch=options.micro_batch, device=inputs.settings.device, activations=directory,
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


class RoundedStrip(NamedTuple):
    """Rows of matrices that were rounded, with what their errors are relative to."""

    rounded: dict[str, Rounded]
    sizes: dict[str, float]


class GuidedRounding:
    """Rounder of the linears of blocks under guided Hessians."""

    def __init__(self, strips: int, rounding: MatrixRounding, weights: TokenWeights) -> None:
        """Round under ``weights``, which have so many strips for each linear."""
        self._strips, self._rounding, self._weights = strips, rounding, weights

    def work(
        self,
        block: DecoderBlock,
        observed: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
        *,
        advance: bool,
    ) -> Record:
        """Observe, round and write the linears of a block but those of experts; return its record.

        Args:
            block: the block, with the hidden states that reach it.
            observed: other statistics of its inputs, by key.
            targets: linears that are quantized.
            advance: whether the last pass replaces the hidden states by what the block returns.
        """
        inputs = [shared for shared in block.inputs if shared.expert < 0]

        def see(wanted: Sequence[Weighed], last: bool) -> list[Statistics]:
            return block.observe_weighed(wanted, advance=advance and last)

        return self._work(block, inputs, observed, targets, see)

    def expert(
        self,
        block: DecoderBlock,
        statistics: ExpertStatistics,
        inputs: Sequence[SharedInput],
        observed: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
    ) -> Record:
        """Observe, round and write the linears of one expert; return its record.

        Args:
            block: the block, with the tokens that reach its experts.
            statistics: of the experts, their Hessians.
            inputs: those of the expert.
            observed: as of `work`.
            targets: likewise.
        """

        def see(wanted: Sequence[Weighed], last: bool) -> list[Statistics]:
            del last
            return [
                statistics.weighed(inputs[0].expert, block.stack_of(one.key), one.weights)
                for one in wanted
            ]

        return self._work(block, inputs, observed, targets, see)

    def _work(
        self,
        block: DecoderBlock,
        inputs: Sequence[SharedInput],
        observed: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
        see: See,
    ) -> Record:
        record: Record = {}
        done: dict[tuple[str, ...], list[RoundedStrip]] = {}
        passes = [*_passes(block, [*self._strips_of(inputs, targets)])]
        for index, strips in enumerate(passes):
            tell(f"block {block.index}: observing", share=index / len(passes))
            weights = [self._token_weights(block, strip, targets, record) for strip in strips]
            wanted = [
                Weighed(strip.key, HESSIAN, weight)
                for strip, weight in zip(strips, weights, strict=True)
            ]
            found = see(wanted, index == len(passes) - 1)
            trim()
            for strip in strips:
                tell(f"block {block.index}: rounding {', '.join(strip.linears)}")
                own = observed.get(strip.key, Statistics())
                guided_statistics = found.pop(0)
                statistics = replace(
                    own, tokens=guided_statistics.tokens, hessian=guided_statistics.hessian
                )
                strips_done = done.setdefault(strip.linears, [])
                strips_done.append(self._rounded(block, strip, statistics, targets))
                if len(strips_done) == strip.count:
                    whole = {targets[name].name: block.weight(name) for name in strip.linears}
                    rounded = _joined(done.pop(strip.linears))
                    merge(record, self._rounding.write(rounded, whole, statistics))
                trim()
        return record

    def _strips_of(
        self, inputs: Iterable[SharedInput], targets: Mapping[str, TensorPlan]
    ) -> Iterator[Strip]:
        """Yield the strips of all linears, in computing order."""
        for shared in inputs:
            chosen = [name for name in shared.linears if name in targets]
            joint = tuple(name for name in chosen if _scheme(targets[name]).joint)
            if joint:
                yield Strip(shared.key, joint)
            for name in chosen:
                if name not in joint:
                    count = 1 if _scheme(targets[name]).whole else self._strips
                    yield from (Strip(shared.key, (name,), index, count) for index in range(count))

    def _token_weights(
        self, block: DecoderBlock, strip: Strip, targets: Mapping[str, TensorPlan], record: Record
    ) -> Tensor | None:
        """Return the weights of the tokens for a strip ``[rows, length]``, None with an event where all are 0."""
        rows = [targets[name].matrix[0] for name in strip.linears]
        found = [self._weights.of(f"{block.name}.{name}") for name in strip.linears]
        if strip.count > 1:
            weights = found[0][..., strip.index]
        else:
            means = (
                one.mean(-1) * (count / sum(rows)) for one, count in zip(found, rows, strict=True)
            )
            weights = torch.stack([*means]).sum(0)
        if bool(weights.any()):
            return clipped(weights)
        where = ", ".join(targets[name].name for name in strip.linears)
        detail = f"strip {strip.index + 1} of {strip.count}: no gradient reaches these rows"
        merge(record, {"events": [Event("guide-blind", where, detail).to_json()]})
        return None

    def _rounded(
        self,
        block: DecoderBlock,
        strip: Strip,
        statistics: Statistics,
        targets: Mapping[str, TensorPlan],
    ) -> RoundedStrip:
        weights = {
            targets[name].name: block.weight(name).tensor_split(strip.count)[strip.index]
            for name in strip.linears
        }
        assert statistics.hessian is not None
        diagonal = statistics.hessian.diagonal()
        sizes = {
            name: float((weight.square() * diagonal).sum(dtype=torch.float64))
            for name, weight in weights.items()
        }
        return RoundedStrip(self._rounding.round(weights, statistics), sizes)


def _passes(block: DecoderBlock, strips: Sequence[Strip]) -> Iterator[list[Strip]]:
    """Yield strips together whose Hessians take no more than those of the shared inputs; one at least."""
    widths = {shared.key: block.weight(shared.linears[0]).shape[1] for shared in block.inputs}
    limit = sum(widths[key] ** 2 for key in {strip.key for strip in strips})
    together: list[Strip] = []
    for strip in strips:
        if together and sum(widths[one.key] ** 2 for one in [*together, strip]) > limit:
            yield together
            together = []
        together.append(strip)
    if together:
        yield together


def _joined(strips: Sequence[RoundedStrip]) -> dict[str, Rounded]:
    """Return matrices whose strips were rounded one by one; their errors count by what they are relative to."""
    if len(strips) == 1:
        return strips[0].rounded
    found = {}
    for name, first in strips[0].rounded.items():
        parts = [strip.rounded[name] for strip in strips]
        tensors = [part.tensor for part in parts]
        parameters = {
            key: torch.cat([tensor.parameters[key] for tensor in tensors])
            for key in first.tensor.parameters
        }
        codes = torch.cat([tensor.codes for tensor in tensors])
        events = dict.fromkeys(event for part in parts for event in part.events)
        figures = dict.fromkeys((key for part in parts for key in part.figures), 0.0)
        whole = sum(strip.sizes[name] for strip in strips) or 1.0
        for part, strip in zip(parts, strips, strict=True):
            for key, value in part.figures.items():
                figures[key] += value * strip.sizes[name] / whole if key == "error" else value
        tensor = QuantizedTensor(codes, parameters, first.tensor.scheme)
        found[name] = Rounded(tensor, tuple(events), figures)
    return found


def _scheme(tensor: TensorPlan) -> Scheme:
    assert tensor.scheme is not None
    return tensor.scheme.weight
