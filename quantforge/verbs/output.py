"""Place of a result, and the room that it asks for: shared by the verbs that write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantforge.checkpoint.publish_file import FileStage
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.errors import UsageError
from quantforge.execution.handover import held_bytes
from quantforge.formats import format_of
from quantforge.planning import expert_memory, naming
from quantforge.planning.guidance import disk_bytes
from quantforge.planning.planner import Planned
from quantforge.plans import FilePlan, Plan
from quantforge.results.publish import names_of
from quantforge.results.signing import check_key
from quantforge.settings import Settings

SPARE_BYTES = 1 << 20  # for configuration, card, manifest and journal, beside weights and copies


def stage_for(
    plan: Plan, files: Sequence[FilePlan], out: Path | None, settings: Settings, source: Path
) -> Stage:
    """Return the stage of a directory, or of a file, and announce the plan.

    Raises:
        UsageError: a Modelfile is wanted without a GGUF file, or a signature without its library.
        InputError: the key cannot sign.
    """
    if settings.sign is not None:
        check_key(settings.sign)
    one_file = format_of(plan.format).ABOUT.one_file
    if settings.modelfile and not one_file:
        raise UsageError(
            f"--modelfile: Ollama reads GGUF files, and {plan.format} is asked for",
            "--format gguf, or leave --modelfile out",
        )
    settings.announce(plan, out := out or naming.place(plan.name, source))
    if not one_file:
        return Stage(out, settings.overwrite, source)
    return FileStage(out, settings.overwrite, source, names=names_of(out, files, settings))


def placed_in(stage: Stage, files: Sequence[FilePlan]) -> list[FilePlan]:
    """Return the files as they are called in the stage."""
    return [replace(file, name=stage.place(file.name)) for file in files]


def side_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes the files beside the weights take at most."""
    return SPARE_BYTES + sum(path.stat().st_size for path in checkpoint.side_files)


def space(checkpoint: Checkpoint, planned: Planned, settings: Settings) -> int:
    """Return the bytes that a run takes on the disk at most: the output and, if they wait there, activations.

    Of an output whose files are taken by a command it is what lies there at a time.
    """
    dimensions = planned.matched.dimensions
    states = 0
    streams = planned.plan.needs or planned.recipe.prune_experts
    if settings.activations == "disk" and streams and dimensions:
        rows = planned.recipe.calibration
        states = 4 * rows.samples * rows.length * dimensions.hidden
        states *= expert_memory.states(planned.matched) + bool(planned.plan.tune)
    states += disk_bytes(
        planned.plan.guide, planned.plan.tensors, planned.matched, planned.recipe.calibration
    )
    output = planned.plan.output_bytes
    if settings.on_shard:
        output = held_bytes(planned.plan, planned.matched.blocks, planned.files)
    return output + side_bytes(checkpoint) + states
