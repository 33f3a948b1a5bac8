"""Move: a model in the codes of another format, written, published, and gone on with where a command takes its files.

An export that only moves codes is begun afresh after an interruption: it copies. Where a command takes its weight files
as they get final (`--on-shard`), some of them may be gone by then, so that its journal has a line for every file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import DeniedError, InputError
from quantforge.events import Event
from quantforge.execution.claims import Claims
from quantforge.execution.handover import Handover, check_command, most_held, recorded
from quantforge.execution.journal import Workspace, recorded_fingerprint
from quantforge.execution.progress import phase
from quantforge.execution.relayout import settle_all, write_all
from quantforge.execution.resumption import begun, fingerprint_of
from quantforge.formats.matching import settle_tied
from quantforge.planning.conversion import Conversion
from quantforge.planning.coverage import Coverage
from quantforge.plans import Plan
from quantforge.results import manifest
from quantforge.results.publish import publish, stage_side_files, taken
from quantforge.settings import Settings, workers_of
from quantforge.verbs.finished_result import is_whole
from quantforge.verbs.output import beyond_disk, placed_in, side_bytes, stage_for


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        out: the directory or file.
        source_format, format: keys of the formats.
        layers: how many quantized layers were moved.
        verdict: how exactly.
        output_bytes: of the weight files.
        coverage: share of the weights in blocks that is quantized; None where nothing stays so.
        events: degradations.
        notes: what a person should know.
        name: that the plan gives it.
    """

    out: Path
    source_format: str
    format: str
    layers: int
    verdict: str
    output_bytes: int
    coverage: Coverage | None
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    name: str = ""

    def document(self) -> dict[str, object]:
        """Return the result as plain data."""
        found = asdict(self)
        del found["coverage"], found["name"]
        return {
            **found,
            "out": str(self.out),
            "block_share_quantized": self.coverage.share if self.coverage else 0.0,
            "kept_in_blocks": dict(self.coverage.kept) if self.coverage else {},
            "events": [event.to_json() for event in self.events],
        }


def move(
    conversion: Conversion,
    asked: str,
    before: Mapping[str, Any],
    out: Path | None,
    settings: Settings,
    *,
    allow_inexact: bool,
) -> Exported:
    """Carry a conversion out and publish it.

    Args:
        conversion: which.
        asked: its recipe as TOML: what a run that goes on has to agree in.
        before: as of `taken`.
        out: the result; where `naming` says when left out.
        settings: how to run.
        allow_inexact: accept rounding.

    Raises:
        QuantForgeError: as `export`.
    """
    checkpoint, plan = conversion.checkpoint, conversion.plan
    check_command(plan, "source", settings)
    stage = stage_for(plan, conversion.files, out, settings, checkpoint)
    asked = f"allow_inexact = {allow_inexact}\n{asked}"
    if _is_published(stage, conversion, asked, before, settings):
        verdict = settle_all(conversion, allow_inexact=allow_inexact)
        stage.forget()
        return _exported(stage, conversion, verdict)
    stage.check()
    settings.announce(plan, stage.named)
    with stage:
        goes_on = settings.on_shard is not None or bool(recorded(stage.journal))
        if not goes_on:
            stage.clear()
        stage.check_space(_held(conversion, settings), beyond_disk(plan))
        work = None
        try:
            conversion.checkpoint, origin = taken(checkpoint, before, settings)
            with phase("reading", 0.4):
                settle_tied(conversion.matched, conversion.checkpoint)
                verdict = settle_all(
                    conversion, allow_inexact=allow_inexact, workers=workers_of(settings)
                )
            settings.policy.check(conversion.events)
            if goes_on:
                wanted = fingerprint_of(asked, origin, None, settings.device, None)
                work = begun(stage, Claims(stage.units, ()), wanted, settings)
            stage_side_files(stage, checkpoint, plan, origin, settings)
            with phase("writing", 0.9):
                handed = _write(stage, conversion, work, settings, allow_inexact=allow_inexact)
            document = _document(checkpoint, conversion, origin)
            with phase("publishing", 1.0):
                publish(
                    stage, checkpoint, plan, conversion.files, document, settings=settings, handed=handed
                )  # fmt: skip
        except BaseException as error:
            _end(stage, work, error, goes_on=goes_on)
            raise
        if work is not None:
            work.remove()  # the last, as of `quantize`
    return _exported(stage, conversion, verdict)


def _document(
    checkpoint: Checkpoint, conversion: Conversion, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest; what that of the source, as it was opened, says of its origin is passed on as it is."""
    document = manifest.manifest(conversion.plan, "", origin, None, [], conversion.figures)
    document["lineage"] = manifest.lineage(checkpoint.path)
    return document | manifest.of_events(conversion.events)


def _end(stage: Stage, work: Workspace | None, error: BaseException, *, goes_on: bool) -> None:
    """Keep what the same command goes on with, and nothing else."""
    failed = isinstance(error, InputError) and not isinstance(error, DeniedError)
    if work is not None and failed:
        work.remove()  # the same input fails again
    elif work is not None:
        work.close()
    if not goes_on or (work is not None and failed):
        stage.discard()


def _write(
    stage: Stage,
    conversion: Conversion,
    work: Workspace | None,
    settings: Settings,
    *,
    allow_inexact: bool,
) -> Mapping[str, Any]:
    """Write all tensors, and hand over the files that are final; return what the manifest says of those."""
    files = placed_in(stage, conversion.files)
    if work is None:
        with WeightsWriter(stage.path, files) as writer:
            write_all(conversion, writer, allow_inexact=allow_inexact)
        return {}
    handover = Handover(
        settings.on_shard or "", stage, work.directory, {file.name: {file.name} for file in files}
    )
    work.committed = lambda: handover.take(work.done)
    work.committed()
    missing = {file.name: {tensor.name for tensor, _ in file.places} for file in files}
    home = {name: file for file, names in missing.items() for name in names}
    done = {name for file in work.done for name in missing[file]}
    with WeightsWriter(
        stage.path, files, done=done, gone=handover.gone, lazily=handover.lazily
    ) as writer:

        def wrote(name: str) -> None:
            """Commit the file of a tensor that was the last of it."""
            missing[home[name]].discard(name)
            if not missing[home[name]]:
                writer.sync()
                work.commit(home[name], {})

        write_all(conversion, writer, allow_inexact=allow_inexact, done=done, wrote=wrote)
    return handover.entries


def _held(conversion: Conversion, settings: Settings) -> int:
    """Return the bytes that lie on the disk at a time, at most: of the weight files, and of what is beside them."""
    plan, beside = conversion.plan, side_bytes(conversion.checkpoint, settings)
    if settings.on_shard is None:
        return beside + plan.output_bytes
    order = {
        stored.name: number
        for number, tensor in enumerate(plan.tensors)
        for stored in tensor.stored
    }
    times = [[order[name] for name in names] for names in plan.shards]
    return beside + most_held(times, [file.size for file in conversion.files])


def _is_published(
    stage: Stage, conversion: Conversion, asked: str, before: Mapping[str, Any], settings: Settings
) -> bool:
    """Return whether a run of this very export was killed behind its publication."""
    document = manifest.read(stage.out)
    if document is None or not stage.journal.is_dir() or stage.path.exists() or settings.overwrite:
        return False
    conversion.checkpoint, origin = taken(conversion.checkpoint, before, settings)
    wanted = fingerprint_of(asked, origin, None, settings.device, None)
    return recorded_fingerprint(stage.journal) == wanted and is_whole(document, stage)


def _exported(stage: Stage, conversion: Conversion, verdict: str) -> Exported:
    plan: Plan = conversion.plan
    return Exported(
        stage.out, conversion.source_key, plan.format, len(conversion.layers), verdict,
        plan.output_bytes, conversion.coverage, tuple(conversion.events), (*plan.notes, *plan.left_behind),
        plan.name,
    )  # fmt: skip
