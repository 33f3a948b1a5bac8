"""One block of a calibrated run: observe the inputs of its linears, transform, round and write it.

Most statistics are of the block as it is in the source. Ranges of quantized inputs and of the KV cache must be of the
rounded block, so they are observed a second time if transforms have changed the block. Several runs can observe a block
in one pass (`observe`); each then transforms, rounds and writes it separately (`BlockRounder`).

Experts of a block are processed last, one after the other (`quantforge.execution.calibrated_experts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from quantforge.execution.block_tensors import BlockTensors
from quantforge.execution.block_transforms import apply_transforms
from quantforge.execution.calibrated_experts import ExpertRounder, ProcessExpert
from quantforge.execution.journal import Record, merge_records
from quantforge.execution.observation import Observation
from quantforge.files.finite_values import check_finite
from quantforge.files.safetensors import torch_dtype
from quantforge.model.statistics import Statistic, Statistics, statistics_for_inputs
from quantforge.numerics.allocator import trim
from quantforge.plans import Action
from quantforge.progress import report_step
from quantforge.quantizers import METHODS, needs
from quantforge.runtime.cache_scales import CachePeaks, attached_cache

if TYPE_CHECKING:
    from quantforge.execution.guide import GuidedRounding
    from quantforge.execution.rounding import MatrixRounder
    from quantforge.model.block import DecoderBlock
    from quantforge.plans import TensorPlan


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
    needed_statistics: dict[str, frozenset[Statistic]] = {}
    for item in observations:
        for key in item.inputs:
            needed_statistics[key] = (
                needed_statistics.get(key, frozenset()) | item.before_transforms
            )
    is_single_pass = all(
        rounder.can_advance_while_observing(item)
        for rounder, item in zip(rounders, observations, strict=True)
    )
    statistics = _run_rows(
        block,
        needed_statistics,
        [item.cache_peaks for item in observations if not item.observe_again],
        advance=advance and is_single_pass,
        keep=max(rounder.saved_row_count for rounder in rounders),
    )
    trim()
    for item in observations:
        selected = {
            key: statistics[key].select(item.before_transforms)
            for key in item.inputs
            if key in statistics
        }
        item.statistics.update(selected)
    return observations


def _run_rows(
    block: DecoderBlock,
    needed_statistics: Mapping[str, frozenset[Statistic]],
    cache_peaks: Iterable[CachePeaks | None],
    *,
    advance: bool = False,
    keep: int = 0,
) -> dict[str, Statistics]:
    """Run the calibration rows through a block; return the requested statistics by shared input.

    Args:
        block: the block.
        needed_statistics: requested statistics by key of the shared input.
        cache_peaks: collectors of the keys and values that the attention stores in its KV cache.
        advance: replace the hidden states by the outputs of the block in the same pass.
        keep: number of rows whose previous hidden states are saved when advancing.
    """
    present_peaks = [cache_peak for cache_peak in cache_peaks if cache_peak is not None]
    with ExitStack() as hooks:
        for cache_peak in present_peaks:
            hooks.enter_context(attached_cache(block.module, cache_peak))
        return block.observe(
            needed_statistics, advance=advance, keep_rows=keep, run_to_end=bool(present_peaks)
        )


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
            needed = needs(self.plan.method, importance=self.recipe.rounding.weighs)
        else:
            transforms = (METHODS[transform].needs for transform in self.plan.transforms)
            needed = frozenset[Statistic]().union(*transforms)
        ranges = statistics_for_inputs(
            tensor.scheme.input for tensor in quantized.values() if tensor.scheme
        )
        cache_peaks = CachePeaks() if self._cache_scale_plans(block) else None
        return Observation(
            [item.key for item in block.inputs if any(name in modified for name in item.linears)],
            needed if self.has_transforms else needed | ranges,
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
                finished_share = 1 - 0.5 * (1 - index / len(block.inputs))
                report_step(
                    f"block {block.index}: rounding {', '.join(linears)}", share=finished_share
                )
                weights = {quantized[name].name: block.weight(name) for name in linears}
                input_statistics = statistics.get(shared.key, Statistics())
                rounded = self.rounding.round(weights, input_statistics)
                merge_records(record, self.rounding.write(rounded, weights, input_statistics))
                trim()
        statistics.clear()
        self._write_unquantized(block)
        trim()
        if block.experts is not None:
            experts = ExpertRounder(
                self.rounding,
                self.tensors,
                self.guided_rounding,
                block,
                observation,
                accumulate_outputs=advance,
            )
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
        for local_name, tensor in self.tensors.unquantized(block).items():
            if tensor.expert >= 0:
                continue
            if block.is_outside_module(local_name) or not self.has_transforms:
                self.rounding.copy(tensor)
                continue
            value = block.parameter(local_name).to(torch_dtype(tensor.dtype))
            check_finite(tensor.name, value)
            self.rounding.output.write_unquantized(tensor, value)
            block.set_parameter(local_name, value.float())

    # Transforms and guides

    def _transform_block(
        self, block: DecoderBlock, observation: Observation
    ) -> tuple[Record, dict[str, Statistics]]:
        """Apply the transforms to a block in place; return their record and the updated statistics."""
        report_step(f"block {block.index}: {'+'.join(self.plan.transforms)}", share=0.4)
        modified = self.tensors.modified_linears(block)
        dense_tensors = {name: tensor for name, tensor in modified.items() if tensor.expert < 0}
        record, statistics = apply_transforms(
            self.rounding.planned, block, observation.statistics, dense_tensors
        )
        observation.statistics.clear()  # free the Hessians early
        if observation.observe_again:
            needed_statistics = dict.fromkeys(observation.inputs, observation.after_transforms)
            for key, new_statistics in _run_rows(
                block, needed_statistics, [observation.cache_peaks]
            ).items():
                if key in statistics:
                    statistics[key] = statistics[key].with_ranges_of(new_statistics)
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
        dense_tensors = {name: tensor for name, tensor in quantized.items() if tensor.expert < 0}
        passing = advance and not self.has_transforms and block.experts is None
        return guided.round_block(block, statistics, dense_tensors, advance=passing)
