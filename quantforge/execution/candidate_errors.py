"""Estimate the output error of candidate schemes for each linear, in nats per token.

To second order, an error ``E`` of a weight changes the output distribution by a divergence of
``1/2 sum_t g_t^T E x_t x_t^T E^T g_t``, with ``x`` the input of the linear and ``g`` the gradient of its output
(`guidance.backward`). With the gradient's mean square over output rows in place of each row's own, this is
``1/2 tr(E H E^T)`` under the guided Hessian ``H``. Weights are rounded by the same solver as in the run, under the
plain Hessian, with one factorization for all candidates; nothing is written.

Two sums use only part of their terms: gradients are computed for some calibration rows, and only some rows of a matrix
are rounded (the Hessian used for rounding includes all calibration rows). On wren, for 7 x 6 matrices and 12
candidates, Kendall's tau between these estimates and those from all rows was at least 0.988 for each matrix, in two
thirds of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.execution.guide import HESSIAN, compute_token_weights, open_token_weights
from quantforge.model.accumulator import Accumulator
from quantforge.model.block import WeightedInput
from quantforge.model.expert_statistics import ExpertStatistics
from quantforge.model.statistics import Statistics
from quantforge.numerics.allocator import trim
from quantforge.planning.gradient_options import quantized_linears
from quantforge.planning.run_work import GRADIENT_ROWS, OUTPUT_ROWS
from quantforge.progress import phase, report_step
from quantforge.quantizers import load_rounder
from quantforge.quantizers.guidance.token_weights import TokenWeights

if TYPE_CHECKING:
    from quantforge.architectures import SharedInput
    from quantforge.execution.journal import Journal, Record
    from quantforge.execution.run_inputs import RunInputs
    from quantforge.model.block import DecoderBlock
    from quantforge.planning.planner import Planned
    from quantforge.quantizers import Rounder
    from quantforge.recipe import Recipe
    from quantforge.scheme import Scheme
    from quantforge_calibration.sampler import Sample

GRADIENTS_UNIT = "gradients"  # unit of the backward pass, before those of the blocks


def candidate_errors(
    inputs: RunInputs, sample: Sample, planned: Sequence[Planned], journal: Journal
) -> dict[str, list[float]]:
    """Return the error of each candidate scheme in nats per token, by the canonical name of the linear.

    Blocks that are already in the journal are not measured again.

    Args:
        inputs: inputs of the first candidate's run.
        sample: calibration rows.
        planned: one plan per candidate; they differ only in the schemes of the linears.
        journal: journal of the measurement; its directory holds hidden states and token weights.

    Raises:
        InputError: a weight, an activation or a gradient is not finite.
        RefusedError: gradients of the model cannot be computed.
    """
    first = planned[0]
    targets = [
        quantized_linears(candidate.plan.tensors, candidate.model_layout) for candidate in planned
    ]
    schemes = [
        {name: tensor.scheme.weight for name, tensor in linears.items() if tensor.scheme}
        for linears in targets
    ]
    gradient_rows = slice(None, None, max(1, len(sample.ids) // GRADIENT_ROWS))
    gradient_sample = sample.select(gradient_rows)
    units = [f"block {index}" for index in range(first.model_layout.blocks)]
    if all(unit in journal.done for unit in units):
        return _joined(journal.done[unit] for unit in units)
    directory, gradient_record = journal.directory, journal.done.get(GRADIENTS_UNIT)
    with open_token_weights(
        first, directory, gradient_sample.ids.shape, 1, gradient_record
    ) as weights:
        if gradient_record is None:
            with phase("", 0.5):
                gradient_record = compute_token_weights(weights, inputs, gradient_sample, directory)
                journal.commit(GRADIENTS_UNIT, gradient_record)
        errors = CandidateErrors(
            partial(_all_token_weights, weights, sample.ids.shape, gradient_rows),
            gradient_sample.ids.numel(),
            load_rounder(first.plan.rounder),
            first.recipe,
        )
        stream = inputs.stream(sample, directory)
        with torch.no_grad(), torch.inference_mode(), stream:
            for block in stream:
                if units[block.index] in journal.done:
                    block.advance()
                    continue
                with phase("", 0.5 / first.model_layout.blocks):
                    block_errors = errors.measure_block(block, schemes)
                journal.commit(units[block.index], {"nats": block_errors})
    return _joined(journal.done[unit] for unit in units)


def _all_token_weights(
    token_weights: TokenWeights, shape: torch.Size, rows: slice, linear: str
) -> Tensor:
    """Return the weights ``[rows, length]`` of all tokens for a linear; 0 in rows without gradients."""
    weights = torch.zeros(shape)
    weights[rows] = token_weights.of(linear)[..., 0]
    return weights


def _joined(records: Iterable[Record]) -> dict[str, list[float]]:
    """Merge the errors of all blocks into one dictionary."""
    return {name: nats for record in records for name, nats in record["nats"].items()}


@dataclass(frozen=True, slots=True)
class CandidateErrors:
    """Measures the errors of candidate schemes for the linears of a block.

    Attributes:
        token_weights: returns the weights ``[rows, length]`` of all tokens for a linear; 0 in rows without gradients.
        tokens: number of tokens with gradients.
        rounder: rounder of the run.
        recipe: recipe shared by the candidates.
    """

    token_weights: Callable[[str], Tensor]
    tokens: int
    rounder: Rounder
    recipe: Recipe

    def measure_block(
        self, block: DecoderBlock, schemes: Sequence[Mapping[str, Scheme]]
    ) -> dict[str, list[float]]:
        """Return the errors of one block's linears under the schemes of each candidate, and advance the block."""
        errors_by_linear: dict[str, list[float]] = {}
        linear_schemes = [
            (shared, _candidate_linears(shared, block, schemes)) for shared in block.inputs
        ]
        inputs = [
            (shared, linears) for shared, linears in linear_schemes if linears and shared.expert < 0
        ]
        passing = block.experts is None
        for index, (shared, linears) in enumerate(inputs):
            step_name = f"{block.name}: {', '.join(linears)}"
            report_step(f"{step_name}: observing", share=0.5 * index / len(inputs))
            token_weights = {
                linear: self.token_weights(f"{block.name}.{linear}") for linear in linears
            }
            plain_statistics, *guided_statistics = block.observe_weighted(
                [
                    WeightedInput(shared.key, HESSIAN),
                    *(
                        WeightedInput(shared.key, HESSIAN, token_weights[linear])
                        for linear in linears
                    ),
                ],
                advance=passing and index == len(inputs) - 1,
            )
            trim()
            report_step(f"{step_name}: rounding", share=0.5 * (index + 0.5) / len(inputs))
            errors_by_linear |= self._rounded(
                block, plain_statistics, dict(zip(linears, guided_statistics, strict=True)), schemes
            )
            trim()
        if block.experts is not None:
            if block.experts.tokens is None:
                block.observe({})
            errors_by_linear |= self._experts(block, schemes)
            block.advance_with_collected_tokens()
        elif not inputs:
            block.advance()
        return errors_by_linear

    def _experts(
        self, block: DecoderBlock, schemes: Sequence[Mapping[str, Scheme]]
    ) -> dict[str, list[float]]:
        """Return the errors of the experts of a block whose tokens have been collected."""
        errors_by_linear: dict[str, list[float]] = {}
        experts, options = block.experts, self.recipe.calibration
        assert experts is not None
        assert experts.tokens is not None
        inputs = {
            shared: linears
            for shared in block.inputs
            if shared.expert >= 0 and (linears := _candidate_linears(shared, block, schemes))
        }
        if not inputs:
            return errors_by_linear
        statistics = ExpertStatistics(
            experts, HESSIAN, all_tokens=options.expert_tokens == "all", seed=options.seed
        )
        for index, number in enumerate(experts.numbers):
            report_step(
                f"{block.name}: expert {number}", share=0.5 + 0.5 * index / len(experts.numbers)
            )
            tokens, _ = experts.tokens.routed_to(number)
            plain_statistics = statistics.compute(number, add=False)
            for shared, linears in inputs.items():
                if shared.expert != number:
                    continue
                guided_statistics = {}
                for linear in linears:
                    weights, total = (
                        self.token_weights(f"{block.name}.{linear}").flatten(),
                        Accumulator(HESSIAN),
                    )
                    sampled = tokens[weights[tokens] > 0]
                    experts.run(
                        number,
                        sampled,
                        weights[sampled].sqrt(),
                        {block.stack_parameter_of(linear): total},
                    )
                    guided_statistics[linear] = total.result()
                errors_by_linear |= self._rounded(
                    block,
                    plain_statistics[block.stack_parameter_of(shared.key)],
                    guided_statistics,
                    schemes,
                )
            experts.release(number)
            trim()
        return errors_by_linear

    def _rounded(
        self,
        block: DecoderBlock,
        plain_statistics: Statistics,
        guided_statistics: Mapping[str, Statistics],
        schemes: Sequence[Mapping[str, Scheme]],
    ) -> dict[str, list[float]]:
        """Round the linears of one input under each candidate; return their errors.

        Args:
            block: the block.
            plain_statistics: statistics used for rounding.
            guided_statistics: statistics of each linear with weighted tokens, used for the errors.
            schemes: schemes of each candidate.
        """
        # One key per linear and candidate, so that all share one factorization.
        linear_schemes = {
            f"{linear} {candidate}": (linear, scheme[f"{block.name}.{linear}"])
            for candidate, scheme in enumerate(schemes)
            for linear in guided_statistics
        }
        rows_independent = not any(
            scheme.rows_share_parameters for _, scheme in linear_schemes.values()
        )
        sampled = {
            linear: _sample_rows(block.weight(linear)) if rows_independent else block.weight(linear)
            for linear in guided_statistics
        }
        rounded = self.rounder.round_matrices(
            {key: sampled[linear] for key, (linear, _) in linear_schemes.items()},
            plain_statistics,
            {key: scheme for key, (_, scheme) in linear_schemes.items()},
            self.recipe.rounding,
        )
        errors_by_linear = {}
        for linear, statistics in guided_statistics.items():
            name = f"{block.name}.{linear}"
            mean = float(self.token_weights(name).sum(dtype=torch.float64)) / self.tokens
            scale = 0.5 * mean * len(block.weight(linear)) / len(sampled[linear])
            errors_by_linear[name] = [
                scale
                * _error(
                    sampled[linear], rounded[f"{linear} {candidate}"].tensor.decode(), statistics
                )
                for candidate in range(len(schemes))
            ]
        return errors_by_linear


def _candidate_linears(
    shared: SharedInput, block: DecoderBlock, schemes: Sequence[Mapping[str, Scheme]]
) -> list[str]:
    """Return the linears of an input that are rounded."""
    return [linear for linear in shared.linears if f"{block.name}.{linear}" in schemes[0]]


def _sample_rows(weight: Tensor) -> Tensor:
    """Return a subset of rows that represents all of them; valid if rows are rounded independently."""
    return weight[:: max(1, len(weight) // OUTPUT_ROWS)].contiguous()


def _error(weight: Tensor, rounded: Tensor, statistics: Statistics) -> float:
    """Return ``tr(E H E^T)``; 0 if no gradient reaches the linear."""
    if statistics.hessian is None:
        return 0.0
    error = weight.float() - rounded.to(weight.device)
    return float(((error @ statistics.hessian) * error).sum(dtype=torch.float64))
