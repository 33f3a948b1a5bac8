"""Inputs of a run beside the weights: whatever decides its bytes, read first, so that a resumed run can compare it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.reader import Checkpoint
from quantforge.execution.progress import tell
from quantforge.execution.resumption import fingerprint_of
from quantforge.formats.matching import settle_tied
from quantforge.numerics.allocator import return_freed_memory
from quantforge.planning.changed_source import changed, heads_as_asked
from quantforge.planning.planner import Planned
from quantforge.results.publish import taken
from quantforge.settings import Settings, check_device

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.execution.calibration import Calibrated


@dataclass(frozen=True, slots=True)
class RunInputs:
    """A run that can begin: everything that decides its bytes was read.

    Attributes:
        checkpoint: the source as the recipe changes all of it.
        planned: the run.
        source: for the manifest.
        calibrated: calibration text, None where none is needed.
        importance: of columns, by name of the source's tensor; empty without a file of it.
        fingerprint: by which a resumed run is compared.
    """

    checkpoint: Checkpoint
    planned: Planned
    source: Mapping[str, Any]
    calibrated: Calibrated | None
    importance: Mapping[str, Tensor]
    fingerprint: Mapping[str, str]


def read_inputs(
    opened: Checkpoint, before: Mapping[str, Any], planned: Planned, settings: Settings, out: Path
) -> RunInputs:
    """Read what decides the bytes of a run; of the weights it takes digests.

    Args:
        opened: the source before a recipe changes all of it.
        before: see `taken`.
        planned: the run.
        settings: how it runs.
        out: its result.
    """
    check_device(settings.device)
    tell("libraries")
    import torch

    from quantforge.execution.calibration import calibrated_for
    from quantforge.execution.expert_saliency import removed_experts
    from quantforge.execution.importance import known_importance
    from quantforge.numerics.team import reproducible

    if planned.matched.architecture is None and not planned.matched.draft:
        from quantforge.model.whole_checkpoint import check_whole

        check_whole(opened)
    # The peak that the plan promises is of what is alive.
    return_freed_memory(planned.plan.peak_memory_bytes)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    tell("digests of the source")
    opened, source = taken(opened, before, settings)
    opened = heads_as_asked(opened, planned.recipe.mtp)
    if planned.plan.needs or planned.recipe.prune_experts is not None:
        tell("calibration text", share=0.5)
    share, options = planned.recipe.prune_experts, planned.recipe.calibration
    with reproducible():
        calibrated = calibrated_for(opened, planned, settings)
        removed = removed_experts(opened, share, options, calibrated, settings, out.parent)
    checkpoint = changed(opened, planned.recipe.method, share, options, removed)
    source = {**source, **checkpoint.facts, "files": source["files"]}
    planned = replace(planned, matched=settle_tied(planned.matched, checkpoint))
    return RunInputs(
        checkpoint, planned, source, calibrated, known_importance(planned, settings),
        fingerprint_of(planned.recipe.to_toml(), source, calibrated, settings.device, settings.imatrix),
    )  # fmt: skip
