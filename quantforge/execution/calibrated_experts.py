"""The experts of one block of a calibrated run: one after the other observed, transformed, rounded and written.

Each is a unit of its own in the journal, so that a run that is interrupted inside of a layer goes on behind the last
expert that was done. What it returns for its tokens is computed again then, for the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from quantforge.events import Event
from quantforge.execution.observers import with_ranges
from quantforge.execution.progress import tell
from quantforge.execution.journal import Record, merge
from quantforge.execution.transforming import transformed
from quantforge.execution.units import expert_unit
from quantforge.model.expert_statistics import ExpertStatistics
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.allocator import trim

if TYPE_CHECKING:
    from quantforge.architectures import SharedInput
    from quantforge.execution.block_tensors import BlockTensors
    from quantforge.execution.guided_rounding import GuidedRounding
    from quantforge.execution.rounding import MatrixRounding
    from quantforge.model.block import BlockPart
    from quantforge.model.experts import Experts
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan

LISTED = 8  # experts that an event names

HESSIAN = frozenset({Statistic.HESSIAN})

Do = Callable[[str, Callable[[], Record]], None]  # does a unit that is not done yet


# Rounds the linears of an expert, given its inputs, what was observed of them, and the plans.
Guide = Callable[
    [Sequence["SharedInput"], Mapping[str, Statistics], Mapping[str, "TensorPlan"]], Record
]


class Wanted(NamedTuple):
    """Statistics that observers want, before and after the transforms."""

    before: frozenset[Statistic]
    after: frozenset[Statistic]


class CalibratedExperts:
    """Worker on the experts of blocks whose tokens have been collected."""

    def __init__(self, planned: Planned, rounding: MatrixRounding, tensors: BlockTensors) -> None:
        self._plan, self._recipe = planned.plan, planned.recipe
        self._rounding, self._tensors = rounding, tensors

    def work(
        self,
        part: BlockPart,
        targets: Mapping[str, TensorPlan],
        wanted: Wanted,
        do: Do,
        *,
        add: bool,
        guided: GuidedRounding | None = None,
    ) -> Record:
        """Do all experts of a block, each a unit of its own; return the record of what concerns them together.

        Args:
            part: the block.
            targets: its linears that are quantized, or get zeros.
            wanted: what is observed.
            do: takes the name of a unit and its work, which it leaves if it is done.
            add: whether what the experts return is added up, for the next block.
            guided: rounds them where their statistics are guided.
        """
        experts = part.experts
        assert experts is not None
        assert experts.tokens is not None
        if add:
            experts.tokens.begin_outputs()
        mine = {name: plan for name, plan in targets.items() if plan.expert >= 0}
        if self._plan.transforms and mine:  # these judge single linears by their Hessians
            wanted = wanted._replace(before=wanted.before | {Statistic.HESSIAN})
        before, after = (
            self._statistics(experts, needs if mine else frozenset()) for needs in wanted
        )
        guide = None
        if guided is not None and mine:
            guide = partial(guided.expert, part, self._statistics(experts, HESSIAN))
        counts = dict(
            zip(experts.numbers, experts.tokens.counts(len(experts.numbers)), strict=True)
        )
        kept = {tensor.expert for tensor in self._tensors.kept(part).values()}
        written = {tensor.expert for tensor in mine.values()} | kept
        for index, number in enumerate(experts.numbers):
            inputs = [shared for shared in part.inputs if shared.expert == number]
            one = _Expert(number, inputs, before, after if wanted.after else None, guide)
            done = False

            def work(one: _Expert = one) -> Record:
                nonlocal done
                done = True
                return self._expert(part, one, mine, counts[one.number], add=add)

            share = 0.5 + 0.5 * index / len(experts.numbers)
            tell(f"{expert_unit(part.index, number)} of {len(experts.numbers)}", share=share)
            if number in written:  # else files hold it in a tensor of all experts, which stays
                do(expert_unit(part.index, number), work)
            if add and not done:
                experts.run(number, *experts.tokens.of(number), {}, add=True)
            experts.release(number)
            trim()
        events = self._few(experts.name, counts) if mine else []
        return {"events": [event.to_json() for event in events]}

    def _statistics(self, experts: Experts, needs: frozenset[Statistic]) -> ExpertStatistics:
        options = self._recipe.calibration
        return ExpertStatistics(
            experts, needs, everyone=options.experts == "all", seed=options.seed
        )

    def _expert(
        self,
        part: BlockPart,
        one: _Expert,
        targets: Mapping[str, TensorPlan],
        count: int,
        *,
        add: bool,
    ) -> Record:
        """Do one expert; ``count`` is the number of its tokens."""
        experts = part.experts
        assert experts is not None
        mine = {name: plan for name, plan in targets.items() if plan.expert == one.number}
        found = one.before.of(one.number, add=add)
        observed = {shared.key: found[part.stack_of(shared.key)] for shared in one.inputs if found}
        record, observed = transformed(
            self._plan.transforms, part, observed, mine, self._recipe.rounding, self._recipe.zeros
        )
        if one.after is not None and mine:
            seen = one.after.of(one.number, add=False)
            ranges = {shared.key: seen[part.stack_of(shared.key)] for shared in one.inputs}
            observed = with_ranges(observed, ranges)
        quantized = {name: plan for name, plan in mine.items() if plan.scheme}
        rounded: Record = {}
        if one.guide is not None:
            rounded = one.guide(one.inputs, observed, quantized)
        else:
            for shared in one.inputs:
                weights = {
                    plan.name: part.weight(name)
                    for name in shared.linears
                    if (plan := quantized.get(name)) is not None
                }
                if weights:
                    merge(rounded, self._rounding.shared(weights, observed[shared.key]))
        for figures in rounded.get("figures", {}).values():
            figures["tokens"] = float(count)
        merge(record, rounded)
        self._write_kept(part, one.number)
        return record

    def _write_kept(self, part: BlockPart, number: int) -> None:
        """Write the matrices of an expert that are not quantized, as the transforms left them."""
        for local, tensor in self._tensors.kept(part).items():
            if tensor.expert == number:
                self._rounding.output.keep(tensor, part.parameter(local))

    def _few(self, name: str, counts: Mapping[int, int]) -> Sequence[Event]:
        """Return the event for experts that saw few tokens or none."""
        least = self._recipe.calibration.min_expert_tokens
        few = sorted((count, number) for number, count in counts.items() if count < least)
        if not few:
            return []
        listed = ", ".join(f"{number} ({count})" for count, number in few[:LISTED])
        more = ", ..." if len(few) > LISTED else ""
        detail = (
            f"{len(few)} of {len(counts)} experts saw fewer than {least} tokens: {listed}{more}"
        )
        return [Event("expert-few-tokens", name, detail)]


class _Expert(NamedTuple):
    """One expert on its turn: its shared inputs, who observes them before and after the transforms, and its guide."""

    number: int
    inputs: Sequence[SharedInput]
    before: ExpertStatistics
    after: ExpertStatistics | None
    guide: Guide | None
