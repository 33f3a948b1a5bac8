"""Output path and disk space of a result, shared by all commands that write one."""

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

SPARE_BYTES = 1 << 20  # for configuration, card, manifest and journal


def stage_for(
    plan: Plan,
    files: Sequence[FilePlan],
    out: Path | None,
    settings: Settings,
    checkpoint: Checkpoint,
) -> Stage:
    """Return the stage (temporary directory) of a result that is a directory or a file.

    Raises:
        UsageError: a side file of GGUF is requested for another format, or the library for signatures is missing.
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
    """Return a message that the peak exceeds the memory, with remedies.

    ``on_disk`` tells whether hidden states are kept on disk already.
    """
    remedies = "fewer --samples" if on_disk else "--activations disk, fewer --samples"
    return (
        f"a peak of {size(peak)} above the imports is forecast, and this machine has {size(memory)}: {remedies},"
        " or --method rtn --scales absmax, which looks at one matrix at a time"
    )


def note_memory_shortage(peak: int, settings: Settings) -> None:
    """Send a note if the planned peak exceeds the memory of this machine."""
    memory = memory_bytes()
    if memory is not None and peak > memory:
        on_disk = settings.activations == "disk"
        settings.note(f"memory: {memory_hint(peak, memory, on_disk=on_disk)}")


def files_in_stage(stage: Stage, files: Sequence[FilePlan]) -> list[FilePlan]:
    """Return the file plans with their names inside of the stage."""
    return [replace(file, name=stage.final_name(file.name)) for file in files]


def side_file_bytes(checkpoint: Checkpoint, settings: Settings) -> int:
    """Return the maximum size in bytes of all side files, including a GGUF projector."""
    copied_bytes = sum(path.stat().st_size for path in checkpoint.side_files)
    projector_bytes = projector_file(checkpoint, "").plan.size if settings.mmproj else 0
    return SPARE_BYTES + copied_bytes + projector_bytes


def space(checkpoint: Checkpoint, planned: Planned, settings: Settings) -> int:
    """Return the disk space in bytes that a run needs: its output, and hidden states if they are kept on disk."""
    run_work = planned.plan.work
    assert run_work is not None  # of every run that quantizes
    temporary_bytes = run_work.guide_bytes + (
        run_work.states_bytes if settings.activations == "disk" else 0
    )
    return planned.plan.output_bytes + side_file_bytes(checkpoint, settings) + temporary_bytes
