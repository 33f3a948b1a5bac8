"""Experts of a block of a calibrated run: each is observed, transformed, rounded and written, one after the other.

Each expert is a unit of its own in the journal, so that a run that is interrupted inside of a layer resumes after the
last expert that was done. What that one returns for its tokens is computed again then, for the next block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from quantforge.events import Event
from quantforge.execution.journal import Record, merge
from quantforge.execution.progress import tell
from quantforge.execution.units import expert_unit
from quantforge.model.expert_statistics import ExpertStatistics
from quantforge.model.statistics import Statistic
from quantforge.numerics.allocator import trim

if TYPE_CHECKING:
    from quantforge.execution.calibrated_block import BlockRounder, DoExpert, Observed
    from quantforge.model.block import DecoderBlock

LISTED = 8  # experts that an event names
HESSIAN = frozenset({Statistic.HESSIAN})


class ExpertRounder:
    """The work of one run on the experts of a block.

    Args:
        rounder: of the block.
        block: the block, with the tokens that reach its experts.
        observed: which statistics are wanted.
        add: whether what the experts return is added up, for the next block.
    """

    def __init__(
        self, rounder: BlockRounder, block: DecoderBlock, observed: Observed, *, add: bool
    ) -> None:
        assert block.experts is not None
        self._rounder, self._block, self._experts = rounder, block, block.experts
        self._add = add
        changed = rounder.tensors.changed(block)
        self._targets = {name: plan for name, plan in changed.items() if plan.expert >= 0}
        guided = rounder.guided is not None
        # Transforms judge single linears by their Hessians.
        judged = HESSIAN if rounder.changes else frozenset()
        rounded = bool(self._targets)
        self._before = self._statistics(observed.before | judged if rounded else frozenset())
        self._after = self._statistics(observed.after) if observed.after and rounded else None
        self._guide = self._statistics(HESSIAN) if guided and rounded else None

    def _statistics(self, wanted: frozenset[Statistic]) -> ExpertStatistics:
        options = self._rounder.recipe.calibration
        return ExpertStatistics(
            self._experts, wanted, everyone=options.experts == "all", seed=options.seed
        )

    def work(self, do_expert: DoExpert) -> Record:
        """Do all experts, each a unit of its own; return the record of what concerns them together.

        Args:
            do_expert: does an expert, unless it is done.
        """
        experts, block, tensors = self._experts, self._block, self._rounder.tensors
        assert experts.tokens is not None
        if self._add:
            experts.tokens.begin_outputs()
        numbers = experts.numbers
        counts = dict(zip(numbers, experts.tokens.counts(len(numbers)), strict=True))
        kept = {tensor.expert for tensor in tensors.kept(block).values()}
        written = {tensor.expert for tensor in self._targets.values()} | kept
        for index, number in enumerate(numbers):
            unit = expert_unit(block.index, number)
            tell(f"{unit} of {len(numbers)}", share=0.5 + 0.5 * index / len(numbers))
            # Where it is not written, files hold it in a tensor of all experts, which stays.
            work = partial(self._expert, number, counts[number])
            done = number in written and do_expert(unit, work)
            if self._add and not done:
                experts.run(number, *experts.tokens.of(number), {}, add=True)
            experts.release(number)
            trim()
        least = self._rounder.recipe.calibration.min_expert_tokens
        events = few_tokens(experts.name, counts, least) if self._targets else []
        return {"events": [event.to_json() for event in events]}

    def _expert(self, number: int, count: int) -> Record:
        """Transform, round and write one expert, to which ``count`` tokens are sent; return its record."""
        block, rounder, rounding = self._block, self._rounder, self._rounder.rounding
        mine = {name: plan for name, plan in self._targets.items() if plan.expert == number}
        inputs = [shared for shared in block.inputs if shared.expert == number]
        before = self._before.of(number, add=self._add)
        statistics = {shared.key: before[block.stack_of(shared.key)] for shared in inputs if before}
        record, statistics = rounder.transformed(block, statistics, mine)
        if self._after is not None and mine:
            after = self._after.of(number, add=False)
            for key, seen in statistics.items():
                statistics[key] = seen.with_ranges_of(after[block.stack_of(key)])
        quantized = {name: plan for name, plan in mine.items() if plan.scheme}
        rounded: Record = {}
        if rounder.guided is not None and self._guide is not None:
            rounded = rounder.guided.expert(block, self._guide, inputs, statistics, quantized)
        else:
            for shared in inputs:
                weights = {
                    quantized[name].name: block.weight(name)
                    for name in shared.linears
                    if name in quantized
                }
                if weights:
                    seen = statistics[shared.key]
                    found = rounding.round(weights, seen)
                    merge(rounded, rounding.write(found, weights, seen))
        for values in rounded.get("figures", {}).values():
            values["tokens"] = float(count)
        merge(record, rounded)
        for local, tensor in rounder.tensors.kept(block).items():
            if tensor.expert == number:
                rounding.output.write_kept(tensor, block.parameter(local))
        return record


def few_tokens(name: str, counts: Mapping[int, int], least: int) -> Sequence[Event]:
    """Return the event for experts of a module that saw fewer than ``least`` tokens, by their numbers."""
    few = sorted((count, number) for number, count in counts.items() if count < least)
    if not few:
        return []
    listed = ", ".join(f"{number} ({count})" for count, number in few[:LISTED])
    more = ", ..." if len(few) > LISTED else ""
    detail = f"{len(few)} of {len(counts)} experts saw fewer than {least} tokens: {listed}{more}"
    return [Event("expert-few-tokens", name, detail)]
