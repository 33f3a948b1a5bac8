"""Guided rounding: weight calibration tokens by output gradients, and round under these guided Hessians.

Token weights are computed by a backward pass (`guidance.backward`) in a unit before the blocks, and stored in a file
next to the journal, which an interrupted run reuses.

The rows of a matrix are divided into strips, and each strip is rounded under the Hessian of its own token weights. A
block is observed in several passes; each pass accumulates as many Hessians as fit in the memory that the Hessians of
its shared inputs take without a guide, and the corresponding strips are rounded after it. Matrices whose rows share
parameters are rounded as a whole, under the mean of the weights of all their rows.
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
from quantforge.execution.journal import Record, merge_records
from quantforge.execution.unit_output import checksum
from quantforge.model.block import WeightedInput
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.allocator import trim
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.gradient_options import quantized_linears
from quantforge.progress import report_step
from quantforge.quantizers import Rounded
from quantforge.quantizers.guidance.token_weights import TokenWeights, clip_largest

if TYPE_CHECKING:
    from quantforge.architectures import SharedInput
    from quantforge.execution.rounding import MatrixRounder
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.model.block import DecoderBlock
    from quantforge.model.expert_statistics import ExpertStatistics
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan
    from quantforge.quantizers.guidance.gradients import OutputGradients
    from quantforge.scheme import Scheme
    from quantforge_calibration.sampler import Sample

TOKEN_WEIGHTS_FILE = "token_weights.f32"  # in the directory of the journal
HESSIAN = frozenset({Statistic.HESSIAN})

# Arguments: requested weighted statistics, and whether it is the last pass.
ObserveWeighted = Callable[[Sequence[WeightedInput], bool], list[Statistics]]


@contextmanager
def open_token_weights(
    planned: Planned, directory: Path, shape: torch.Size, strips: int, record: Record | None
) -> Iterator[TokenWeights]:
    """Open the file of token weights of a run.

    Args:
        planned: plan with the quantized linears.
        directory: directory of the journal.
        shape: number of rows and their length.
        strips: number of row strips of each linear.
        record: record of the unit that computed the file in an interrupted run; None to create it.

    Raises:
        IntegrityError: the existing file does not match its recorded checksums.
    """
    linears = quantized_linears(planned.plan.tensors, planned.model_layout)
    experts = {name for name, tensor in linears.items() if tensor.expert >= 0}
    dense_linears = [name for name in linears if name not in experts]
    runs = None if record is None else record.get("runs", {})
    path = directory / TOKEN_WEIGHTS_FILE
    with TokenWeights(path, dense_linears, (*shape, strips), sorted(experts), runs) as weights:
        for name, expected in record["token_weight_checksums"].items() if record else ():
            if checksum(weights.of(name), 0) != expected:
                raise IntegrityError(
                    f"the weights of {name} are not what the interrupted run had written",
                    f"start afresh: rm -r {directory}",
                    file=str(path),
                    subject=str(path),
                )
        yield weights


def compute_token_weights(
    weights: TokenWeights, inputs: RunInputs, sample: Sample, directory: Path
) -> Record:
    """Compute token weights by a backward pass; return the record of the unit with checksums by linear.

    Args:
        weights: file of token weights to fill.
        inputs: inputs of the run.
        sample: rows for which gradients are computed.
        directory: directory of the journal, used for hidden states.

    Raises:
        InputError: a weight, an activation or a gradient is not finite.
        RefusedError: a block passes more than hidden states to later ones, or a linear does not read each token once.
    """
    # With transformers, which takes seconds.
    from quantforge.quantizers.guidance.backward import backward

    options = inputs.planned.recipe.calibration
    total = len(sample.ids) * len([*weights.linears])

    def visit(output_gradients: OutputGradients) -> None:
        report_step(f"gradients of {output_gradients.name}", share=weights.count / total)
        weights(output_gradients)

    backward(
        inputs.checkpoint, inputs.planned.model_layout, sample, visit, seed=options.seed,
        micro_batch=options.micro_batch, device=inputs.settings.device, activations=directory,
    )  # fmt: skip
    unseen_linears = [
        name for name in weights.linears if weights.rows_seen[name] != len(sample.ids)
    ]
    if unseen_linears:
        raise RefusedError(
            f"{unseen_linears[0]}: gradients of its output were not seen once for every calibration row",
            f"--ignore '{unseen_linears[0]}' leaves it as it is",
            tensor=unseen_linears[0],
        )
    weights.finish()
    sums = {name: checksum(weights.of(name), 0) for name in weights.linears}
    return {"token_weight_checksums": sums, "runs": weights.runs}


@dataclass(frozen=True, slots=True)
class RowStrip:
    """Rows of linears that are rounded under one Hessian.

    Attributes:
        input_key: key of the shared input.
        linears: names in the block; several only if their rows share parameters.
        index: index of this strip among ``count`` strips of the rows.
        count: number of strips; 1 if the strip has all rows.
    """

    input_key: str
    linears: tuple[str, ...]
    index: int = 0
    count: int = 1


class RoundedRowStrip(NamedTuple):
    """A rounded strip of matrices, with the norms that their errors are relative to."""

    rounded: dict[str, Rounded]
    sizes: dict[str, float]


class GuidedRounding:
    """Rounder of the linears of blocks under guided Hessians."""

    def __init__(self, strips: int, rounding: MatrixRounder, weights: TokenWeights) -> None:
        """Use token ``weights``, which have ``strips`` strips for each linear."""
        self._strips, self._rounding, self._weights = strips, rounding, weights

    def round_block(
        self,
        block: DecoderBlock,
        statistics_by_input: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
        *,
        advance: bool,
    ) -> Record:
        """Observe, round and write the linears of a block except those of experts; return its record.

        Args:
            block: the block, with the hidden states that reach it.
            statistics_by_input: other statistics of its inputs, by key.
            targets: quantized linears by name in the block.
            advance: whether the last pass replaces the hidden states by the outputs of the block.
        """
        inputs = [shared for shared in block.inputs if shared.expert < 0]

        def observe_weighted(
            weighted_inputs: Sequence[WeightedInput], last: bool
        ) -> list[Statistics]:
            return block.observe_weighted(weighted_inputs, advance=advance and last)

        return self._round_inputs(block, inputs, statistics_by_input, targets, observe_weighted)

    def round_expert_linears(
        self,
        block: DecoderBlock,
        statistics: ExpertStatistics,
        inputs: Sequence[SharedInput],
        statistics_by_input: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
    ) -> Record:
        """Observe, round and write the linears of one expert; return its record.

        Args:
            block: the block, with the tokens that reach its experts.
            statistics: accumulates Hessians of the experts.
            inputs: shared inputs of the expert.
            statistics_by_input: other statistics of its inputs, by key.
            targets: quantized linears by name in the block.
        """

        def observe_weighted(
            weighted_inputs: Sequence[WeightedInput], last: bool
        ) -> list[Statistics]:
            del last
            return [
                statistics.compute_weighted(
                    inputs[0].expert,
                    block.stack_parameter_of(weighted_input.key),
                    weighted_input.weights,
                )
                for weighted_input in weighted_inputs
            ]

        return self._round_inputs(block, inputs, statistics_by_input, targets, observe_weighted)

    def _round_inputs(
        self,
        block: DecoderBlock,
        inputs: Sequence[SharedInput],
        statistics_by_input: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
        observe_weighted: ObserveWeighted,
    ) -> Record:
        record: Record = {}
        strips_by_input: dict[tuple[str, ...], list[RoundedRowStrip]] = {}
        passes = [*_group_into_passes(block, [*self._strips_with_own_hessian(inputs, targets)])]
        for index, strips in enumerate(passes):
            report_step(f"block {block.index}: observing", share=index / len(passes))
            weights = [self._token_weights(block, strip, targets, record) for strip in strips]
            weighted_inputs = [
                WeightedInput(strip.input_key, HESSIAN, weight)
                for strip, weight in zip(strips, weights, strict=True)
            ]
            observed_statistics = observe_weighted(weighted_inputs, index == len(passes) - 1)
            trim()
            for strip in strips:
                report_step(f"block {block.index}: rounding {', '.join(strip.linears)}")
                plain_statistics = statistics_by_input.get(strip.input_key, Statistics())
                guided_statistics = observed_statistics.pop(0)
                statistics = replace(
                    plain_statistics,
                    tokens=guided_statistics.tokens,
                    hessian=guided_statistics.hessian,
                )
                strips_done = strips_by_input.setdefault(strip.linears, [])
                strips_done.append(self._rounded(block, strip, statistics, targets))
                if len(strips_done) == strip.count:
                    source_weights = {
                        targets[name].name: block.weight(name) for name in strip.linears
                    }
                    rounded = _join_strips(strips_by_input.pop(strip.linears))
                    merge_records(record, self._rounding.write(rounded, source_weights, statistics))
                trim()
        return record

    def _strips_with_own_hessian(
        self, inputs: Iterable[SharedInput], targets: Mapping[str, TensorPlan]
    ) -> Iterator[RowStrip]:
        """Yield the strips of rows that are each rounded under a Hessian of their own, in the order of computation."""
        for shared in inputs:
            targeted = [name for name in shared.linears if name in targets]
            joint = tuple(name for name in targeted if _scheme(targets[name]).is_joint)
            if joint:
                yield RowStrip(shared.key, joint)
            for name in targeted:
                if name not in joint:
                    count = 1 if _scheme(targets[name]).rows_share_parameters else self._strips
                    yield from (
                        RowStrip(shared.key, (name,), index, count) for index in range(count)
                    )

    def _token_weights(
        self,
        block: DecoderBlock,
        strip: RowStrip,
        targets: Mapping[str, TensorPlan],
        record: Record,
    ) -> Tensor | None:
        """Return token weights ``[rows, length]`` for a strip; None, with an event, if all are 0."""
        rows = [targets[name].matrix[0] for name in strip.linears]
        token_weights = [self._weights.of(f"{block.name}.{name}") for name in strip.linears]
        if strip.count > 1:
            weights = token_weights[0][..., strip.index]
        else:
            means = (
                weights.mean(-1) * (count / sum(rows))
                for weights, count in zip(token_weights, rows, strict=True)
            )
            weights = torch.stack([*means]).sum(0)
        if bool(weights.any()):
            return clip_largest(weights)
        tensor_names = ", ".join(targets[name].name for name in strip.linears)
        detail = f"strip {strip.index + 1} of {strip.count}: no gradient reaches these rows"
        merge_records(record, {"events": [Event("no-gradient", tensor_names, detail).to_json()]})
        return None

    def _rounded(
        self,
        block: DecoderBlock,
        strip: RowStrip,
        statistics: Statistics,
        targets: Mapping[str, TensorPlan],
    ) -> RoundedRowStrip:
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
        return RoundedRowStrip(self._rounding.round(weights, statistics), sizes)


def _group_into_passes(block: DecoderBlock, strips: Sequence[RowStrip]) -> Iterator[list[RowStrip]]:
    """Group strips so that the Hessians of a group take no more memory than those of the shared inputs."""
    widths = {shared.key: block.weight(shared.linears[0]).shape[1] for shared in block.inputs}
    limit = sum(widths[key] ** 2 for key in {strip.input_key for strip in strips})
    pending: list[RowStrip] = []
    for strip in strips:
        if pending and sum(widths[other.input_key] ** 2 for other in [*pending, strip]) > limit:
            yield pending
            pending = []
        pending.append(strip)
    if pending:
        yield pending


def _join_strips(strips: Sequence[RoundedRowStrip]) -> dict[str, Rounded]:
    """Concatenate the rounded strips of matrices; the error is averaged over strips, weighted by their norms."""
    if len(strips) == 1:
        return strips[0].rounded
    joined = {}
    for name, first in strips[0].rounded.items():
        rounded_strips = [strip.rounded[name] for strip in strips]
        tensors = [rounded_strip.tensor for rounded_strip in rounded_strips]
        parameters = {
            key: torch.cat([tensor.parameters[key] for tensor in tensors])
            for key in first.tensor.parameters
        }
        codes = torch.cat([tensor.codes for tensor in tensors])
        events = dict.fromkeys(
            event for rounded_strip in rounded_strips for event in rounded_strip.events
        )
        metrics = dict.fromkeys(
            (key for rounded_strip in rounded_strips for key in rounded_strip.figures), 0.0
        )
        total_size = sum(strip.sizes[name] for strip in strips) or 1.0
        for rounded_strip, strip in zip(rounded_strips, strips, strict=True):
            for key, value in rounded_strip.figures.items():
                metrics[key] += value * strip.sizes[name] / total_size if key == "error" else value
        tensor = QuantizedTensor(codes, parameters, first.tensor.scheme)
        joined[name] = Rounded(tensor, tuple(events), metrics)
    return joined


def _scheme(tensor: TensorPlan) -> Scheme:
    assert tensor.scheme is not None
    return tensor.scheme.weight
