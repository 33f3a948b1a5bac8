"""Inputs of a run: everything that determines the bytes of one result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.execution.calibration import CalibrationData
    from quantforge.files.reader import Checkpoint
    from quantforge.model.hidden_states import HiddenStates
    from quantforge.model.stream import ModelStream
    from quantforge.planning.planner import Planned
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample


@dataclass(frozen=True, slots=True, eq=False)
class RunInputs:
    """Everything that determines the bytes of one result, read before the run begins.

    Attributes:
        planned: the plan, its recipe and the matched checkpoint.
        settings: how to run.
        checkpoint: the source after changes by the recipe; weights are verified against their digests when read.
        source: description of the source for the manifest.
        calibrated: calibration data; None if not needed.
        importance: mean squares of input columns known without calibration, by tensor.
        fingerprint: fingerprint that a resumed run has to match.
    """

    planned: Planned
    settings: Settings
    checkpoint: Checkpoint
    source: Mapping[str, Any]
    calibrated: CalibrationData | None
    importance: Mapping[str, Tensor]
    fingerprint: Mapping[str, str]

    @property
    def sample(self) -> Sample | None:
        """Return the calibration rows that pass through the blocks; None if the plan needs none."""
        return self.calibrated.sample if self.calibrated and self.planned.plan.needs else None

    def stream(
        self, sample: Sample, directory: Path, states: HiddenStates | None = None
    ) -> ModelStream:
        """Return an iterator over the blocks of the source with the rows that reach them.

        Args:
            sample: calibration rows.
            directory: directory for hidden states if they are kept on disk.
            states: store for the hidden states between blocks, used instead of the default one.
        """
        from quantforge.model.stream import ModelStream  # with transformers, which takes seconds

        options, settings = self.planned.recipe.calibration, self.settings
        on_disk = directory if settings.activations == "disk" else None
        return ModelStream(
            self.checkpoint, self.planned.model_layout, sample, micro_batch=options.micro_batch,
            device=settings.device, activations=states or on_disk, precision=options.precision,
        )  # fmt: skip
