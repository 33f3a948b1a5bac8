"""One block of a calibrated run: observe what its linears read, transform, round, write.

Most of what is observed belongs to the block as the source has it; ranges of inputs and of the KV cache belong to the
block that is rounded, so that they are observed once more where transforms have changed it. Several runs observe a
block in one pass (`observe`); each then transforms, rounds and writes it by itself (`BlockRounder`).

Experts of a block come last, one after the other (`quantforge.execution.calibrated_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.execution.calibrated_experts import ExpertRounder
from quantforge.execution.journal import Record, merge
from quantforge.execution.progress import tell
from quantforge.files.finite_values import scan_finite
from quantforge.files.safetensors import torch_dtype
from quantforge.model.accumulator import Accumulator
from quantforge.model.statistics import Statistic, Statistics, of_inputs
from quantforge.numerics.allocator import trim
from quantforge.plans import Action, Plan
from quantforge.quantizers import METHODS, is_sparse, needs, transform_of
from quantforge.quantizers.sparsity import figures, sparsify
from quantforge.runtime.cache_scales import CachePeaks, listening

if TYPE_CHECKING:
    from quantforge.execution.guide import GuidedRounding
    from quantforge.execution.rounding import MatrixRounding
    from quantforge.execution.unit_output import UnitOutput
    from quantforge.model.block import DecoderBlock
    from quantforge.model.stream import ModelStream
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan

# Does a unit inside of a block, an expert, unless it is done; returns whether it did.
DoExpert = Callable[[str, Callable[[], Record]], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What a run looks at in a block, and what it has seen of the block as the source has it.

    Attributes:
        inputs: keys of the shared inputs that it looks at.
        before: statistics of them that it wants of the block as the source has it.
        after: those that it wants of the block that its transforms have changed.
        peaks: of keys and values of the KV cache, None where its scales are not measured.
        twice: whether the block is observed once more after the transforms.
        statistics: what was seen of the inputs.
    """

    inputs: Sequence[str]
    before: frozenset[Statistic]
    after: frozenset[Statistic]
    peaks: CachePeaks | None
    twice: bool
    statistics: dict[str, Statistics]


def observe(
    block: DecoderBlock, rounders: Sequence[BlockRounder], *, advance: bool
) -> list[Observed]:
    """Pass the rows through a block once for several runs; return what each would have observed alone.

    Sums of one statistic do not depend on the others. A run sees only those that it asked for, because what a rounder
    does may depend on which are there.

    Args:
        block: the block, with the hidden states that reach it.
        rounders: of the runs.
        advance: whether the hidden states are replaced by what the block returns in the same pass, unless a run needs
            another one.
    """
    if not rounders:
        return []
    tell(f"block {block.index}: observing", share=0.0)
    observations = [rounder.wants(block) for rounder in rounders]
    wanted: dict[str, frozenset[Statistic]] = {}
    for each in observations:
        for key in each.inputs:
            wanted[key] = wanted.get(key, frozenset()) | each.before
    once = all(
        rounder.passes_once(each) for rounder, each in zip(rounders, observations, strict=True)
    )
    found = _pass_rows(
        block,
        wanted,
        [each.peaks for each in observations if not each.twice],
        advance=advance and once,
        keep=max(rounder.kept_rows for rounder in rounders),
    )
    trim()
    for each in observations:
        seen = {key: found[key].only(each.before) for key in each.inputs if key in found}
        each.statistics.update(seen)
    return observations


def _pass_rows(
    block: DecoderBlock,
    wanted: Mapping[str, frozenset[Statistic]],
    peaks: Iterable[CachePeaks | None],
    *,
    advance: bool = False,
    keep: int = 0,
) -> dict[str, Statistics]:
    """Run the calibration rows through a block; return the statistics that are wanted, by shared input.

    Args:
        block: the block.
        wanted: by the key of the shared input.
        peaks: gets the keys and values that the attention of the block hands to its cache.
        advance: replace the hidden states by the outputs of the block in the same pass.
        keep: then keep the states of so many rows as they were.
    """
    listeners = [one for one in peaks if one is not None]
    with ExitStack() as hooks:
        for one in listeners:
            hooks.enter_context(listening(block.module, one))
        return block.observe(wanted, advance=advance, keep=keep, whole=bool(listeners))


def observes_twice(plan: Plan) -> bool:
    """Return whether blocks are observed once more after the transforms."""
    ranges = of_inputs(tensor.scheme.input for tensor in plan.tensors if tensor.scheme)
    scales = any(tensor.action is Action.MEASURE for tensor in plan.tensors)
    return bool(plan.transforms) and (bool(ranges) or scales)


def observe_head(planned: Planned, stream: ModelStream) -> Statistics:
    """Observe what a quantized head reads, the output of the final norm, when the rows are behind the last block."""
    total = Accumulator(needs(planned.plan.rounder, importance=planned.recipe.rounding.weighs))
    for states in stream.final_hidden():
        total.add(states.reshape(-1, states.shape[-1]))
    return total.result()


class BlockRounder:
    """The work of one run on blocks through which the calibration rows pass.

    Attributes:
        guided: rounds the linears where their statistics are guided.
    """

    def __init__(self, rounding: MatrixRounding, tensors: BlockTensors) -> None:
        self.guided: GuidedRounding | None = None
        self.rounding, self.tensors = rounding, tensors
        self.plan, self.recipe = rounding.planned.plan, rounding.planned.recipe

    @property
    def changes(self) -> bool:
        """Return whether transforms change the weights of a block."""
        return bool(self.plan.transforms)

    @property
    def kept_rows(self) -> int:
        """Return of how many rows the states have to stay as they were, for transforms that run the block on them."""
        return self.recipe.awq.rows if self.changes else 0

    def wants(self, block: DecoderBlock) -> Observed:
        """Return what is to be observed of a block.

        Guided statistics are observed strip by strip (`GuidedRounding`); the transforms alone look at others then.
        """
        quantized, changed = self.tensors.quantized(block), self.tensors.changed(block)
        if not self.plan.guide:
            wanted = needs(self.plan.method, importance=self.recipe.rounding.weighs)
        else:
            transforms = (METHODS[word].needs for word in self.plan.transforms)
            wanted = frozenset[Statistic]().union(*transforms)
        ranges = of_inputs(tensor.scheme.input for tensor in quantized.values() if tensor.scheme)
        peaks = CachePeaks() if self._cache_scales(block) else None
        return Observed(
            [item.key for item in block.inputs if any(name in changed for name in item.linears)],
            wanted if self.changes else wanted | ranges,
            ranges if self.changes else frozenset(),
            peaks,
            twice=self.changes and (bool(ranges) or peaks is not None),
            statistics={},
        )

    def passes_once(self, observed: Observed) -> bool:
        """Return whether the rows may advance while a block is observed: it is not observed again."""
        return not observed.twice and self.guided is None

    def _cache_scales(self, block: DecoderBlock) -> list[TensorPlan]:
        """Return the scales of a KV cache that are measured in a block: those of keys and of values."""
        return [
            tensor
            for tensor in self.plan.tensors
            if tensor.block == block.index and tensor.action is Action.MEASURE
        ]

    def round_block(
        self, block: DecoderBlock, observed: Observed, do_expert: DoExpert, *, advance: bool
    ) -> Record:
        """Transform, round and write a block that was observed; return its record. Errors as `execute.execute`.

        Args:
            block: the block, with the hidden states that reach it, or that it returns.
            observed: of the block as the source has it.
            do_expert: does an expert, unless it is done.
            advance: whether the hidden states are to be replaced by what the source's block returns.
        """
        record: Record = {}
        statistics = observed.statistics
        if self.changes:
            record, statistics = self._transform(block, observed)
        if self.guided is not None:
            merge(record, self._round_guided(block, statistics, self.guided, advance=advance))
        else:
            quantized = self.tensors.quantized(block)
            for index, shared in enumerate(block.inputs):
                linears = [name for name in shared.linears if name in quantized]
                if not linears or shared.expert >= 0:
                    continue
                done = 1 - 0.5 * (1 - index / len(block.inputs))
                tell(f"block {block.index}: rounding {', '.join(linears)}", share=done)
                weights = {quantized[name].name: block.weight(name) for name in linears}
                seen = statistics.get(shared.key, Statistics())
                rounded = self.rounding.round(weights, seen)
                merge(record, self.rounding.write(rounded, weights, seen))
                trim()
        statistics.clear()
        self._write_kept(block)
        trim()
        if block.experts is not None:
            experts = ExpertRounder(self, block, observed, add=advance)
            merge(record, experts.work(do_expert))
        if advance and not block.advanced:  # by a block that transforms had not changed yet
            block.advance_source()
        if observed.peaks is not None:
            scales = observed.peaks.scales(self.recipe.kv_cache)
            for tensor, value in zip(self._cache_scales(block), scales, strict=True):
                self.rounding.output.write(tensor.name, value)
        return record

    def _write_kept(self, block: DecoderBlock) -> None:
        """Write what is not quantized: as the source has it, or as a transform left it; tuning may change it later."""
        for local, tensor in self.tensors.kept(block).items():
            if tensor.expert >= 0:
                continue
            if block.is_outside_module(local) or not self.changes:
                self.rounding.copy(tensor)
                continue
            value = block.parameter(local).to(torch_dtype(tensor.dtype))
            scan_finite(tensor.name, value)
            self.rounding.output.write_kept(tensor, value)
            block.set_parameter(local, value.float())

    # Transforms, zeros and guides

    def _transform(
        self, block: DecoderBlock, observed: Observed
    ) -> tuple[Record, dict[str, Statistics]]:
        """Apply the transforms to a block in place; return their record, and the statistics that hold afterwards."""
        tell(f"block {block.index}: {'+'.join(self.plan.transforms)}", share=0.4)
        changed = self.tensors.changed(block)
        own = {name: tensor for name, tensor in changed.items() if tensor.expert < 0}
        record, statistics = self.transformed(block, observed.statistics, own)
        observed.statistics.clear()  # Hessians are freed as soon as they are done with
        if observed.twice:
            wanted = dict.fromkeys(observed.inputs, observed.after)
            for key, again in _pass_rows(block, wanted, [observed.peaks]).items():
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
        """Round under guided Hessians, which are observed here while the rows advance; return the record."""
        quantized = self.tensors.quantized(block)
        own = {name: tensor for name, tensor in quantized.items() if tensor.expert < 0}
        passing = advance and not self.changes and block.experts is None
        return guided.work(block, statistics, own, advance=passing)

    def transformed(
        self,
        block: DecoderBlock,
        statistics: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
    ) -> tuple[Record, dict[str, Statistics]]:
        """Apply the transforms to a block or one of its experts, in place, one after the other.

        Args:
            block: the block whose weights change.
            statistics: by shared input.
            targets: linears that are rounded afterwards, or get zeros, by their names in the block.

        Returns:
            The record, and the statistics that hold afterwards.
        """
        layers = {name: tensor.scheme for name, tensor in targets.items() if tensor.scheme}
        record: Record = {}
        for transform in self.plan.transforms if targets else ():
            if is_sparse(transform):
                merge(record, self._with_zeros(transform, block, statistics, targets))
                continue
            statistics, events, changes = transform_of(transform).apply(
                block, statistics, layers, self.recipe.rounding
            )
            merge(record, {"events": [one.to_json() for one in events], "transform": changes})
        return record, dict(statistics)

    def _with_zeros(
        self,
        method: str,
        block: DecoderBlock,
        statistics: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
    ) -> Record:
        """Make weights of a block zero, one shared input after the other; arguments as of `transformed`."""
        zeros, damping = self.recipe.zeros, self.recipe.rounding.gptq.damping
        assert zeros is not None  # planning has refused the method without
        record: Record = {}
        for shared in block.inputs:
            names = [name for name in shared.linears if name in targets and targets[name].sparse]
            if not names or shared.key not in statistics:
                continue
            weights = {targets[name].name: block.weight(name) for name in names}
            seen = statistics[shared.key]
            found, events = sparsify(method, weights, seen, zeros, damping)
            merge(record, {"events": [event.to_json() for event in events]})
            for name in names:
                key = targets[name].name
                merge(record, {"figures": {key: figures(weights[key], found[key], seen)}})
                block.set_weight(name, found[key])
        return record


class BlockTensors:
    """Lookup of what a plan does with the tensors of a block.

    Args:
        plan: with every tensor.
        output: where the tensors are written.
    """

    def __init__(self, plan: Plan, output: UnitOutput) -> None:
        self._by_name = {tensor.name: tensor for tensor in plan.tensors}
        self._output = output

    def quantized(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the linears of a block that are quantized, by their names inside of it."""
        plans = self.changed(block)
        return {name: plan for name, plan in plans.items() if plan.action is Action.QUANTIZE}

    def changed(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the linears of a block that are quantized or get zeros, by their names inside of it."""
        plans = {name: self._by_name[block.stored_name(f"{name}.weight")] for name in block.linears}
        return {
            name: plan
            for name, plan in plans.items()
            if plan.sparse or plan.action is Action.QUANTIZE
        }

    def kept(self, block: DecoderBlock) -> dict[str, TensorPlan]:
        """Return the parameters of a block that are kept, by their names inside of it, those of experts included."""
        plans = {local: self._by_name[block.stored_name(local)] for local in block.parameters()}
        return {local: plan for local, plan in plans.items() if plan.action is Action.KEEP}

    def load_kept(self, block: DecoderBlock) -> None:
        """Let the kept parameters of a block, but those of its experts, be what was written of them."""
        for local, tensor in self.kept(block).items():
            if tensor.expert >= 0 or block.is_outside_module(local):
                continue
            if tensor.decay:
                # Nothing changes a decay, and the logarithm of what is stored differs in its last bits.
                continue
            (value,) = self._output.read(tensor).values()
            block.set_parameter(
                local, self._output.storage.restore_unquantized(tensor, value).float()
            )
