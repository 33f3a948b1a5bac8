"""Correct: an adapter of low rank for a quantized model, in the files of PEFT, that makes up for a part of its errors.

The result is a directory of its own; nothing in the model is changed. The same call goes on after an interruption,
block by block, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantforge.architectures.match import declared
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.stage import Stage
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import DeniedError, InputError, UsageError
from quantforge.execution.claims import Claims
from quantforge.execution.journal import Workspace
from quantforge.execution.progress import followed, phase
from quantforge.execution.resumption import begun, fingerprint_of
from quantforge.formats.sources.adapter import WEIGHTS
from quantforge.formats.sources.adapter_config import CONFIG
from quantforge.formats.sources.adapter_files import BASE, configuration, planned_weights
from quantforge.planning.cited_files import cited
from quantforge.planning.planner import make_plan
from quantforge.planning.recipe_options import RecipeOptions, build_recipe
from quantforge.plans import FilePlan
from quantforge.results import manifest
from quantforge.results.publish import source_of
from quantforge.settings import Settings, check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.given_options import checks_options
from quantforge.verbs.output import SPARE_BYTES

if TYPE_CHECKING:
    from quantforge.execution.calibration import Calibrated
    from quantforge.recipe import Recipe
    from quantforge.verification.correctable import Correctable

RANK = 32
METHOD = "low-rank"  # in the manifest


@dataclass(frozen=True, slots=True)
class Corrected:
    """Result of a correction: the adapter's directory, modules that it changes, their rank, its bytes, and events."""

    out: Path
    modules: int
    rank: int
    output_bytes: int
    resumed: bool
    events: tuple[Any, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "out": str(self.out),
            "modules": self.modules,
            "rank": self.rank,
            "output_bytes": self.output_bytes,
            "resumed": self.resumed,
            "events": [event.to_json() for event in self.events],
        }


@checks_options(RecipeOptions)
@torch_defaults()
def correct(
    model: str | Path,
    quantized: str | Path,
    out: str | Path | None = None,
    *,
    rank: int = RANK,
    settings: Settings | None = None,
    **options: Unpack[RecipeOptions],
) -> Corrected:
    """Write an adapter of low rank that brings a quantized model nearer to its source.

    Args:
        model: the source.
        quantized: a directory that was made from it, in a format that PEFT loads.
        out: the adapter's directory; beside the quantized model, with ``-lora`` and the rank, when left out.
        rank: of the correction of each linear.
        settings: how to run.
        options: of calibration, and the adapter that was merged into the source.

    Raises:
        UsageError: a rank below 1, or above a side of a matrix.
        RefusedError: nothing that PEFT loads can be made: a GGUF file, experts, no quantized linears.
        IntegrityError: the quantized model was made from another source.
        InputError: a model cannot be read, or something is not finite.
    """
    settings = settings or Settings()
    if rank < 1:
        raise UsageError(f"--rank {rank}: nothing is left of a correction", f"e.g. --rank {RANK}")
    check_device(settings.device)
    with followed(settings.progress):
        with phase("planning", 0.02, "headers of the models"):
            recipe, settings = cited(build_recipe(None, **options), settings)
            source, base = (resolve(str(path), settings.offline) for path in (model, quantized))
            from quantforge.verification.correctable import open_correctable

            found = open_correctable(source, base, settings.adapter, rank)
        place = Path(out) if out is not None else base.with_name(f"{base.name}-lora{rank}")
        return _Run(found, recipe, rank, settings).made(place)


@dataclass(frozen=True, slots=True)
class _Run:
    """A correction that can begin."""

    found: Correctable
    recipe: Recipe
    rank: int
    settings: Settings

    def made(self, out: Path) -> Corrected:
        """Correct, and publish."""
        import torch

        from quantforge.numerics.team import reproducible

        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        base, file = self.found.base.checkpoint, planned_weights(self.found.shapes, self.rank)
        with Stage(out, self.settings.overwrite, base.path) as stage, reproducible():
            stage.check_space(file.size + SPARE_BYTES)
            with phase("reading", 0.05, "digests and calibration text"):
                source = source_of(self.found.source.checkpoint)
                origins = {"source": source, BASE: source_of(base)}
                calibrated = self._calibrated()
            fingerprint = self._fingerprint(origins, calibrated)
            work = begun(stage, Claims(stage.units, ()), fingerprint, self.settings)
            try:
                self._correct(stage, file, calibrated, work)
                self._publish(stage, origins, calibrated)
            except BaseException as error:
                work.close()
                if isinstance(error, InputError) and not isinstance(error, DeniedError):
                    work.remove()  # the same input fails again
                    stage.discard()
                raise
            work.remove()
        return Corrected(
            stage.out, len(self.found.modules), self.rank, file.size, work.resumed, calibrated.events
        )  # fmt: skip

    def _correct(
        self, stage: Stage, file: FilePlan, calibrated: Calibrated, work: Workspace
    ) -> None:
        from quantforge.execution.correction import Correction
        from quantforge.model.stream import ModelStream

        base, options = self.found.base, self.recipe.calibration
        place = work.directory if self.settings.activations == "disk" else None
        done = [name for record in work.done.values() for name in record["sums"]]
        with (
            phase("correcting", 0.95),
            WeightsWriter(stage.path, [file], done=done) as writer,
            ModelStream(
                base.checkpoint, base.matched, calibrated.sample, micro_batch=options.micro_batch,
                device=self.settings.device, activations=place, precision=options.precision,
            ) as stream,
        ):  # fmt: skip
            blocks = base.matched.blocks
            Correction(
                self.found.modules, self.found.aims, self.rank, writer, work, blocks
            ).execute(stream)

    def _publish(self, stage: Stage, origins: Mapping[str, Any], calibrated: Calibrated) -> None:
        found = self.found
        name, modules = found.base.checkpoint.path.name, {*found.modules.values()}
        text = configuration(name, modules, found.others, self.rank, turned=found.turned)
        stage.write_file(CONFIG, text)
        document = {
            "schema": manifest.SCHEMA,
            "method": METHOD,
            "format": "peft",
            "rank": self.rank,
            "versions": manifest.versions(),
            "recipe": self.recipe.to_toml(),
            **origins,
            "calibration": calibrated.describe(),
            **manifest.of_events(calibrated.events),
        }
        stage.check_whole({stage.manifest, WEIGHTS})
        stage.write_file(stage.manifest, manifest.finish(document, stage.path))
        stage.publish()

    def _calibrated(self) -> Calibrated:
        """Draw the calibration rows; errors as `calibrate`."""
        from quantforge.execution.calibration import calibrate
        from quantforge.execution.self_calibration import own_rows

        source, settings, options = (
            self.found.source.checkpoint,
            self.settings,
            self.recipe.calibration,
        )
        planned = make_plan(self.recipe, source)
        calibrated = calibrate(
            source.path, options, planned.plan, settings.calibration,
            vocabulary=declared(planned.matched)[1].vocab,
            offline=settings.offline, own_rows=own_rows(source.path, options, settings.device),
        )  # fmt: skip
        for note in calibrated.notes:
            settings.note(note)
        settings.policy.check(calibrated.events)
        return calibrated

    def _fingerprint(
        self, origins: Mapping[str, Mapping[str, Any]], calibrated: Calibrated
    ) -> dict[str, str]:
        """Return everything that decides a byte of the adapter."""
        device = self.settings.device
        found = fingerprint_of(self.recipe.to_toml(), origins["source"], calibrated, device, None)
        base = {
            f"quantized file {name}": entry["sha256"]
            for name, entry in origins[BASE]["files"].items()
        }
        return {**found, "rank": str(self.rank), **base}
