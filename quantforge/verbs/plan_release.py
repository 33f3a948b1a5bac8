"""Plan of a release: every variant planned, those that cannot be made named at once, those beyond a budget left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.checkpoint.hub import resolve
from quantforge.errors import QuantForgeError, RefusedError, UsageError
from quantforge.formats import format_of
from quantforge.formats.opening import open_model
from quantforge.planning.planner import Planned
from quantforge.planning.release_spec import ReleaseSpec, ReleaseVariant
from quantforge.results.source_files import files_of_source
from quantforge.settings import Settings
from quantforge.verbs.kept_variant import check_whole_file, kept
from quantforge.verbs.plan import planned_for
from quantforge.verbs.scored_text import check_text


@dataclass(frozen=True, slots=True)
class PlannedVariant:
    """A variant whose plan is made: where it goes, and whether it is there."""

    variant: ReleaseVariant
    out: Path
    planned: Planned
    there: bool


def plan_release(
    asked: ReleaseSpec, place: Path, settings: Settings, files: Mapping[str, Any] | None = None
) -> list[PlannedVariant]:
    """Plan every variant; nothing is written.

    Args:
        asked: the release.
        place: its directory.
        settings: how to run.
        files: of the source, by `files_of_source`; read here when left out.

    Raises:
        RefusedError: with every variant that cannot be made, and why.
        UsageError, InputError: what is scored, as `check_text`, or a report that cannot be drawn.
    """
    if files is None:
        files = files_of_source(open_model(resolve(asked.model, settings.offline)))
    found, refused = [], []
    for variant in asked.variants:
        try:
            planned = planned_for(asked.model, variant.recipe, settings, None, {})
            settings.policy.check(planned.plan.substitutions)
            one_file = format_of(planned.plan.format).ABOUT.one_file
            check_whole_file(planned)
            out = (
                place / planned.plan.format / (f"{variant.name}.gguf" if one_file else variant.name)
            )
            found.append(PlannedVariant(variant, out, planned, kept(out, planned, files, settings)))
        except QuantForgeError as error:
            refused.append((variant.name, error))
    if refused:
        said = "; ".join(f"{name}: {error.message}" for name, error in refused)
        hints = "; ".join(dict.fromkeys(error.hint for _, error in refused if error.hint))
        raise RefusedError(
            f"{len(refused)} of {len(asked.variants)} variants cannot be made: {said}", hints
        )
    _check_scored(asked, settings)
    return found


def _check_scored(asked: ReleaseSpec, settings: Settings) -> None:
    """Refuse a text that gates and reports cannot be made of, and reports that cannot be written."""
    scoring = asked.scoring
    if not scoring.text:
        return
    reference = resolve(asked.model, settings.offline)
    check_text(reference, scoring.text, scoring.length, offline=settings.offline)
    if "html" in scoring.reports:
        from quantforge.evaluation.report_page.drawing import check_drawing

        check_drawing()


def within(
    planned: Sequence[PlannedVariant], budget: int | None
) -> tuple[list[PlannedVariant], dict[str, int]]:
    """Return the variants whose files take at most a budget of bytes, and the size of each of the others.

    Raises:
        UsageError: the budget is no number of bytes.
        RefusedError: none is that small.
    """
    if budget is None:
        return [*planned], {}
    if type(budget) is not int or budget < 1:
        raise UsageError(
            f"budget = {budget!a:.60}: a number of bytes is expected", "e.g. 8_000_000_000"
        )
    sizes = {one.variant.name: one.planned.plan.output_bytes for one in planned}
    kept = [one for one in planned if sizes[one.variant.name] <= budget]
    if not kept:
        name = min(sizes, key=lambda one: sizes[one])
        raise RefusedError(
            f"no variant has at most {budget} bytes: the smallest, {name}, has {sizes[name]}",
            "add a smaller variant, or allow more",
        )
    return kept, {name: size for name, size in sizes.items() if size > budget}
