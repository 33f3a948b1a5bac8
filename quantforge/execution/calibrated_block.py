"""One block of a calibrated run: observe what its linears read, transform, round, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quantforge.checkpoint.finite_values import scan_finite
from quantforge.checkpoint.safetensors import torch_dtype
from quantforge.execution.calibrated_experts import CalibratedExperts, Do, Wanted
from quantforge.execution.observers import (
    Moment,
    Observer,
    observe,
    observers_of,
    wanted_of,
    with_ranges,
)
from quantforge.execution.progress import tell
from quantforge.execution.journal import Record, merge
from quantforge.execution.transforming import transformed
from quantforge.model.statistics import Statistics
from quantforge.numerics.allocator import trim

if TYPE_CHECKING:
    from quantforge.execution.block_tensors import BlockTensors
    from quantforge.execution.data_free import DataFree
    from quantforge.execution.guided_rounding import GuidedRounding
    from quantforge.execution.lockstep import SeenTogether
    from quantforge.execution.rounding import MatrixRounding
    from quantforge.model.block import BlockPart
    from quantforge.planning.planner import Planned
    from quantforge.plans import TensorPlan


class CalibratedBlock:
    """Worker on blocks through which the calibration rows pass.

    Attributes:
        guided: rounds the linears where their statistics are guided.
        early: whether rows pass experts before these are rounded, for others who wait: they are run once more.
    """

    def __init__(
        self, planned: Planned, rounding: MatrixRounding, data_free: DataFree, tensors: BlockTensors
    ) -> None:
        self.guided: GuidedRounding | None = None
        self.early = False
        self._plan, self._recipe = planned.plan, planned.recipe
        self._rounding, self._data_free, self._tensors = rounding, data_free, tensors
        self._experts = CalibratedExperts(planned, rounding, tensors)

    @property
    def changes(self) -> bool:
        """Return whether transforms change the weights of a block."""
        return bool(self._plan.transforms)

    @property
    def kept_rows(self) -> int:
        """Return of how many rows the states have to stay as they were, for transforms that run the block on them."""
        return self._recipe.awq.rows if self.changes else 0

    def watching(self, part: BlockPart) -> tuple[list[Observer], list[str]]:
        """Return the observers of a block, and the keys of the shared inputs that they look at."""
        targets, changing = self._tensors.targets(part), self._tensors.changing(part)
        read = [
            shared.key for shared in part.inputs if any(name in changing for name in shared.linears)
        ]
        observers = observers_of(
            self._plan, part.index, targets.values(),
            importance=self._recipe.rounding.weighs, cache=self._recipe.kv_cache,
        )  # fmt: skip
        return observers, read

    def work(
        self, part: BlockPart, do: Do, *, ends: bool, seen: SeenTogether | None = None
    ) -> Record:
        """Observe, transform, round and write a block; return its record. Errors as `Run.execute`.

        Args:
            part: the block, with the hidden states that reach it.
            do: does a unit inside of it, an expert, unless it is done.
            ends: whether nobody reads what it computes.
            seen: what was observed of it in a pass for several runs; see `observe_together`.
        """
        targets, changing = self._tensors.targets(part), self._tensors.changing(part)
        observers, read = self.watching(part)
        if seen is not None:
            observers = list(seen.observers)
        moments = {moment: [one for one in observers if one.moment is moment] for moment in Moment}
        advance = not ends
        once = not moments[Moment.AFTER] and self.guided is None
        observed = dict(seen.statistics) if seen is not None else {}
        if seen is None:
            observed = self._observe(part, moments[Moment.BEFORE], read, advance and once)
        if self.early and advance and part.experts is not None:
            part.advance_seen()
            advance = False
        own = {name: tensor for name, tensor in changing.items() if tensor.expert < 0}
        if self._plan.transforms:
            tell(f"block {part.index}: {'+'.join(self._plan.transforms)}", share=0.4)
        record, observed = transformed(
            self._plan.transforms, part, observed, own, self._recipe.rounding, self._recipe.zeros
        )
        if moments[Moment.AFTER]:
            after = observe(part, moments[Moment.AFTER], read, advance=False)
            observed = with_ranges(observed, after)
        self._round(part, observed, targets, record, advance=advance)
        observed = {}  # the Hessians of what is done
        self._write_kept(part)
        trim()
        if part.experts is not None:
            wanted = Wanted(*(wanted_of(found) for found in moments.values()))
            merge(
                record,
                self._experts.work(part, changing, wanted, do, add=advance, guided=self.guided),
            )
        if advance and not part.advanced:  # by a block that transforms had not changed yet
            part.advance_source()
        for observer in observers:
            for name, value in observer.found():
                self._rounding.output.write(name, value)
        return record

    def _observe(
        self, part: BlockPart, observers: Sequence[Observer], read: Sequence[str], advance: bool
    ) -> dict[str, Statistics]:
        tell(f"block {part.index}: observing", share=0.0)
        observed = observe(part, observers, read, advance=advance, keep=self.kept_rows)
        trim()
        return observed

    def _round(
        self,
        part: BlockPart,
        observed: Mapping[str, Statistics],
        targets: Mapping[str, TensorPlan],
        record: Record,
        *,
        advance: bool,
    ) -> None:
        """Round and write the linears, one shared input after the other, and add what there is to tell.

        Those with a guide are observed here, and ``advance`` says whether the rows advance meanwhile, which they do not
        where a transform has changed the block.
        """
        if self.guided is not None:
            passing = advance and not self._plan.transforms and part.experts is None
            own = {name: tensor for name, tensor in targets.items() if tensor.expert < 0}
            merge(record, self.guided.work(part, observed, own, advance=passing))
            return
        for index, shared in enumerate(part.inputs):
            chosen = [name for name in shared.linears if name in targets]
            if not chosen or shared.expert >= 0:
                continue
            done = 1 - 0.5 * (1 - index / len(part.inputs))
            tell(f"block {part.index}: rounding {', '.join(chosen)}", share=done)
            weights = {targets[name].name: part.weight(name) for name in chosen}
            merge(record, self._rounding.shared(weights, observed.get(shared.key, Statistics())))
            trim()

    def _write_kept(self, part: BlockPart) -> None:
        """Write what is not quantized: as the source has it, or as a transform left it."""
        for local, tensor in self._tensors.kept(part).items():
            if tensor.expert >= 0:
                continue
            if part.is_apart(local) or not self._plan.transforms:
                self._data_free.copy(tensor)
                continue
            value = part.parameter(local).to(torch_dtype(tensor.dtype))
            scan_finite(tensor.name, value)
            self._rounding.output.keep(tensor, value)
            part.set_parameter(local, value.float())
