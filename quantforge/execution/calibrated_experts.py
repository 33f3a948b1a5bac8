"""Experts of a block of a calibrated run: observe, transform, round and write them one after the other.

Each expert is a unit of its own in the journal, so that a run interrupted within a layer resumes after the last
finished expert. Outputs of finished experts are then computed again for the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from quantforge.events import Event
from quantforge.execution.block_transforms import apply_transforms
from quantforge.execution.journal import Record, merge_records
from quantforge.execution.units import expert_unit
from quantforge.model.expert_statistics import ExpertStatistics
from quantforge.model.statistics import Statistic
from quantforge.numerics.allocator import trim
from quantforge.progress import report_step

if TYPE_CHECKING:
    from quantforge.execution.block_tensors import BlockTensors
    from quantforge.execution.guide import GuidedRounding
    from quantforge.execution.observation import Observation
    from quantforge.execution.rounding import MatrixRounder
    from quantforge.model.block import DecoderBlock

MAX_LISTED_EXPERTS = 8  # in the text of an event
HESSIAN = frozenset({Statistic.HESSIAN})
# Runs the unit of an expert nested in a block unless it is done; returns whether it ran.
ProcessExpert = Callable[[str, Callable[[], Record]], bool]


class ExpertRounder:
    """Observes, transforms, rounds and writes the experts of one block.

    Args:
        rounding: rounds and writes matrices.
        tensors: planned tensors, by block.
        guided_rounding: rounds linears under guided Hessians; None without a guide.
        block: the block, with the tokens that reach its experts.
        observation: statistics that the run needs.
        accumulate_outputs: whether to sum the outputs of the experts for the next block.
    """

    def __init__(
        self,
        rounding: MatrixRounder,
        tensors: BlockTensors,
        guided_rounding: GuidedRounding | None,
        block: DecoderBlock,
        observation: Observation,
        *,
        accumulate_outputs: bool,
    ) -> None:
        assert block.experts is not None
        self._rounding, self._tensors, self._guided_rounding = rounding, tensors, guided_rounding
        self._block, self._experts = block, block.experts
        self._accumulate_outputs = accumulate_outputs
        modified = tensors.modified_linears(block)
        self._targets = {name: plan for name, plan in modified.items() if plan.expert >= 0}
        # Transforms measure the error of single linears with their Hessians.
        hessian_if_transformed = HESSIAN if rounding.planned.plan.transforms else frozenset()
        has_targets = bool(self._targets)
        self._statistics_before = self._statistics(
            observation.before_transforms | hessian_if_transformed if has_targets else frozenset()
        )
        self._statistics_after = (
            self._statistics(observation.after_transforms)
            if observation.after_transforms and has_targets
            else None
        )
        self._hessians = (
            self._statistics(HESSIAN) if guided_rounding is not None and has_targets else None
        )

    def _statistics(self, needed: frozenset[Statistic]) -> ExpertStatistics:
        options = self._rounding.planned.recipe.calibration
        return ExpertStatistics(
            self._experts, needed, all_tokens=options.expert_tokens == "all", seed=options.seed
        )

    def round_experts(self, process_expert: ProcessExpert) -> Record:
        """Process all experts, each as a unit; return the record of events that concern them together.

        Args:
            process_expert: runs the unit of an expert unless it is done.
        """
        experts, block, tensors = self._experts, self._block, self._tensors
        assert experts.tokens is not None
        if self._accumulate_outputs:
            experts.tokens.begin_outputs()
        numbers = experts.numbers
        counts = dict(zip(numbers, experts.tokens.counts_by_expert(len(numbers)), strict=True))
        experts_with_unquantized = {tensor.expert for tensor in tensors.unquantized(block).values()}
        written_experts = {
            tensor.expert for tensor in self._targets.values()
        } | experts_with_unquantized
        for index, number in enumerate(numbers):
            unit = expert_unit(block.index, number)
            report_step(f"{unit} of {len(numbers)}", share=0.5 + 0.5 * index / len(numbers))
            # An expert without tensors of its own is stored in an unquantized tensor of all experts.
            round_expert = partial(self._round_expert, number, counts[number])
            is_finished = number in written_experts and process_expert(unit, round_expert)
            if self._accumulate_outputs and not is_finished:
                experts.run(number, *experts.tokens.routed_to(number), {}, add=True)
            experts.release(number)
            trim()
        min_tokens = self._rounding.planned.recipe.calibration.min_expert_tokens
        events = few_token_events(experts.name, counts, min_tokens) if self._targets else []
        return {"events": [event.to_json() for event in events]}

    def _round_expert(self, number: int, count: int) -> Record:
        """Transform, round and write one expert that receives ``count`` tokens; return its record."""
        block, rounding = self._block, self._rounding
        expert_linears = {
            name: plan for name, plan in self._targets.items() if plan.expert == number
        }
        inputs = [shared for shared in block.inputs if shared.expert == number]
        statistics_before = self._statistics_before.compute(number, add=self._accumulate_outputs)
        statistics = {
            shared.key: statistics_before[block.stack_parameter_of(shared.key)]
            for shared in inputs
            if statistics_before
        }
        record, statistics = apply_transforms(rounding.planned, block, statistics, expert_linears)
        if self._statistics_after is not None and expert_linears:
            statistics_after = self._statistics_after.compute(number, add=False)
            for key, input_statistics in statistics.items():
                statistics[key] = input_statistics.with_ranges_of(
                    statistics_after[block.stack_parameter_of(key)]
                )
        quantized = {name: plan for name, plan in expert_linears.items() if plan.scheme}
        expert_record: Record = {}
        if self._guided_rounding is not None and self._hessians is not None:
            expert_record = self._guided_rounding.round_expert_linears(
                block, self._hessians, inputs, statistics, quantized
            )
        else:
            for shared in inputs:
                weights = {
                    quantized[name].name: block.weight(name)
                    for name in shared.linears
                    if name in quantized
                }
                if weights:
                    input_statistics = statistics[shared.key]
                    results = rounding.round(weights, input_statistics)
                    merge_records(expert_record, rounding.write(results, weights, input_statistics))
        for values in expert_record.get("metrics", {}).values():
            values["calibration_tokens"] = float(count)
        merge_records(record, expert_record)
        for local_name, tensor in self._tensors.unquantized(block).items():
            if tensor.expert == number:
                rounding.output.write_unquantized(tensor, block.parameter(local_name))
        return record


def few_token_events(name: str, counts: Mapping[int, int], min_tokens: int) -> Sequence[Event]:
    """Return an event listing the experts that received fewer than ``min_tokens`` tokens, if any."""
    rarely_used = sorted((count, number) for number, count in counts.items() if count < min_tokens)
    if not rarely_used:
        return []
    listed = ", ".join(f"{number} ({count})" for count, number in rarely_used[:MAX_LISTED_EXPERTS])
    ellipsis = ", ..." if len(rarely_used) > MAX_LISTED_EXPERTS else ""
    detail = f"{len(rarely_used)} of {len(counts)} experts saw fewer than {min_tokens} tokens: {listed}{ellipsis}"
    return [Event("expert-few-tokens", name, detail)]
