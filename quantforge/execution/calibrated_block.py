"""One block of a calibrated run: observe the inputs of its linears, transform, round and write it.

Most statistics are of the block as it is in the source. Ranges of quantized inputs and of the KV cache must be of the
rounded block, so they are observed a second time if transforms have changed the block. Several runs can observe a block
in one pass (`observe`); each then transforms, rounds and writes it separately (`BlockRounder`).

Experts of a block are processed last, one after the other (`quantforge.execution.calibrated_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.execution.calibrated_experts import ExpertRounder
from quantforge.execution.journal import Record, merge_records
from quantforge.files.finite_values import check_finite
from quantforge.files.safetensors import torch_dtype
from quantforge.model.accumulator import Accumulator
from quantforge.model.statistics import Statistic, Statistics, statistics_for_inputs
from quantforge.numerics.allocator import trim
from quantforge.plans import Action, Plan
from quantforge.progress import report_step
from quantforge.quantizers import METHODS, is_sparse, load_transform, needs
from quantforge.quantizers.sparsity import sparsify, sparsity_figures
from quantforge.runtime.cache_scales import CachePeaks, attached_cache

if TYPE_CHECKING:
    from quantforge.execution.guide import GuidedRounding
    from quantforge.execution.rounding import MatrixRounder
    from quantforge.execution.unit_output import UnitOutput
    from quantforge.model.block import DecoderBlock
    from quantforge.model.stream import ModelStream
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan

# Runs the unit of an expert nested in a block unless it is done; returns whether it ran.
ProcessExpert = Callable[[str, Callable[[], Record]], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Which statistics of a block a run needs, and those observed so far.

    Attributes:
        inputs: keys of the shared inputs to observe.
        before_transforms: statistics of the inputs, observed on the unmodified block.
        after_transforms: statistics of the inputs, observed after the transforms.
        cache_peaks: largest magnitudes of keys and values in the KV cache; None if its scales are not measured.
        observe_again: whether the block is observed again after the transforms.
        statistics: observed statistics by key of the shared input.
    """

    inputs: Sequence[str]
    before_transforms: frozenset[Statistic]
    after_transforms: frozenset[Statistic]
    cache_peaks: CachePeaks | None
    observe_again: bool
    statistics: dict[str, Statistics]


def observe(
    block: DecoderBlock, rounders: Sequence[BlockRounder], *, advance: bool
) -> list[Observation]:
    """Run the calibration rows through a block once; return the observation of each run, as if it ran alone.

    Statistics are independent of each other. Each run receives only those that it asked for, because a rounder may act
    differently depending on which are present.

    Args:
        block: the block, with the hidden states that reach it.
        rounders: block rounders of the runs.
        advance: whether the same pass replaces the hidden states by the outputs of the block, unless a run needs
            another pass.
    """
    if not rounders:
        return []
    report_step(f"block {block.index}: observing", share=0.0)
    observations = [rounder.plan_observation(block) for rounder in rounders]
    wanted: dict[str, frozenset[Statistic]] = {}
    for each in observations:
        for key in each.inputs:
            wanted[key] = wanted.get(key, frozenset()) | each.before_transforms
    once = all(
        rounder.can_advance_while_observing(each)
        for rounder, each in zip(rounders, observations, strict=True)
    )
    found = _run_rows(
        block,
        wanted,
        [each.cache_peaks for each in observations if not each.observe_again],
        advance=advance and once,
        keep=max(rounder.saved_row_count for rounder in rounders),
    )
    trim()
    for each in observations:
        seen = {
            key: found[key].select(each.before_transforms) for key in each.inputs if key in found
        }
        each.statistics.update(seen)
    return observations


def _run_rows(
    block: DecoderBlock,
    wanted: Mapping[str, frozenset[Statistic]],
    cache_peaks: Iterable[CachePeaks | None],
    *,
    advance: bool = False,
    keep: int = 0,
) -> dict[str, Statistics]:
    """Run the calibration rows through a block; return the requested statistics by shared input.

    Args:
        block: the block.
        wanted: requested statistics by key of the shared input.
        cache_peaks: collectors of the keys and values that the attention stores in its KV cache.
        advance: replace the hidden states by the outputs of the block in the same pass.
        keep: number of rows whose previous hidden states are saved when advancing.
    """
    present_peaks = [one for one in cache_peaks if one is not None]
    with ExitStack() as hooks:
        for one in present_peaks:
            hooks.enter_context(attached_cache(block.module, one))
        return block.observe(
            wanted, advance=advance, keep_rows=keep, run_to_end=bool(present_peaks)
        )


def observes_after_transforms(plan: Plan) -> bool:
    """Return whether blocks have to be observed again after the transforms."""
    ranges = statistics_for_inputs(tensor.scheme.input for tensor in plan.tensors if tensor.scheme)
    scales = any(tensor.action is Action.MEASURE for tensor in plan.tensors)
    return bool(plan.transforms) and (bool(ranges) or scales)


def observe_head(planned: Planned, stream: ModelStream) -> Statistics:
    """Collect statistics of the input of a quantized head, the output of the final norm, after all blocks have run."""
    total = Accumulator(needs(planned.plan.rounder, importance=planned.recipe.rounding.weighs))
    for states in stream.final_hidden():
        total.add(states.reshape(-1, states.shape[-1]))
    return total.result()


class BlockRounder:
    """Transforms, rounds and writes the calibrated blocks of one run.

    Attributes:
        guided_rounding: rounds linears under guided Hessians; None without a guide.
    """

    def __init__(self, rounding: MatrixRounder, tensors: BlockTensors) -> None:
        self.guided_rounding: GuidedRounding | None = None
        self.rounding, self.tensors = rounding, tensors
        self.plan, self.recipe = rounding.planned.plan, rounding.planned.recipe

    @property
    def has_transforms(self) -> bool:
        """Return whether transforms modify the weights of blocks."""
        return bool(self.plan.transforms)

    @property
    def saved_row_count(self) -> int:
        """Return the number of rows whose input states must be saved for transforms that run the block on them."""
        return self.recipe.awq.search_samples if self.has_transforms else 0

    def plan_observation(self, block: DecoderBlock) -> Observation:
        """Return which statistics of a block have to be observed.

        Guided statistics are observed strip by strip (`GuidedRounding`); then only the transforms need other ones.
        """
        quantized, modified = (
            self.tensors.quantized_linears(block),
            self.tensors.modified_linears(block),
        )
        if not self.plan.guided_hessians:
            wanted = needs(self.plan.method, importance=self.recipe.rounding.weighs)
        else:
            transforms = (METHODS[word].needs for word in self.plan.transforms)
            wanted = frozenset[Statistic]().union(*transforms)
        ranges = statistics_for_inputs(
            tensor.scheme.input for tensor in quantized.values() if tensor.scheme
        )
        cache_peaks = CachePeaks() if self._cache_scale_plans(block) else None
        return Observation(
            [item.key for item in block.inputs if any(name in modified for name in item.linears)],
            wanted if self.has_transforms else wanted | ranges,
            ranges if self.has_transforms else frozenset(),
            cache_peaks,
            observe_again=self.has_transforms and (bool(ranges) or cache_peaks is not None),
            statistics={},
        )

    def can_advance_while_observing(self, observation: Observation) -> bool:
        """Return whether hidden states may advance in the observing pass, because no other pass follows."""
        return not observation.observe_again and self.guided_rounding is None

    def _cache_scale_plans(self, block: DecoderBlock) -> list[TensorPlan]:
        """Return the plans of the measured KV cache scales of a block: of keys and of values."""
        return [
            tensor
            for tensor in self.plan.tensors
            if tensor.block == block.index and tensor.action is Action.MEASURE
        ]

    def round_block(
        self,
        block: DecoderBlock,
        observation: Observation,
        process_expert: ProcessExpert,
        *,
        advance: bool,
    ) -> Record:
        """Transform, round and write an observed block; return its record. Errors as `execute.execute`.

        Args:
            block: the block, with the hidden states that reach it or (if advanced) that it returns.
            observation: statistics of the unmodified block.
            process_expert: runs the unit of an expert unless it is done.
            advance: whether the hidden states are to be replaced by the outputs of the source's block.
        """
        record: Record = {}
        statistics = observation.statistics
        if self.has_transforms:
            record, statistics = self._transform_block(block, observation)
        if self.guided_rounding is not None:
            merge_records(
                record, self._round_guided(block, statistics, self.guided_rounding, advance=advance)
            )
        else:
            quantized = self.tensors.quantized_linears(block)
            for index, shared in enumerate(block.inputs):
                linears = [name for name in shared.linears if name in quantized]
                if not linears or shared.expert >= 0:
                    continue
                done = 1 - 0.5 * (1 - index / len(block.inputs))
                report_step(f"block {block.index}: rounding {', '.join(linears)}", share=done)
                weights = {quantized[name].name: block.weight(name) for name in linears}
                seen = statistics.get(shared.key, Statistics())
                rounded = self.rounding.round(weights, seen)
                merge_records(record, self.rounding.write(rounded, weights, seen))
                trim()
        statistics.clear()
        self._write_unquantized(block)
        trim()
        if block.experts is not None:
            experts = ExpertRounder(self, block, observation, accumulate_outputs=advance)
            merge_records(record, experts.round_experts(process_expert))
        if advance and not block.advanced:  # with the weights of the source
            block.advance_source()
        if observation.cache_peaks is not None:
            scales = observation.cache_peaks.scales(self.recipe.kv_cache)
            for tensor, value in zip(self._cache_scale_plans(block), scales, strict=True):
                self.rounding.output.write(tensor.name, value)
        return record

    def _write_unquantized(self, block: DecoderBlock) -> None:
        """Write the unquantized tensors of a block, from the source or as modified by a transform."""
        for local, tensor in self.tensors.unquantized(block).items():
            if tensor.expert >= 0:
                continue
            if block.is_outside_module(local) or not self.has_transforms:
                self.rounding.copy(tensor)
                continue
            value = block.parameter(local).to(torch_dtype(tensor.dtype))
            check_finite(tensor.name, value)
            self.rounding.output.write_unquantized(tensor, value)
            block.set_parameter(local, value.float())

    # Transforms, sparsity and guides

    def _transform_block(
        self, block: DecoderBlock, observation: Observation
    ) -> tuple[Record, dict[str, Statistics]]:
        """Apply the transforms to a block in place; return their record and the updated statistics."""
        report_step(f"block {block.index}: {'+'.join(self.plan.transforms)}", share=0.4)
        modified = self.tensors.modified_linears(block)
        own = {name: tensor for name, tensor in modified.items() if tensor.expert < 0}
        record, statistics = self.apply_transforms(block, observation.statistics, own)
        observation.statistics.clear()  # free the Hessians early
        if observation.observe_again:
            wanted = dict.fromkeys(observation.inputs, observation.after_transforms)
            for key, again in _run_rows(block, wanted, [observation.cache_peaks]).items():
                if key in statistics:
                    statistics[key] = statistics[key].with_ranges_of(again)
        return record, statistics

    def _round_guided(
        self,
        block: DecoderBlock,
        statistics: Mapping[str, Statistics],
        guided: GuidedRounding,
        *,
        advance: bool,
    ) -> Record:
        """Round under guided Hessians, observed here while the rows advance; return the record."""
        quantized = self.tensors.quantized_linears(block)
        own = {name: tensor for name, tensor in quantized.items() if tensor.expert < 0}
        passing = advance and not self.has_transforms and block.experts is None
        return guided.round_block(block, statistics, own, advance=passing)

    def apply_transforms(
        self,
        block: DecoderBlock,
        statistics: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
    ) -> tuple[Record, dict[str, Statistics]]:
        """Apply the transforms in order to a block or one of its experts, in place.

        Args:
            block: the block whose weights change.
            statistics: statistics by shared input.
            targets: linears that are rounded or sparsified, by their names in the block.

        Returns:
            The record, and the statistics after the transforms.
        """
        layers = {name: tensor.scheme for name, tensor in targets.items() if tensor.scheme}
        record: Record = {}
        for transform in self.plan.transforms if targets else ():
            if is_sparse(transform):
                merge_records(record, self._sparsify(transform, block, statistics, targets))
                continue
            statistics, events, changes = load_transform(transform).apply(
                block, statistics, layers, self.recipe.rounding
            )
            merge_records(
                record, {"events": [one.to_json() for one in events], "transform": changes}
            )
        return record, dict(statistics)

    def _sparsify(
        self,
        method: str,
        block: DecoderBlock,
        statistics: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
    ) -> Record:
        """Set weights of a block to zero, one shared input after the other; arguments as `apply_transforms`."""
        zeros, damping = self.recipe.zeros, self.recipe.rounding.gptq.damping
        assert zeros is not None  # planning refuses sparsity without options
        record: Record = {}
        for shared in block.inputs:
            names = [name for name in shared.linears if name in targets and targets[name].sparse]
            if not names or shared.key not in statistics:
                continue
            weights = {targets[name].name: block.weight(name) for name in names}
            seen = statistics[shared.key]
            found, events = sparsify(method, weights, seen, zeros, damping)
            merge_records(record, {"events": [event.to_json() for event in events]})
            for name in names:
                key = targets[name].name
                merge_records(
                    record, {"metrics": {key: sparsity_figures(weights[key], found[key], seen)}}
                )
                block.set_weight(name, found[key])
        return record


class BlockTensors:
    """Lookup of the planned tensors of a block.

    Args:
        plan: the plan.
        output: writer of the tensors.
    """

    def __init__(self, plan: Plan, output: UnitOutput) -> None:
        self._by_name = {tensor.name: tensor for tensor in plan.tensors}
        self._output = output

    def quantized_linears(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the plans of the quantized linears of a block, by their names in the block."""
        plans = self.modified_linears(block)
        return {name: plan for name, plan in plans.items() if plan.action is Action.QUANTIZE}

    def modified_linears(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the plans of the linears that are quantized or sparsified, by their names in the block."""
        plans = {name: self._by_name[block.stored_name(f"{name}.weight")] for name in block.linears}
        return {
            name: plan
            for name, plan in plans.items()
            if plan.sparse or plan.action is Action.QUANTIZE
        }

    def unquantized(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the plans of the unquantized parameters of a block, including experts, by their names in the block."""
        plans = {local: self._by_name[block.stored_name(local)] for local in block.parameters()}
        return {local: plan for local, plan in plans.items() if plan.action is Action.KEEP}

    def load_written_parameters(self, block: DecoderBlock) -> None:
        """Replace the unquantized parameters of a block, except those of experts, by the written ones."""
        for local, tensor in self.unquantized(block).items():
            if tensor.expert >= 0 or block.is_outside_module(local):
                continue
            if tensor.decay:
                # A decay never changes, and the logarithm of its stored form differs in the last bits.
                continue
            (value,) = self._output.read(tensor).values()
            block.set_parameter(
                local, self._output.storage.restore_unquantized(tensor, value).float()
            )
