"""Release: many recipes of one model, made, scored, gated and laid out to be uploaded; the same call resumes it.

Every variant (`quantforge.verbs.variants`) is planned before any is made, and all that cannot be made are named at
once. What lies beside the variants (`release_files`) is derived from them alone, so that two runs give the same bytes.
A directory is known as a release by its manifest, which is written first.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantforge.arguments import as_list, check_arguments
from quantforge.checkpoint.disk import check_new, folder, place_of_run, writing
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.stage import check_folder
from quantforge.errors import GateError, InputError, RefusedError, UsageError
from quantforge.execution.progress import followed, phase
from quantforge.execution.units import check_new_output
from quantforge.planning.release_spec import REPORTS, ReleaseSpec, read_release
from quantforge.results import manifest
from quantforge.results.card_figures import forget_repository, read_card, write_figures
from quantforge.settings import Settings
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.folder_cards import check_folder_card
from quantforge.verbs.release_files import (
    MANIFEST_NAME,
    SCHEMA,
    SPEC,
    SUMS,
    UPLOAD,
    ReleasedVariant,
    finish,
    renew,
    reports_of,
)
from quantforge.verbs.scored_text import check_text
from quantforge.verbs.variants import Variants, plan_variants, turn
from quantforge_files.roles import MANIFEST, RECIPE


@dataclass(frozen=True, slots=True)
class Released:
    """A release.

    Attributes:
        out: its directory.
        variants: what it consists of, in the order of the file.
        made: names of those that this run made.
        reports: files of the evaluation.
        left_out: variants beyond the budget, each with the bytes of its files.
        repository: with which the names of the hub's repositories begin; "" where the file states none.
    """

    out: Path
    variants: tuple[ReleasedVariant, ...]
    made: tuple[str, ...]
    reports: tuple[Path, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    repository: str = ""

    def document(self) -> dict[str, Any]:
        """Return the result as plain data."""
        rows = [variant.document() for variant in self.variants]
        return {
            "out": str(self.out), "made": list(self.made), "variants": rows, "left_out": dict(self.left_out)
        }  # fmt: skip

    @property
    def upload(self) -> str:
        """Return the command that uploads the release."""
        typed = "" if self.repository else " ORG/NAME"
        return f"sh {shlex.quote(str(self.out / UPLOAD))}{typed}"

    def check_gates(self) -> None:
        """Raise `GateError` where a variant is beyond a limit, naming all of them."""
        failed = [f"{one.name}: {text}" for one in self.variants for text in one.failed]
        if failed:
            raise GateError(
                f"{len(failed)} gate(s) failed: {'; '.join(failed)}",
                "the others are finished, and upload.sh leaves these out; use more bits, or raise the limit",
            )


@dataclass(frozen=True, slots=True)
class PlannedRelease:
    """A release that can be made.

    Attributes:
        spec: what it consists of.
        asked_by: the bytes of its file.
        place: its directory.
        variants: planned, in the order of the file.
        left_out: variants beyond the budget, each with the bytes of its files.
    """

    spec: ReleaseSpec
    asked_by: bytes
    place: Path
    variants: Variants
    left_out: Mapping[str, int]


@check_arguments()
@torch_defaults()
def release(
    spec: str | Path,
    out: str | Path,
    settings: Settings | None = None,
    only: str | Sequence[str] = (),
    budget: int | None = None,
) -> Released:
    """Make a release, or go on with it; ask `Released.check_gates` then.

    Args:
        spec: a release file.
        out: a directory, new or of an earlier run.
        settings: how to run.
        only: names of the variants that are made, and that the release then consists of; all when empty.
        budget: bytes that the files of a variant may take; larger variants are left out, too.

    Raises:
        RefusedError: variants that cannot be made, all named, or none within the budget, or something else lies at
            ``out``.
        QuantForgeError: as `quantize`, `evaluate` and `read_release`.
    """
    settings = settings or Settings()
    if settings.join:
        check_new_output(overwrite=settings.overwrite)
    with followed(settings.progress):
        planned = plan_release(spec, out, settings, only, budget)
        asked, place, variants = planned.spec, planned.place, planned.variants
        with writing(place, 0):
            folder(place)
        with turn(place / SPEC, settings.note):
            _lay_out(planned)
        scored = 1 + len(variants.jobs) if asked.scoring.text else 0
        made = variants.make(place / SPEC, scored)
        with turn(place / SPEC, settings.note), phase("publishing", 1.0):
            renew(place / SPEC, planned.asked_by)  # another release may have begun here
            finished = finish(place, asked, variants)
    reports = tuple(reports_of(place, asked))
    return Released(place, finished, made, reports, planned.left_out, asked.card.repository)


def plan_release(
    spec: str | Path,
    out: str | Path,
    settings: Settings,
    only: str | Sequence[str] = (),
    budget: int | None = None,
) -> PlannedRelease:
    """Plan every variant, and refuse whatever can be refused before the work; nothing is written.

    Arguments and errors as of `release`.
    """
    names = [*map(str, as_list(only))]
    asked, place = read_release(Path(spec)).only(names), Path(os.path.abspath(out))  # noqa: PTH100 - links stay
    asked_by = FILES.read(Path(spec), RECIPE, None)
    settings = replace(settings, base_model=settings.base_model or asked.card.base_model)
    with phase("planning", 0.02, "headers of the model"):
        recipes = {variant.name: variant.recipe for variant in asked.variants}
        variants, errors = plan_variants(
            asked.model, recipes, lambda name, key: place / key / name, settings
        )
    if errors:
        said = "; ".join(f"{name}: {error.message}" for name, error in errors.items())
        hints = "; ".join(dict.fromkeys(error.hint for error in errors.values() if error.hint))
        raise RefusedError(
            f"{len(errors)} of {len(recipes)} variants cannot be made: {said}", hints
        )
    _check_scored(asked, settings)
    names, left_out = _within(variants, budget)
    asked, variants = asked.only(names), variants.only(names)
    _check_place(place)
    _check_cards(variants, scored=bool(asked.scoring.text))
    return PlannedRelease(asked, asked_by, place, variants, left_out)


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


def _within(variants: Variants, budget: int | None) -> tuple[list[str], dict[str, int]]:
    """Return the names of variants whose files take at most a budget of bytes, and the size of each of the others.

    Raises:
        UsageError: the budget is no number of bytes.
        RefusedError: none is that small.
    """
    if budget is not None and (type(budget) is not int or budget < 1):
        raise UsageError(
            f"budget = {budget!a:.60}: a number of bytes is expected", "e.g. 8_000_000_000"
        )
    sizes = {name: job.planned.plan.output_bytes for name, job in variants.jobs.items()}
    left_out = {name: size for name, size in sizes.items() if budget and size > budget}
    if len(left_out) == len(sizes):
        name = min(sizes, key=lambda one: sizes[one])
        raise RefusedError(
            f"no variant has at most {budget} bytes: the smallest, {name}, has {sizes[name]}",
            "add a smaller variant, or allow more",
        )
    return [name for name in sizes if name not in left_out], left_out


def _check_place(place: Path) -> None:
    """Refuse a directory that holds something else than a release; errors as `check_folder` and `check_new`."""
    check_folder(place)
    own = place_of_run(place / SPEC)  # of a process that begins this release
    begun = re.compile(rf"\.{re.escape(MANIFEST_NAME)}\.[0-9a-f]+\.part")  # of one that was killed
    there = place.iterdir() if place.exists() else ()
    others = [path for path in there if path != own and not begun.fullmatch(path.name)]
    if others and not _is_release(place):
        raise RefusedError(
            f"{place}: exists, and is no release", "name a new directory with -o", file=str(place)
        )
    for name in (SPEC, MANIFEST_NAME, UPLOAD, SUMS, *(f"evaluation.{kind}" for kind in REPORTS)):
        if os.path.lexists(place / name):
            check_new(place / name, overwrite=True)


def _is_release(place: Path) -> bool:
    """Return whether a release was begun in a directory: its manifest is ours."""
    try:
        return read_object(place / MANIFEST_NAME, MANIFEST, place).get("schema") == SCHEMA
    except InputError:
        return False


def _check_cards(variants: Variants, *, scored: bool) -> None:
    """Refuse folders of variants that are links or files, and cards that lack a part into which figures go."""
    for name, job in variants.jobs.items():
        if os.path.lexists(job.out.parent):
            check_folder(job.out.parent)
        if job.one_file:
            check_folder_card(job.out.parent)
        elif scored and name not in variants.missing:
            read_card(job.out)


def _lay_out(planned: PlannedRelease) -> None:
    """Make the directories, keep the file that was asked by, and make cards of what is replaced as they were."""
    place, variants = planned.place, planned.variants
    with writing(place, 0):
        if not _is_release(place):
            document = json.dumps({"schema": SCHEMA, "variants": []}) + "\n"
            renew(place / MANIFEST_NAME, document.encode())
        renew(place / SPEC, planned.asked_by)
        for job in variants.jobs.values():
            folder(job.out.parent)
    if variants.settings.join:  # another process may have written figures by now
        return
    for job in (variants.jobs[name] for name in variants.missing):
        if job.out.is_dir() and manifest.read(job.out) is not None:
            write_figures(job.out, "", "")  # as it was published: neither is an edit of a person
            forget_repository(job.out)
