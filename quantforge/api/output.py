"""Place of a result, and the room that it asks for: shared by the verbs that write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantforge.artifacts.number_text import size
from quantforge.artifacts.publish import gguf_result_names
from quantforge.artifacts.signing import check_signing_key
from quantforge.errors import UsageError
from quantforge.files.reader import Checkpoint
from quantforge.files.stage import FileStage, Stage
from quantforge.formats import load_format
from quantforge.formats.gguf.projector_file import projector_file
from quantforge.planning import naming
from quantforge.planning.planner import Planned
from quantforge.plans import FilePlan, Plan
from quantforge.settings import Settings, memory_bytes

SPARE_BYTES = 1 << 20  # for configuration, card, manifest and journal, beside weights and copies


def stage_for(
    plan: Plan,
    files: Sequence[FilePlan],
    out: Path | None,
    settings: Settings,
    checkpoint: Checkpoint,
) -> Stage:
    """Return the stage of a directory, or of a file.

    Raises:
        UsageError: what lies beside a GGUF file is wanted without one, or a signature without its library.
        InputError: the key cannot sign.
    """
    source = checkpoint.path
    if settings.sign is not None:
        check_signing_key(settings.sign)
    one_file = load_format(plan.format).INFO.is_single_file
    if settings.modelfile and not one_file:
        raise UsageError(
            f"--modelfile: Ollama reads GGUF files, and the result would be {plan.format}",
            "add --format gguf, or leave --modelfile out",
        )
    out = out or naming.default_path(plan.name, source)
    if not one_file:
        return Stage(out, settings.overwrite, source)
    return FileStage(out, settings.overwrite, source, names=gguf_result_names(out, files, settings))


def memory_hint(peak: int, memory: int, *, on_disk: bool) -> str:
    """Return that a peak is beyond a machine's memory, and what takes less; ``on_disk``: activations wait there."""
    less = "fewer --samples" if on_disk else "--activations disk, fewer --samples"
    return (
        f"a peak of {size(peak)} above the imports is forecast, and this machine has {size(memory)}: {less},"
        " or --method rtn --scales absmax, which looks at one matrix at a time"
    )


def note_memory(peak: int, settings: Settings) -> None:
    """Tell whoever listens before the work that a peak is beyond this machine's memory."""
    memory = memory_bytes()
    if memory is not None and peak > memory:
        on_disk = settings.activations == "disk"
        settings.note(f"memory: {memory_hint(peak, memory, on_disk=on_disk)}")


def placed_in(stage: Stage, files: Sequence[FilePlan]) -> list[FilePlan]:
    """Return the files as they are called in the stage."""
    return [replace(file, name=stage.place(file.name)) for file in files]


def side_bytes(checkpoint: Checkpoint, settings: Settings) -> int:
    """Return how many bytes the files beside the weights take at most, that of a vision tower included."""
    carried = sum(path.stat().st_size for path in checkpoint.side_files)
    tower = projector_file(checkpoint, "").plan.size if settings.mmproj else 0
    return SPARE_BYTES + carried + tower


def space(checkpoint: Checkpoint, planned: Planned, settings: Settings) -> int:
    """Return the bytes that a run takes on the disk at most: the output and, if they wait there, activations."""
    work = planned.plan.work
    assert work is not None  # of every run that quantizes
    states = work.guide_bytes + (work.states_bytes if settings.activations == "disk" else 0)
    return planned.plan.output_bytes + side_bytes(checkpoint, settings) + states
