"""Release: many recipes of one model, made, scored, gated and laid out to be uploaded; the same call resumes it.

Every variant (`quantforge.api.variants`) is planned before any is made, and all that cannot be made are named at
once. What lies beside the variants (report, figures in cards, manifest, checksums, the script that uploads it) is
derived from them alone, so that two runs give the same bytes. A directory is known as a release by its manifest, which
is written first.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.api.completed_result import made_again_after
from quantforge.api.evaluate import evaluate
from quantforge.api.folder_cards import check_folder_card, write_folder_card
from quantforge.api.scored_text import check_text, text_name
from quantforge.api.torch_defaults import torch_defaults
from quantforge.api.variants import Variants, plan_variants, turn
from quantforge.arguments import as_list, check_arguments
from quantforge.artifacts import manifest
from quantforge.artifacts.card import loading
from quantforge.artifacts.card_figures import (
    CARD,
    HERE,
    has_figures,
    read_card,
    restore_local_loading,
    write_figures,
    write_loading,
)
from quantforge.artifacts.publish import has_chat_template
from quantforge.errors import GateError, InputError, IntegrityError, RefusedError, UsageError
from quantforge.execution.progress import phase, report_to
from quantforge.execution.units import check_new_output
from quantforge.files.disk import check_new, make_folder, run_folder, save, writing
from quantforge.files.hub import resolve
from quantforge.files.opener import FILES, read_object
from quantforge.files.stage import check_folder
from quantforge.planning.local_paths import shared_adapter_path
from quantforge.planning.release_spec import REPORTS, ReleaseSpec, read_release
from quantforge.settings import Settings
from quantforge_files.roles import MANIFEST, RECIPE

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation

SCHEMA = "quantforge.release/1"
SPEC = "release.toml"  # the copy in the release
MANIFEST_NAME, SUMS, UPLOAD = "release.json", "SHA256SUMS", "upload.sh"
_FIGURES = ("kl_mean", "kl_se", "perplexity", "perplexity_increase", "top1_agreement")
_FILES = "GGUF"  # ends the name of the repository of all files


@dataclass(frozen=True, slots=True)
class ReleasedVariant:
    """A finished variant.

    Attributes:
        name: of the file.
        out: the directory or file.
        format, method: of its plan.
        weight_bytes: of the weight files.
        figures: measured ones; empty where nothing was scored.
        failed: the gates that it is beyond, in words.
    """

    name: str
    out: Path
    format: str
    method: str
    weight_bytes: int
    figures: Mapping[str, Any]
    failed: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the variant as plain data; its place is inside of the release."""
        out = f"{self.out.parent.name}/{self.out.name}"
        return {**asdict(self), "out": out, "failed": list(self.failed)}


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

    @property
    def outs(self) -> dict[str, Path]:
        """Return where each variant goes, by its name."""
        return {name: job.out for name, job in self.variants.jobs.items()}

    @property
    def reports(self) -> tuple[Path, ...]:
        """Return where the reports go; none where nothing is scored."""
        scoring = self.spec.scoring
        kinds = scoring.reports if scoring.text else ()
        return tuple(self.place / f"evaluation.{kind}" for kind in kinds)


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
    with report_to(settings.progress):
        planned = plan_release(spec, out, settings, only, budget)
        asked, place, variants = planned.spec, planned.place, planned.variants
        with writing(place, 0):
            make_folder(place)
        with turn(place / SPEC, settings.note):
            _lay_out(planned)
        scored = 1 + len(variants.jobs) if asked.scoring.text else 0
        made = variants.make(place / SPEC, scored)
        with turn(place / SPEC, settings.note), phase("publishing", 1.0):
            _write_if_changed(place / SPEC, planned.asked_by)  # another release may have begun here
            finished = _finish(planned)
    repository = asked.card.repository
    return Released(place, finished, made, planned.reports, planned.left_out, repository)


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
    if text := asked.scoring.text:
        reference = resolve(asked.model, settings.offline)
        check_text(reference, text, asked.scoring.length, offline=settings.offline)
        if "html" in asked.scoring.reports:
            from quantforge.evaluation.report_page.charts import check_drawing

            check_drawing()
    names, left_out = _within_budget(variants, budget)
    asked, variants = asked.only(names), variants.only(names)
    _check_place(place)
    _check_cards(variants, scored=bool(asked.scoring.text))
    return PlannedRelease(asked, asked_by, place, variants, left_out)


def _within_budget(variants: Variants, budget: int | None) -> tuple[list[str], dict[str, int]]:
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
    own = run_folder(place / SPEC)  # of a process that begins this release
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
            empty = {"schema": SCHEMA, "variants": []}
            _write_if_changed(place / MANIFEST_NAME, json.dumps(empty) + "\n")
        _write_if_changed(place / SPEC, planned.asked_by)
        for job in variants.jobs.values():
            make_folder(job.out.parent)
    if variants.settings.join:  # another process may have written figures by now
        return
    for job in (variants.jobs[name] for name in variants.missing):
        if job.out.is_dir() and manifest.read_manifest(job.out) is not None:
            write_figures(job.out, "", "")  # as it was published: neither is an edit of a person
            restore_local_loading(job.out)


def _finish(planned: PlannedRelease) -> tuple[ReleasedVariant, ...]:
    """Score the variants, which are all there, unless that is done, and write what lies beside them.

    Raises:
        IntegrityError: a file of a variant is not what the variant's manifest states.
        QuantForgeError: as `evaluate` and `save`.
    """
    place, card, outs = planned.place, planned.spec.card, planned.outs
    outputs = {out: (manifest.read_manifest(out) or {})["outputs"] for out in outs.values()}
    listed = {
        out: {name: one for name, one in files.items() if name != CARD}  # figures go into cards
        for out, files in outputs.items()
    }
    digests = _digests(listed)
    key = _key(planned, [*listed.values()])
    figures, found = _scored(planned, key)
    released = []
    for one in planned.spec.variants:
        out, plan = outs[one.name], planned.variants.jobs[one.name].planned.plan
        scored = figures.get(one.name, {})
        failed = one.gates.failed({**scored, "weight_bytes": plan.output_bytes})
        released.append(
            ReleasedVariant(
                one.name, out, plan.format, plan.method, plan.output_bytes, scored, failed
            )
        )
        if out.is_dir():
            named = repository_of(card.repository, out) or HERE
            write_loading(out, loading(plan, named, chat=has_chat_template(out)))
    _write_cards(planned, released, found)
    document = {
        "schema": SCHEMA,
        "source": dict(planned.variants.files),
        "versions": manifest.versions(),
        "evaluation": {"key": key, "figures": figures} if figures else None,
        "variants": [one.document() for one in released],
    }
    _write_if_changed(place / MANIFEST_NAME, json.dumps(document, indent=2, sort_keys=True) + "\n")
    _write_if_changed(place / UPLOAD, upload_script(card.repository, released))
    _write_if_changed(place / SUMS, _sums(planned, digests))
    return tuple(released)


def _write_if_changed(path: Path, content: bytes | str) -> None:
    """Write a file, in place of an earlier one; one that has these bytes stays as it is. Errors as `save`."""
    data = content.encode() if isinstance(content, str) else content
    digest = hashlib.sha256(data).hexdigest()
    there = path.is_file() and not path.is_symlink()
    if not there or manifest.sha256(path, path.parent) != digest:
        save(path, data, overwrite=True)


def _digests(listed: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """Return the SHA-256 digests of files that the manifests of variants list; errors as `release`."""
    found = {}
    for out, files in listed.items():
        root = out if out.is_dir() else out.parent
        for name, entry in files.items():
            found[root / name] = manifest.sha256(root / name, root)
            if found[root / name] != entry["sha256"]:
                raise IntegrityError(
                    f"{root / name}: is not what its manifest states, and is not published",
                    f"move the variant away: {made_again_after(out)}; the same command makes it again",
                    file=str(root / name),
                )
    return found


def _key(planned: PlannedRelease, listed: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of what decides the figures: source, variants, text (its content) and versions."""
    variants, scoring = planned.variants, planned.spec.scoring
    text = scoring.text and text_name(scoring.text)
    decides = [
        variants.files, listed, asdict(scoring), text, manifest.versions(), [*variants.jobs]
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _scored(planned: PlannedRelease, key: str) -> tuple[dict[str, Any], Evaluation | None]:
    """Return the figures of every variant by its name, and the evaluation unless they are those of an earlier run."""
    asked, place, variants = planned.spec, planned.place, planned.variants
    scoring, outs = asked.scoring, [*planned.outs.values()]
    if not scoring.text:
        return {}, None
    cards = {out.with_name(CARD) for out in outs if out.is_file()}
    try:
        earlier = read_object(place / MANIFEST_NAME, MANIFEST, place)["evaluation"]
        whole = all(path.is_file() for path in (*planned.reports, *cards))
        whole = whole and all(has_figures(out) for out in outs if out.is_dir())
        if earlier["key"] == key and whole:
            return dict(earlier["figures"]), None
    except (InputError, KeyError, TypeError):
        pass  # not measured yet
    merged = shared_adapter_path(one.recipe.adapter for one in asked.variants)
    found = evaluate(
        asked.model, outs, replace(variants.settings, adapter=merged),
        text=scoring.text, windows=scoring.windows, length=scoring.length, speed=scoring.speed,
    )  # fmt: skip
    from quantforge.evaluation.report import render

    for kind, path in zip(scoring.reports, planned.reports, strict=True):
        _write_if_changed(path, render(found, REPORTS[kind]))
    rows = zip(variants.jobs, found.rows[1:], strict=True)
    return {name: {figure: row[figure] for figure in _FIGURES} for name, row in rows}, found


def _write_cards(
    planned: PlannedRelease, released: Sequence[ReleasedVariant], found: Evaluation | None
) -> None:
    """Write the card of the folder of files, but for those beyond a gate, and put new figures into all cards."""
    files = [one for one in released if one.out.is_file() and not one.failed]
    if files:
        figures = {one.out.name: one.figures["kl_mean"] for one in files if one.figures}
        outs = [one.out for one in files]
        card, source = planned.spec.card, planned.variants.source
        repository = repository_of(card.repository, outs[0])
        write_folder_card(outs[0].parent, figures, source, card.base_model, outs, repository)
    if found is None:
        return
    from quantforge.evaluation.card_section import index, section

    failed = {str(one.out) for one in released if one.out.is_file() and one.failed}
    shown = replace(found, rows=tuple(row for row in found.rows if row["path"] not in failed))
    folders = [one.out.parent for one in files] + [one.out for one in released if one.out.is_dir()]
    for place in dict.fromkeys(folders):
        write_figures(place, section(shown, place), index(shown, place))


def _sums(planned: PlannedRelease, digests: Mapping[Path, str]) -> str:
    """Return a list for ``sha256sum -c``: files of the variants and those beside them, and no others."""
    place = planned.place
    paths = {place / SPEC, place / MANIFEST_NAME, place / UPLOAD, *planned.reports}
    for out in planned.outs.values():
        if out.is_dir():
            paths |= {path for path in out.rglob("*") if path.is_file()}
        else:
            card = out.with_name(CARD)
            paths |= {out, *out.parent.glob(f"{glob.escape(out.name)}.*")}
            paths |= {card} if card.is_file() else set()
    kept = sorted(path.relative_to(place).as_posix() for path in paths if path.name[0] != ".")
    return "".join(
        f"{digests.get(place / name) or manifest.sha256(place / name, place)}  {name}\n"
        for name in kept
    )


def repository_of(begun: str, out: Path) -> str:
    """Return where a variant is uploaded to, the model's name said once; "" where no repository is stated.

    Args:
        begun: ``ORG/NAME``, with which the names of all repositories begin.
        out: the variant; files of one folder share a repository.
    """
    named = out.name.removeprefix(f"{begun.rpartition('/')[2]}-")
    return begun and f"{begun}-{_FILES if out.is_file() else named}"


def upload_script(begun: str, variants: Sequence[ReleasedVariant]) -> str:
    """Return a script for a shell with one command for each repository; variants that failed are left out.

    Args:
        begun: as `repository_of`.
        variants: of the release.
    """
    named = shlex.quote(begun) if begun else '${1:?"usage: sh upload.sh ORG/NAME"}'
    lines = [
        "#!/bin/sh",
        "# Uploads this release with the command hf of huggingface_hub.",
        "set -eu",
        'CDPATH= cd -- "$(dirname -- "$0")"',
        f"cut -c 67- {SUMS} | while IFS= read -r file; do",
        '    test -f "$file" || { echo "$file is missing: put it back first" >&2; exit 1; }',
        "done",
        f"repository={named}",
        "begun=${repository##*/}-",
    ]
    passed = [one for one in variants if not one.failed]
    files = [one.name for one in passed if one.out.is_file()]
    if files:
        chosen = [shlex.quote(f"{name}.gguf{rest}") for name in files for rest in ("", ".*")]
        included = " ".join(f"--include {text}" for text in (CARD, *chosen))
        lines.append(f'hf upload "$repository-{_FILES}" gguf . {included}')
    for one in passed:
        if not one.out.is_file():
            lines.append(f"name={one.name}")  # the repository may begin with the same word
            lines.append(f'hf upload "$repository-${{name#"$begun"}}" {one.format}/{one.name} .')
    lines += [f"# {one.name} failed: {'; '.join(one.failed)}" for one in variants if one.failed]
    return "\n".join(lines) + "\n"
