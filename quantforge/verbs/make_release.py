"""Release: many recipes of one model, made, scored, gated and laid out to be uploaded; the same call goes on with it.

Every variant is planned before any is made, and all that cannot be expressed are named at once. Variants are made by
`quantize_variants`, which resumes by itself; one that lies there with this recipe, source and versions is kept. What
stands beside the variants (`release_files`) is derived from them alone, so that two runs give the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantforge.checkpoint.disk import folder, writing
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.stage import check_apart, check_folder
from quantforge.errors import GateError
from quantforge.execution.progress import followed, phase
from quantforge.execution.units import check_new_output
from quantforge.formats.opening import open_model
from quantforge.planning.decisions import decisions_of
from quantforge.planning.release_spec import read_release
from quantforge.results import manifest
from quantforge.results.card_figures import forget_repository, write_figures
from quantforge.results.source_files import files_of_source
from quantforge.settings import Settings
from quantforge.verbs.asked_result import Variant
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.given_options import checks_options, listed
from quantforge.verbs.join_variants import turn
from quantforge.verbs.kept_variant import clear_run, kept
from quantforge.verbs.make_variants import make_variants, share_of
from quantforge.verbs.plan_release import PlannedVariant, plan_release, within
from quantforge.verbs.release_files import finish, reports_of
from quantforge.verbs.release_place import SPEC, UPLOAD, begin, check_place, check_variants, renew
from quantforge.verbs.upload_script import ReleasedVariant, upload_command
from quantforge_files.roles import RECIPE


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
        return upload_command(self.out / UPLOAD, self.repository)

    def check_gates(self) -> None:
        """Raise `GateError` where a variant is beyond a limit, naming all of them."""
        failed = [f"{one.name}: {text}" for one in self.variants for text in one.failed]
        if failed:
            raise GateError(
                f"{len(failed)} gate(s) failed: {'; '.join(failed)}",
                "the others are finished, and upload.sh leaves these out; use more bits, or raise the limit",
            )


@checks_options()
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
    names = [*map(str, listed(only, "only", '["demo-Q4_K_M"]'))]
    asked, place = read_release(Path(spec)).only(names), Path(os.path.abspath(out))  # noqa: PTH100 - links stay
    asked_by = FILES.read(Path(spec), RECIPE, None)
    settings = replace(settings, base_model=settings.base_model or asked.card.base_model)
    with followed(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            source = open_model(resolve(asked.model, settings.offline))
            files = files_of_source(source)
            planned, left_out = within(plan_release(asked, place, settings, files), budget)
            asked = asked.only([one.variant.name for one in planned])
        check_folder(place)
        for one in planned:
            check_apart(one.out, source.path)
        with writing(place, 0):
            folder(place)
        with turn(place / SPEC, settings.note):
            check_place(place)
            check_variants(planned, scored=bool(asked.scoring.text))
            _lay_out(place, planned, asked_by)
        missing = [one for one in planned if not one.there]
        for said in decisions_of({one.variant.name: one.planned.plan for one in missing}):
            settings.note(said)
        scored = 1 + len(planned) if asked.scoring.text else 0
        with phase("variants", share_of(len(missing), scored)):
            made = _make(asked.model, missing, place, files, settings)
        with turn(place / SPEC, settings.note), phase("publishing", 1.0):
            renew(place / SPEC, asked_by)  # another release may have begun here
            finished = finish(
                place,
                asked,
                [(one.variant, one.out, one.planned.plan) for one in planned],
                files,
                settings,
            )
    reports = tuple(reports_of(place, asked))
    return Released(place, finished, made, reports, left_out, asked.card.repository)


def _lay_out(place: Path, planned: Sequence[PlannedVariant], asked_by: bytes) -> None:
    """Make the directories, and keep the file that was asked by."""
    with writing(place, 0):
        begin(place, asked_by)
        for one in planned:
            folder(one.out.parent)
            if one.there:
                clear_run(one.out)


def _make(
    model: str,
    missing: Sequence[PlannedVariant],
    place: Path,
    files: Mapping[str, Any],
    settings: Settings,
) -> tuple[str, ...]:
    """Make the variants that are not there, and return the names of those that this process made."""
    if not missing:
        return ()
    if not settings.join:  # else another process may have written figures by now
        for one in missing:
            if one.out.is_dir() and manifest.read(one.out) is not None:
                write_figures(
                    one.out, "", ""
                )  # as it was published: neither is an edit of a person
                forget_repository(one.out)

    def is_there(number: int) -> bool:
        one = missing[number]
        return kept(one.out, one.planned, files, settings)

    wanted = [Variant(one.variant.recipe, one.out) for one in missing]
    made = make_variants(model, wanted, is_there, place / SPEC, settings)
    return tuple(missing[number].variant.name for number in made)
