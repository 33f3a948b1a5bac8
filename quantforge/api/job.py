"""Job: one result to be made, planned from headers.

`quantize` has one job; a release and a sweep have one for each variant. `plan_job` raises errors that headers show,
`Job.stage` those that the output path shows, and `Job.read` the rest, when it reads all inputs that determine the bytes
of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.api.output import note_memory_shortage, space, stage_for
from quantforge.artifacts.manifest import digest_small_files
from quantforge.artifacts.publish import digest_source
from quantforge.events import Event
from quantforge.execution.journal import run_fingerprint
from quantforge.files.reader import Checkpoint
from quantforge.files.stage import Stage
from quantforge.files.without_experts import remove_draft_heads
from quantforge.formats import load_format
from quantforge.formats.match_quantized import drop_tied_copy
from quantforge.numerics.allocator import return_freed_memory
from quantforge.planning import naming
from quantforge.planning.planner import Planned, check_text, make_plan
from quantforge.planning.source_views import planned_source, source_as_read, transformed_source
from quantforge.plans import Plan
from quantforge.progress import phase, report_step
from quantforge.recipe import Recipe
from quantforge.settings import Settings, check_device

if TYPE_CHECKING:
    from quantforge.execution.run_inputs import RunInputs


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a quantization run.

    Attributes:
        out: path of the result.
        plan: the plan of the run.
        events: all degradations.
        resumed: whether work of an earlier run was reused.
        scaled_activations: number of activations for which a transform (AWQ) found useful scale factors, and number of
            those searched; None without such a transform, or if the result existed already.
        adapter: path of the adapter that was merged into the model; None if there was none.
    """

    out: Path
    plan: Plan
    events: tuple[Event, ...]
    resumed: bool
    scaled_activations: tuple[int, int] | None = None
    adapter: Path | None = None


@dataclass(frozen=True)
class Job:
    """One result to be made, with its plan; headers show no error.

    Attributes:
        out: path of the result.
        settings: how to run, with the local paths of files that the recipe names.
        source: the model, with its experts stored as the output format needs them.
        checkpoint: the source with the recipe's changes to the whole model (adapter, removed experts or heads).
        small_file_digests: of the checkpoint, see `digest_source`.
        planned: plan of the run with its inputs.
    """

    out: Path
    settings: Settings
    source: Checkpoint
    checkpoint: Checkpoint
    small_file_digests: Mapping[str, Any]
    planned: Planned

    @cached_property
    def stage(self) -> Stage:
        """Return the stage (temporary directory) of the output; errors as `stage_for`."""
        plan, files = self.planned.plan, self.planned.files
        return stage_for(plan, files, self.out, self.settings, self.checkpoint)

    @property
    def one_file(self) -> bool:
        """Return whether the result is a file, not a directory."""
        return load_format(self.planned.plan.format).INFO.is_single_file

    def check_text(self) -> None:
        """Check the calibration text, as the run would at its start; errors as `planner.check_text`."""
        observes = bool(self.planned.plan.needs)
        check_text(self.planned.recipe, self.checkpoint, self.settings, observes=observes)

    def read(self) -> RunInputs:
        """Check the free disk space and read the inputs of the run. The caller holds the lock of the output."""
        self.stage.check_space(space(self.checkpoint, self.planned, self.settings))
        note_memory_shortage(self.planned.plan.peak_memory_bytes, self.settings)
        with phase("reading", 0.05):
            return self.read_inputs()

    def read_inputs(self) -> RunInputs:
        """Read the inputs that determine the bytes of the result; of weights, only their digests."""
        planned, settings, recipe = self.planned, self.settings, self.planned.recipe
        check_device(settings.device)
        report_step("libraries")
        import torch

        from quantforge.execution.calibration import draw_calibration_data
        from quantforge.execution.expert_saliency import choose_removed_experts
        from quantforge.execution.importance import read_unchanged_importance
        from quantforge.execution.run_inputs import RunInputs
        from quantforge.numerics.threads import reproducible

        if planned.model_layout.architecture is None and not planned.model_layout.draft_kind:
            from quantforge.model.weight_mapping import check_no_missing_parameters

            check_no_missing_parameters(self.source)
        # The planned peak counts only memory in use.
        return_freed_memory(planned.plan.peak_memory_bytes)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        report_step("digests of the source")
        checkpoint, source = digest_source(self.source, self.small_file_digests, settings)
        if recipe.mtp == "drop":
            checkpoint = remove_draft_heads(checkpoint)
        calibration = removed_experts = None
        with reproducible():
            if planned.plan.needs or recipe.prune_experts is not None:
                report_step("calibration text", share=0.5)
                calibration = draw_calibration_data(checkpoint, planned, settings)
            if calibration is not None and recipe.prune_experts is not None:
                scratch = self.stage.out.parent
                removed_experts = choose_removed_experts(
                    checkpoint, recipe, calibration, settings, scratch
                )
        checkpoint = transformed_source(checkpoint, recipe, removed_experts)
        source = {**source, **checkpoint.source_notes, "files": source["files"]}
        if planned.model_layout.stores_tied_head:
            planned = replace(
                planned, model_layout=drop_tied_copy(planned.model_layout, checkpoint)
            )
        importance = (
            read_unchanged_importance(planned, settings.imatrix) if settings.imatrix else {}
        )
        fingerprint = run_fingerprint(
            recipe.to_toml(), source, calibration, settings.device, settings.imatrix
        )
        return RunInputs(
            planned, settings, checkpoint, source, calibration, importance, fingerprint
        )


def plan_job(
    opened: Checkpoint, recipe: Recipe, out: Path | None, settings: Settings, *events: Event
) -> Job:
    """Plan one result; raise if headers show that it cannot be made.

    Args:
        opened: the model.
        recipe: the recipe, as `strip_local_paths` returns it.
        out: path of the result; the default of `naming` if None.
        settings: how to run, as `strip_local_paths` returns them.
        events: events that are known already.
    """
    source = source_as_read(opened, recipe, out, settings)
    checkpoint = planned_source(source, recipe)
    small_file_digests = digest_small_files(checkpoint)
    planned = make_plan(recipe, checkpoint, out, settings, events=events)
    settings.policy.check(planned.plan.substitutions)
    out = out or naming.default_path(planned.plan.name, checkpoint.path)
    return Job(out, settings, source, checkpoint, small_file_digests, planned)
