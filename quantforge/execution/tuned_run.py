"""Tuning within a run: of each block behind its rounding, while the rows are there, or of all when they are done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quantforge.execution.progress import phase
from quantforge.execution.record import Record
from quantforge.execution.units import TUNE, tune_unit

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.execution.learning import After, Tuning
    from quantforge.model.block import BlockPart
    from quantforge.model.tuning import TuningStream
    from quantforge.planning.planner import Planned
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample


class TunedRun:
    """Part of a run that tunes what its blocks have written."""

    def __init__(
        self,
        planned: Planned,
        tuning: Tuning,
        checkpoint: Checkpoint,
        settings: Settings,
        tell: Callable[[str, Record, float], None],
        share: Callable[[str], float],
    ) -> None:
        """Tune under a plan.

        Args:
            planned: of the run.
            tuning: what learns and writes.
            checkpoint: the source.
            settings: of the run.
            tell: is told the name of every unit that was tuned, its record, and when its tuning began.
            share: returns which share of the work a unit is.
        """
        self._planned, self._tuning = planned, tuning
        self._checkpoint, self._settings = checkpoint, settings
        self._tell, self._share = tell, share
        self._alone = False

    @property
    def any(self) -> bool:
        """Return whether anything is tuned, so that gradients are taken."""
        return bool(self._planned.plan.tune)

    def begin(self, *, alone: bool) -> None:
        """Write what was learned before the run was interrupted; ``alone``: no other run shares its pass."""
        self._alone = alone
        self._tuning.write_again()

    def follows(self, index: int) -> bool:
        """Return whether a block is to be tuned behind its rounding.

        Where products are in float32, the rows pass the source only once so. Experts run their tokens in other parts
        while they are rounded.
        """
        plain = self._planned.recipe.calibration.precision == "float32"
        mixed = any(kind.stacks for kind in self._planned.matched.layers)
        return self._alone and plain and not mixed and tune_unit(index) in self._tuning.missing

    @property
    def follows_any(self) -> bool:
        """Return whether blocks are to be tuned, each behind its rounding."""
        return any(map(self.follows, range(self._planned.matched.blocks)))

    def streaming(self, sample: Sample) -> TuningStream:
        """Return the blocks with the rows that reach them, in the source and in the result."""
        from quantforge.model.tuning import TuningStream  # with transformers, which takes seconds

        settings = self._settings
        return TuningStream(
            self._checkpoint, self._planned.matched, sample, device=settings.device,
            micro_batch=self._planned.recipe.calibration.micro_batch,
            activations=self._tuning.place if settings.activations == "disk" else None,
        )  # fmt: skip

    def block(self, stream: TuningStream, part: BlockPart) -> None:
        """Tune a block that the rows have passed, and let those of the result go on; see `follows`."""
        with phase("", self._share(tune_unit(part.index)), TUNE):
            self._tuning.block(stream, part, self._after())

    def rest(self, sample: Sample) -> None:
        """Tune what was not tuned behind its rounding, where the plan wants that."""
        if missing := self._tuning.missing:
            with phase("", sum(map(self._share, missing)), TUNE):
                self._tuning.learn(lambda: self.streaming(sample), self._after())

    def _after(self) -> After:
        """Return what tells of units that were tuned, from now on."""
        start = time.monotonic()
        return lambda name, record: self._tell(name, record, start)
