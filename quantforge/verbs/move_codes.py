"""Move a model into the codes of another format, and publish it; an interrupted one starts anew, as it only copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import Stage
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.events import Event
from quantforge.execution.progress import phase
from quantforge.execution.relayout import settle_all, write_all
from quantforge.formats.matching import settle_tied
from quantforge.planning.conversion import Conversion
from quantforge.planning.coverage import Coverage
from quantforge.plans import Plan
from quantforge.results import manifest
from quantforge.results.publish import publish, stage_side_files, taken
from quantforge.settings import Settings, workers_of
from quantforge.verbs.output import placed_in, side_bytes, stage_for


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
    before: Mapping[str, Any],
    out: Path | None,
    settings: Settings,
    *,
    allow_inexact: bool,
) -> Exported:
    """Carry a conversion out and publish it.

    Args:
        conversion: which.
        before: as of `taken`.
        out: the result; where `naming` says when left out.
        settings: how to run.
        allow_inexact: accept rounding.

    Raises:
        QuantForgeError: as `export`.
    """
    checkpoint, plan = conversion.checkpoint, conversion.plan
    stage = stage_for(plan, conversion.files, out, settings, checkpoint)
    stage.check()
    settings.announce(plan, stage.named)
    with stage:
        stage.clear()
        stage.check_space(plan.output_bytes + side_bytes(checkpoint, settings))
        try:
            conversion.checkpoint, origin = taken(checkpoint, before, settings)
            with phase("reading", 0.4):
                settle_tied(conversion.matched, conversion.checkpoint)
                verdict = settle_all(
                    conversion, allow_inexact=allow_inexact, workers=workers_of(settings)
                )
            settings.policy.check(conversion.events)
            stage_side_files(stage, checkpoint, plan, origin, settings)
            with (
                phase("writing", 0.9),
                WeightsWriter(stage.path, placed_in(stage, conversion.files)) as writer,
            ):
                write_all(conversion, writer, allow_inexact=allow_inexact)
            document = _document(checkpoint, conversion, origin)
            with phase("publishing", 1.0):
                publish(stage, checkpoint, plan, conversion.files, document, settings=settings)
        except BaseException:
            stage.discard()
            raise
    return _exported(stage, conversion, verdict)


def _document(
    checkpoint: Checkpoint, conversion: Conversion, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest; what that of the source, as it was opened, says of its origin is passed on as it is."""
    document = manifest.manifest(conversion.plan, "", origin, None, [], conversion.figures)
    document["lineage"] = manifest.lineage(checkpoint.path)
    return document | manifest.of_events(conversion.events)


def _exported(stage: Stage, conversion: Conversion, verdict: str) -> Exported:
    plan: Plan = conversion.plan
    return Exported(
        stage.out, conversion.source_key, plan.format, len(conversion.layers), verdict,
        plan.output_bytes, conversion.coverage, tuple(conversion.events), (*plan.notes, *plan.left_behind),
        plan.name,
    )  # fmt: skip
