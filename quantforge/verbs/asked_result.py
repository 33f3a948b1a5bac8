"""One result as it is asked for: planned, and refused where headers tell that it cannot be made."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.errors import RefusedError
from quantforge.events import Event
from quantforge.execution.progress import phase
from quantforge.execution.units import check_shareable
from quantforge.formats.format_choice import settled
from quantforge.formats.opening import as_read
from quantforge.planning.changed_source import changed, heads_as_asked
from quantforge.planning.loader_form import as_loaded
from quantforge.planning.planned_run import check_text, planned_of
from quantforge.planning.planner import Planned
from quantforge.planning.single_experts import single_experts
from quantforge.plans import Plan
from quantforge.recipe import Recipe
from quantforge.results.source_files import small_files
from quantforge.settings import Settings, under_torchrun
from quantforge.verbs.finished_result import events_of_finished
from quantforge.verbs.output import note_memory, space, stage_for
from quantforge.verbs.run_inputs import RunInputs, read_inputs

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe and where its result goes; where `naming` says when left out."""

    recipe: Recipe
    out: Path | None


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


@dataclass(frozen=True, slots=True)
class AskedResult:
    """A result that can be made, as far as headers tell.

    Attributes:
        source: the model, with its experts as files are to hold them.
        checkpoint: the source as the recipe changes all of it.
        before: its small files, see `taken`.
        planned: the run.
        stage: of the output.
    """

    source: Checkpoint
    checkpoint: Checkpoint
    before: Mapping[str, Any]
    planned: Planned
    stage: Stage

    def finished(self, settings: Settings) -> Outcome | None:
        """Return the outcome of the result that this very command made, None if it is still to be made."""
        made = events_of_finished(self.checkpoint, self.planned, self.stage, settings)
        if made is None:
            return None
        return Outcome(self.stage.out, self.planned.plan, made, resumed=not settings.join)

    def announced(self, settings: Settings) -> Outcome | None:
        """Announce the plan, or return the outcome where this very command was published by now; errors as `Stage`."""
        try:
            self.stage.check()
        except RefusedError:
            finished = self.finished(settings)
            if finished is None:
                raise
            return finished
        check_text(self.planned, self.checkpoint, settings)
        settings.announce(self.planned.plan, self.stage.named)
        return None

    def begun(self, held: ExitStack, settings: Settings) -> Outcome | None:
        """Enter the stage, or return the outcome where that ended a publication of this very command."""
        try:
            held.enter_context(self.stage)
        except RefusedError:
            finished = self.finished(settings)
            if finished is None:
                raise
            return finished
        return None

    def read(self, settings: Settings) -> RunInputs:
        """Read what decides the bytes. The caller holds the lock of the output."""
        self.stage.check_space(space(self.checkpoint, self.planned, settings))
        note_memory(self.planned.plan.peak_memory_bytes, settings)
        with phase("reading", 0.05):
            return read_inputs(self.source, self.before, self.planned, settings, self.stage.out)


def wanted_of(
    checkpoint: Checkpoint, variant: Variant, settings: Settings, *events: Event
) -> AskedResult:
    """Plan a result, and refuse what headers tell to be impossible; paths of the recipe are `cited` already."""
    recipe, out = variant.recipe, variant.out
    key = settled(recipe, out)[0].format
    source = as_loaded(as_read(checkpoint, settings.adapter), key, recipe.engine)
    source = single_experts(source, key, recipe.layers)
    checkpoint = heads_as_asked(source, recipe.mtp)
    checkpoint = changed(checkpoint, recipe.method, recipe.prune_experts, recipe.calibration)
    before = small_files(checkpoint)
    planned = planned_of(checkpoint, recipe, out, settings)
    known = (*events, *planned.plan.substitutions)
    planned = replace(planned, plan=replace(planned.plan, substitutions=known))
    settings.policy.check(known)
    if settings.join:
        architecture = planned.matched.architecture
        check_shareable(
            planned.plan, overwrite=settings.overwrite, prunes=recipe.prune_experts is not None,
            torchrun=under_torchrun(), replayed=architecture is not None and bool(architecture.replayed),
        )  # fmt: skip
    stage = stage_for(planned.plan, planned.files, out, settings, checkpoint)
    return AskedResult(source, checkpoint, before, planned, stage)


def check_wanted(checkpoint: Checkpoint, variant: Variant, settings: Settings) -> None:
    """Refuse what headers and the place of a result tell, before work by which its recipe is found; errors as a run.

    The plan is announced, as when the run begins: whoever listens may refuse the place, too.
    """
    wanted = wanted_of(checkpoint, variant, settings)
    if not wanted.stage.begun:
        with wanted.stage:
            pass
    check_text(wanted.planned, checkpoint, settings)
    settings.announce(wanted.planned.plan, wanted.stage.named)
