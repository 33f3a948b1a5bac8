"""A job: one result that is to be made, planned from headers, with what decides its bytes read before the work.

`quantize` has one job; a release and a sweep have one for each variant. `plan_job` refuses what headers tell to be
impossible, `Job.stage` what the output's place tells, and `Job.read` the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.api.output import note_memory, space, stage_for
from quantforge.artifacts.manifest import digest_small_files
from quantforge.artifacts.publish import digest_source
from quantforge.events import Event
from quantforge.execution.journal import run_fingerprint
from quantforge.execution.progress import phase, report_step
from quantforge.files.reader import Checkpoint
from quantforge.files.stage import Stage
from quantforge.files.without_experts import fewer_heads
from quantforge.formats import load_format
from quantforge.formats.match_quantized import drop_tied_copy
from quantforge.numerics.allocator import return_freed_memory
from quantforge.planning import naming
from quantforge.planning.planner import Planned, check_text, make_plan
from quantforge.planning.source_views import planned_source, source_as_read, transformed_source
from quantforge.plans import Plan
from quantforge.recipe import Recipe
from quantforge.settings import Settings, check_device

if TYPE_CHECKING:
    from quantforge.execution.execute import RunInputs


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        out: where the result is.
        plan: what was planned.
        events: all degradations.
        resumed: whether an earlier run's work was kept.
        scaled: for how many activations a transform found factors that are better than none, and for how many it
            searched; None where none did, or the result was there already.
        adapter: where the adapter is that was merged into the model; None where none was.
    """

    out: Path
    plan: Plan
    events: tuple[Event, ...]
    resumed: bool
    scaled: tuple[int, int] | None = None
    adapter: Path | None = None


@dataclass(frozen=True)
class Job:
    """A result that can be made, as far as headers tell.

    Attributes:
        out: where it goes.
        settings: how it is made; they know where the files are that its recipe names.
        source: the model, with its experts as files are to hold them.
        checkpoint: the source as the recipe changes all of it.
        before: small files of the checkpoint, see `digest_source`.
        planned: the run.
    """

    out: Path
    settings: Settings
    source: Checkpoint
    checkpoint: Checkpoint
    before: Mapping[str, Any]
    planned: Planned

    @cached_property
    def stage(self) -> Stage:
        """Return the stage of the output; errors as `stage_for`."""
        plan, files = self.planned.plan, self.planned.files
        return stage_for(plan, files, self.out, self.settings, self.checkpoint)

    @property
    def one_file(self) -> bool:
        """Return whether the result is a file, not a directory."""
        return load_format(self.planned.plan.format).INFO.is_single_file

    def check_text(self) -> None:
        """Refuse a calibration text that the run would refuse at its start; errors as `planner.check_text`."""
        observes = bool(self.planned.plan.needs)
        check_text(self.planned.recipe, self.checkpoint, self.settings, observes=observes)

    def read(self) -> RunInputs:
        """Check the space, and read what decides the bytes. The caller holds the lock of the output."""
        self.stage.check_space(space(self.checkpoint, self.planned, self.settings))
        note_memory(self.planned.plan.peak_memory_bytes, self.settings)
        with phase("reading", 0.05):
            return self.read_inputs()

    def read_inputs(self) -> RunInputs:
        """Read what decides the bytes of the run; of the weights, their digests."""
        planned, settings, recipe = self.planned, self.settings, self.planned.recipe
        check_device(settings.device)
        report_step("libraries")
        import torch

        from quantforge.execution.calibration import draw_calibration_data
        from quantforge.execution.execute import RunInputs
        from quantforge.execution.expert_saliency import choose_removed_experts
        from quantforge.execution.importance import read_unchanged_importance
        from quantforge.numerics.threads import reproducible

        if planned.model_layout.architecture is None and not planned.model_layout.draft:
            from quantforge.model.weight_mapping import check_no_missing_parameters

            check_no_missing_parameters(self.source)
        # The peak that the plan promises is of what is alive.
        return_freed_memory(planned.plan.peak_memory_bytes)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        report_step("digests of the source")
        checkpoint, source = digest_source(self.source, self.before, settings)
        if recipe.mtp == "drop":
            checkpoint = fewer_heads(checkpoint)
        calibrated = removed = None
        with reproducible():
            if planned.plan.needs or recipe.prune_experts is not None:
                report_step("calibration text", share=0.5)
                calibrated = draw_calibration_data(checkpoint, planned, settings)
            if calibrated is not None and recipe.prune_experts is not None:
                scratch = self.stage.out.parent
                removed = choose_removed_experts(checkpoint, recipe, calibrated, settings, scratch)
        checkpoint = transformed_source(checkpoint, recipe, removed)
        source = {**source, **checkpoint.facts, "files": source["files"]}
        if planned.model_layout.tied_twice:
            planned = replace(
                planned, model_layout=drop_tied_copy(planned.model_layout, checkpoint)
            )
        importance = (
            read_unchanged_importance(planned, settings.imatrix) if settings.imatrix else {}
        )
        fingerprint = run_fingerprint(
            recipe.to_toml(), source, calibrated, settings.device, settings.imatrix
        )
        return RunInputs(planned, settings, checkpoint, source, calibrated, importance, fingerprint)


def plan_job(
    opened: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings, *events: Event
) -> Job:
    """Plan a result, and refuse what headers tell to be impossible.

    Args:
        opened: the model.
        recipe: what is wanted, as `strip_local_paths` returns it.
        out: where the result goes; where `naming` says if None.
        settings: how it is made, as `strip_local_paths` returns them.
        events: that are known already.
    """
    source = source_as_read(opened, recipe, out, settings)
    checkpoint = planned_source(source, recipe)
    before = digest_small_files(checkpoint)
    planned = make_plan(recipe, checkpoint, out, settings, events=events)
    settings.policy.check(planned.plan.substitutions)
    out = out or naming.default_path(planned.plan.name, checkpoint.path)
    return Job(out, settings, source, checkpoint, before, planned)
