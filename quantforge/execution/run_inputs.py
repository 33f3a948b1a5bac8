"""What a run reads before it begins: everything that decides its bytes, so that a resumed run can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.execution.calibration import Calibrated
    from quantforge.model.hidden_states import HiddenStates
    from quantforge.model.stream import ModelStream
    from quantforge.planning.planner import Planned
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample


@dataclass(frozen=True, slots=True, eq=False)
class RunInputs:
    """One result that is to be made, as execution takes it.

    Attributes:
        planned: what is to be done: the plan, its recipe and the matched checkpoint.
        settings: how to run.
        checkpoint: the source as the recipe changes all of it; its weights are compared with their digests when read.
        source: of the checkpoint, for the manifest.
        calibrated: calibration text, None where none is needed.
        importance: mean squares of columns that are known without calibration, by tensor.
        fingerprint: by which a resumed run is compared.
    """

    planned: Planned
    settings: Settings
    checkpoint: Checkpoint
    source: Mapping[str, Any]
    calibrated: Calibrated | None
    importance: Mapping[str, Tensor]
    fingerprint: Mapping[str, str]

    @property
    def sample(self) -> Sample | None:
        """Return the calibration rows that pass through the blocks."""
        return self.calibrated.sample if self.calibrated and self.planned.plan.needs else None

    def stream(
        self, sample: Sample, directory: Path, states: HiddenStates | None = None
    ) -> ModelStream:
        """Return the blocks of the source with the rows that reach them.

        Args:
            sample: the rows.
            directory: for hidden states, if they wait on disk.
            states: a store for those between blocks, wherever others wait.
        """
        from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

        options, settings = self.planned.recipe.calibration, self.settings
        on_disk = directory if settings.activations == "disk" else None
        return ModelStream(
            self.checkpoint, self.planned.matched, sample, micro_batch=options.micro_batch,
            device=settings.device, activations=states or on_disk, precision=options.precision,
        )  # fmt: skip
