"""``release``: make, score and check many variants of one model, ready to be uploaded.

Every variant (`quantforge.api.variants`) is planned before any is made, and one error names all that cannot be made.
The files next to the variants (report, figures in cards, manifest, checksums, upload script) are derived from them
alone, so that two runs give the same bytes. The manifest, which is written first, marks a directory as a release. The
same call resumes an interrupted release.
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

from quantforge.api.completed_result import move_away_command
from quantforge.api.evaluate import evaluate
from quantforge.api.folder_cards import check_folder_card, write_folder_card
from quantforge.api.scored_text import check_text, text_name
from quantforge.api.torch_defaults import torch_defaults
from quantforge.api.variants import Variants, exclusive_lock, plan_variants
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
from quantforge.execution.units import check_new_output
from quantforge.files.disk import (
    check_new_file,
    make_directory,
    run_folder,
    save_file,
    write_errors,
)
from quantforge.files.hub import resolve_model
from quantforge.files.opener import FILES, read_object
from quantforge.files.previous_output import other_version
from quantforge.files.stage import check_results_directory
from quantforge.planning.local_paths import shared_adapter_path
from quantforge.planning.release_spec import REPORTS, ReleaseSpec, read_release
from quantforge.progress import phase, report_to
from quantforge.settings import Settings
from quantforge_files.roles import MANIFEST, RECIPE

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation

SCHEMA = "quantforge.release/2"
SPEC = "release.toml"  # copy of the release file in the release
MANIFEST_NAME, CHECKSUMS, UPLOAD_SCRIPT = "release.json", "SHA256SUMS", "upload.sh"
_FIGURES = ("kl_mean", "kl_se", "perplexity", "perplexity_increase", "top1_agreement")
_GGUF_SUFFIX = "GGUF"  # end of the name of the repository with all GGUF files


@dataclass(frozen=True, slots=True)
class ReleasedVariant:
    """A finished variant of a release.

    Attributes:
        name: its name in the release file.
        out: the directory or file.
        format, method: format and method of its plan.
        weight_bytes: size of the weight files.
        figures: measured figures; empty if nothing was scored.
        failed: messages about the gates (limits) that it fails.
    """

    name: str
    out: Path
    format: str
    method: str
    weight_bytes: int
    figures: Mapping[str, Any]
    failed: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the variant as plain data, with its path relative to the release."""
        out = f"{self.out.parent.name}/{self.out.name}"
        return {
            "name": self.name,
            "path": out,
            "format": self.format,
            "method": self.method,
            "weight_bytes": self.weight_bytes,
            "metrics": dict(self.figures),
            "failed_gates": list(self.failed),
        }


@dataclass(frozen=True, slots=True)
class Released:
    """A finished release.

    Attributes:
        out: its directory.
        variants: its variants, in the order of the release file.
        made: names of the variants that this run made.
        reports: report files of the evaluation.
        left_out: variants larger than the budget, with their size in bytes.
        repository: prefix of the names of the hub repositories; "" if the release file has none.
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
            "path": str(self.out), "made": list(self.made), "variants": rows, "left_out": dict(self.left_out)
        }  # fmt: skip

    @property
    def upload(self) -> str:
        """Return the shell command that uploads the release."""
        argument = "" if self.repository else " ORG/NAME"
        return f"sh {shlex.quote(str(self.out / UPLOAD_SCRIPT))}{argument}"

    def check_gates(self) -> None:
        """Raise `GateError` if variants fail gates (limits); the message names all of them."""
        failed_gates = [
            f"{variant.name}: {text}" for variant in self.variants for text in variant.failed
        ]
        if failed_gates:
            raise GateError(
                f"{len(failed_gates)} gate(s) failed: {'; '.join(failed_gates)}",
                "the others are finished, and upload.sh leaves these out; use more bits, or raise the limit",
            )


@dataclass(frozen=True, slots=True)
class PlannedRelease:
    """A planned release.

    Attributes:
        spec: the parsed release file.
        spec_bytes: the release file itself.
        directory: its directory.
        variants: planned variants, in the order of the release file.
        left_out: variants larger than the budget, with their size in bytes.
    """

    spec: ReleaseSpec
    spec_bytes: bytes
    directory: Path
    variants: Variants
    left_out: Mapping[str, int]

    @property
    def output_paths(self) -> dict[str, Path]:
        """Return the output path of each variant by name."""
        return {name: job.out for name, job in self.variants.jobs.items()}

    @property
    def reports(self) -> tuple[Path, ...]:
        """Return the paths of the reports; empty if nothing is scored."""
        scoring = self.spec.scoring
        kinds = scoring.reports if scoring.text else ()
        return tuple(self.directory / f"evaluation.{kind}" for kind in kinds)


@check_arguments()
@torch_defaults()
def release(
    spec: str | Path,
    out: str | Path,
    settings: Settings | None = None,
    only: str | Sequence[str] = (),
    budget: int | None = None,
) -> Released:
    """Make a release, or resume it; call `Released.check_gates` afterwards.

    Args:
        spec: a release file.
        out: its directory, new or from an earlier run.
        settings: how to run.
        only: names of the variants to include; all when empty.
        budget: maximum size of a variant in bytes; larger variants are left out.

    Raises:
        RefusedError: some variants cannot be made (all are named), none is within the budget, or ``out`` is not a
            release.
        QuantForgeError: as `quantize`, `evaluate` and `read_release`.
    """
    settings = settings or Settings()
    if settings.join:
        check_new_output(overwrite=settings.overwrite)
    with report_to(settings.progress):
        planned = plan_release(spec, out, settings, only, budget)
        requested, directory, variants = planned.spec, planned.directory, planned.variants
        with write_errors(directory, 0):
            make_directory(directory)
        with exclusive_lock(directory / SPEC, settings.note):
            _prepare_directories(planned)
        scored = 1 + len(variants.jobs) if requested.scoring.text else 0
        made_variants = variants.make(directory / SPEC, scored)
        with exclusive_lock(directory / SPEC, settings.note), phase("publishing", 1.0):
            _write_if_changed(
                directory / SPEC, planned.spec_bytes
            )  # another release may have begun here
            finished = _score_and_write(planned)
    repository = requested.card.repository
    return Released(
        directory, finished, made_variants, planned.reports, planned.left_out, repository
    )


def plan_release(
    spec: str | Path,
    out: str | Path,
    settings: Settings,
    only: str | Sequence[str] = (),
    budget: int | None = None,
) -> PlannedRelease:
    """Plan all variants and check whatever can be checked before the work; nothing is written.

    Arguments and errors as for `release`.
    """
    names = [*map(str, as_list(only))]
    requested, directory = read_release(Path(spec)).only(names), Path(os.path.abspath(out))  # noqa: PTH100 - links stay
    spec_bytes = FILES.read(Path(spec), RECIPE, None)
    settings = replace(settings, base_model=settings.base_model or requested.card.base_model)
    with phase("planning", 0.02, "headers of the model"):
        recipes = {variant.name: variant.recipe for variant in requested.variants}
        variants, errors = plan_variants(
            requested.model, recipes, lambda name, key: directory / key / name, settings
        )
    if errors:
        reasons = "; ".join(f"{name}: {error.message}" for name, error in errors.items())
        hints = "; ".join(dict.fromkeys(error.hint for error in errors.values() if error.hint))
        raise RefusedError(
            f"{len(errors)} of {len(recipes)} variants cannot be made: {reasons}", hints
        )
    if text := requested.scoring.text:
        reference = resolve_model(requested.model, settings.offline)
        check_text(reference, text, requested.scoring.length, offline=settings.offline)
        if "html" in requested.scoring.reports:
            from quantforge.evaluation.report_page.charts import check_drawing

            check_drawing()
    names, left_out = _within_budget(variants, budget)
    requested, variants = requested.only(names), variants.only(names)
    _check_directory(directory)
    _check_cards(variants, scored=bool(requested.scoring.text))
    return PlannedRelease(requested, spec_bytes, directory, variants, left_out)


def _within_budget(variants: Variants, budget: int | None) -> tuple[list[str], dict[str, int]]:
    """Return the names of the variants within a budget of bytes, and the sizes of the others.

    Raises:
        UsageError: the budget is not a number of bytes.
        RefusedError: all variants are larger.
    """
    if budget is not None and (type(budget) is not int or budget < 1):
        raise UsageError(
            f"budget = {budget!a:.60}: a number of bytes is expected", "e.g. 8_000_000_000"
        )
    sizes = {name: job.planned.plan.output_bytes for name, job in variants.jobs.items()}
    left_out = {name: size for name, size in sizes.items() if budget and size > budget}
    if len(left_out) == len(sizes):
        name = min(sizes, key=lambda variant: sizes[variant])
        raise RefusedError(
            f"no variant has at most {budget} bytes: the smallest, {name}, has {sizes[name]}",
            "add a smaller variant, or allow more",
        )
    return [name for name in sizes if name not in left_out], left_out


def _check_directory(directory: Path) -> None:
    """Check that a directory is missing, empty or a release; errors as `check_results_directory`."""
    check_results_directory(directory)
    lock_directory = run_folder(directory / SPEC)  # lock of a process that starts this release
    # Left by a killed process
    partial_manifest = re.compile(rf"\.{re.escape(MANIFEST_NAME)}\.[0-9a-f]+\.part")
    entries = directory.iterdir() if directory.exists() else ()
    other_files = [
        path
        for path in entries
        if path != lock_directory and not partial_manifest.fullmatch(path.name)
    ]
    if other_files and not _is_release(directory):
        raise RefusedError(
            _other_version(directory) or f"{directory}: exists, and is no release",
            "name a new directory with -o",
            file=str(directory),
        )
    for name in (
        SPEC,
        MANIFEST_NAME,
        UPLOAD_SCRIPT,
        CHECKSUMS,
        *(f"evaluation.{kind}" for kind in REPORTS),
    ):
        if os.path.lexists(directory / name):
            check_new_file(directory / name, overwrite=True)


def _is_release(directory: Path) -> bool:
    """Return whether a directory has the manifest of a release."""
    try:
        return read_object(directory / MANIFEST_NAME, MANIFEST, directory).get("schema") == SCHEMA
    except InputError:
        return False


def _other_version(directory: Path) -> str:
    """Return a message about the manifest of a release of another version; "" if there is none."""
    path = directory / MANIFEST_NAME
    try:
        text = other_version(read_object(path, MANIFEST, directory), SCHEMA)
    except InputError:
        return ""
    return f"{path}: {text}" if text else ""


def _check_cards(variants: Variants, *, scored: bool) -> None:
    """Check that folders of variants are directories, and that their cards have the parts for figures."""
    for name, job in variants.jobs.items():
        if os.path.lexists(job.out.parent):
            check_results_directory(job.out.parent)
        if job.one_file:
            check_folder_card(job.out.parent)
        elif scored and name not in variants.missing:
            read_card(job.out)


def _prepare_directories(planned: PlannedRelease) -> None:
    """Create the directories, copy the release file, and reset the cards of variants that are replaced."""
    directory, variants = planned.directory, planned.variants
    with write_errors(directory, 0):
        if not _is_release(directory):
            empty = {"schema": SCHEMA, "variants": []}
            _write_if_changed(directory / MANIFEST_NAME, json.dumps(empty) + "\n")
        _write_if_changed(directory / SPEC, planned.spec_bytes)
        for job in variants.jobs.values():
            make_directory(job.out.parent)
    if variants.settings.join:  # another process may have written figures already
        return
    for job in (variants.jobs[name] for name in variants.missing):
        if job.out.is_dir() and manifest.read_manifest(job.out) is not None:
            write_figures(job.out, "", "")  # as published: these edits were not made by a person
            restore_local_loading(job.out)


def _score_and_write(planned: PlannedRelease) -> tuple[ReleasedVariant, ...]:
    """Score the finished variants, unless that is done, and write the other files of the release.

    Raises:
        IntegrityError: a file of a variant differs from its manifest.
        QuantForgeError: as `evaluate` and `save_file`.
    """
    directory, card, outs = planned.directory, planned.spec.card, planned.output_paths
    outputs = {out: (manifest.read_manifest(out) or {})["outputs"] for out in outs.values()}
    file_digests = {
        out: {
            name: content for name, content in files.items() if name != CARD
        }  # cards change: they get figures
        for out, files in outputs.items()
    }
    digests = _check_digests(file_digests)
    key = _evaluation_key(planned, [*file_digests.values()])
    scores_by_variant, evaluation = _evaluate_variants(planned, key)
    released = []
    for variant in planned.spec.variants:
        out, plan = outs[variant.name], planned.variants.jobs[variant.name].planned.plan
        scored = scores_by_variant.get(variant.name, {})
        failed_gates = variant.gates.failed({**scored, "weight_bytes": plan.output_bytes})
        released.append(
            ReleasedVariant(
                variant.name, out, plan.format, plan.method, plan.output_bytes, scored, failed_gates
            )
        )
        if out.is_dir():
            repository = variant_repository(card.repository, out) or HERE
            write_loading(out, loading(plan, repository, chat=has_chat_template(out)))
    _write_cards(planned, released, evaluation)
    document = {
        "schema": SCHEMA,
        "source": dict(planned.variants.files),
        "versions": manifest.versions(),
        "evaluation": {"key": key, "metrics": scores_by_variant} if scores_by_variant else None,
        "variants": [variant.document() for variant in released],
    }
    _write_if_changed(
        directory / MANIFEST_NAME, json.dumps(document, indent=2, sort_keys=True) + "\n"
    )
    _write_if_changed(directory / UPLOAD_SCRIPT, upload_script(card.repository, released))
    _write_if_changed(directory / CHECKSUMS, _checksum_list(planned, digests))
    return tuple(released)


def _write_if_changed(path: Path, content: bytes | str) -> None:
    """Write or replace a file, unless it has these bytes already; errors as `save_file`."""
    data = content.encode() if isinstance(content, str) else content
    digest = hashlib.sha256(data).hexdigest()
    is_file = path.is_file() and not path.is_symlink()
    if not is_file or manifest.sha256(path, path.parent) != digest:
        save_file(path, data, overwrite=True)


def _check_digests(outputs: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """Return the SHA-256 digests of all files in the variants' manifests, checked; errors as `release`."""
    digests = {}
    for out, files in outputs.items():
        root = out if out.is_dir() else out.parent
        for name, entry in files.items():
            digests[root / name] = manifest.sha256(root / name, root)
            if digests[root / name] != entry["sha256"]:
                raise IntegrityError(
                    f"{root / name}: is not what its manifest states, and is not published",
                    f"move the variant away: {move_away_command(out)}; the same command makes it again",
                    file=str(root / name),
                )
    return digests


def _evaluation_key(planned: PlannedRelease, outputs: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of everything that the figures depend on: source, variants, text content and versions."""
    variants, scoring = planned.variants, planned.spec.scoring
    text = scoring.text and text_name(scoring.text)
    key_fields = [
        variants.files, outputs, asdict(scoring), text, manifest.versions(), [*variants.jobs]
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(key_fields, sort_keys=True).encode()).hexdigest()


def _evaluate_variants(
    planned: PlannedRelease, key: str
) -> tuple[dict[str, Any], Evaluation | None]:
    """Return figures by variant name, and the evaluation; None for the latter if an earlier run measured them."""
    spec, directory, variants = planned.spec, planned.directory, planned.variants
    scoring, outs = spec.scoring, [*planned.output_paths.values()]
    if not scoring.text:
        return {}, None
    cards = {out.with_name(CARD) for out in outs if out.is_file()}
    try:
        recorded = read_object(directory / MANIFEST_NAME, MANIFEST, directory)["evaluation"]
        is_complete = all(path.is_file() for path in (*planned.reports, *cards))
        is_complete = is_complete and all(has_figures(out) for out in outs if out.is_dir())
        if recorded["key"] == key and is_complete:
            return dict(recorded["metrics"]), None
    except (InputError, KeyError, TypeError):
        pass  # not measured yet
    adapter = shared_adapter_path(variant.recipe.adapter for variant in spec.variants)
    evaluation = evaluate(
        spec.model, outs, replace(variants.settings, adapter=adapter),
        text=scoring.text, windows=scoring.windows, length=scoring.length, speed=scoring.speed,
    )  # fmt: skip
    from quantforge.evaluation.report import render

    for kind, path in zip(scoring.reports, planned.reports, strict=True):
        _write_if_changed(path, render(evaluation, REPORTS[kind]))
    rows = zip(variants.jobs, evaluation.rows[1:], strict=True)
    return {name: {figure: row[figure] for figure in _FIGURES} for name, row in rows}, evaluation


def _write_cards(
    planned: PlannedRelease, released: Sequence[ReleasedVariant], evaluation: Evaluation | None
) -> None:
    """Write the card of the folder of files without failed ones, and write new figures into all cards."""
    files = [variant for variant in released if variant.out.is_file() and not variant.failed]
    if files:
        scores_by_file = {
            variant.out.name: variant.figures["kl_mean"] for variant in files if variant.figures
        }
        outs = [variant.out for variant in files]
        card, source = planned.spec.card, planned.variants.source
        repository = variant_repository(card.repository, outs[0])
        write_folder_card(outs[0].parent, scores_by_file, source, card.base_model, outs, repository)
    if evaluation is None:
        return
    from quantforge.evaluation.card_section import measured_section, model_index

    failed_paths = {
        str(variant.out) for variant in released if variant.out.is_file() and variant.failed
    }
    passed_rows = replace(
        evaluation, rows=tuple(row for row in evaluation.rows if row["path"] not in failed_paths)
    )
    folders = [variant.out.parent for variant in files] + [
        variant.out for variant in released if variant.out.is_dir()
    ]
    for directory in dict.fromkeys(folders):
        write_figures(
            directory, measured_section(passed_rows, directory), model_index(passed_rows, directory)
        )


def _checksum_list(planned: PlannedRelease, digests: Mapping[Path, str]) -> str:
    """Return checksums of all files of the release, in the format of ``sha256sum -c``."""
    directory = planned.directory
    paths = {
        directory / SPEC,
        directory / MANIFEST_NAME,
        directory / UPLOAD_SCRIPT,
        *planned.reports,
    }
    for out in planned.output_paths.values():
        if out.is_dir():
            paths |= {path for path in out.rglob("*") if path.is_file()}
        else:
            card = out.with_name(CARD)
            paths |= {out, *out.parent.glob(f"{glob.escape(out.name)}.*")}
            paths |= {card} if card.is_file() else set()
    relative_names = sorted(
        path.relative_to(directory).as_posix() for path in paths if path.name[0] != "."
    )
    return "".join(
        f"{digests.get(directory / name) or manifest.sha256(directory / name, directory)}  {name}\n"
        for name in relative_names
    )


def variant_repository(prefix: str, out: Path) -> str:
    """Return the hub repository of a variant; "" without a prefix.

    Args:
        prefix: ``ORG/NAME``, the start of the names of all repositories; NAME is not repeated.
        out: path of the variant; files of one folder share a repository.
    """
    short_name = out.name.removeprefix(f"{prefix.rpartition('/')[2]}-")
    return prefix and f"{prefix}-{_GGUF_SUFFIX if out.is_file() else short_name}"


def upload_script(prefix: str, variants: Sequence[ReleasedVariant]) -> str:
    """Return a shell script that uploads each repository; failed variants are left out.

    Args:
        prefix: as for `variant_repository`.
        variants: variants of the release.
    """
    repository = shlex.quote(prefix) if prefix else '${1:?"usage: sh upload.sh ORG/NAME"}'
    lines = [
        "#!/bin/sh",
        "# Uploads this release with the command hf of huggingface_hub.",
        "set -eu",
        'CDPATH= cd -- "$(dirname -- "$0")"',
        f"cut -c 67- {CHECKSUMS} | while IFS= read -r file; do",
        '    test -f "$file" || { echo "$file is missing: put it back first" >&2; exit 1; }',
        "done",
        f"repository={repository}",
        "begun=${repository##*/}-",
    ]
    passing_variants = [variant for variant in variants if not variant.failed]
    files = [variant.name for variant in passing_variants if variant.out.is_file()]
    if files:
        patterns = [shlex.quote(f"{name}.gguf{ending}") for name in files for ending in ("", ".*")]
        arguments = " ".join(f"--include {text}" for text in (CARD, *patterns))
        lines.append(f'hf upload "$repository-{_GGUF_SUFFIX}" gguf . {arguments}')
    for variant in passing_variants:
        if not variant.out.is_file():
            lines.append(f"name={variant.name}")  # the repository may begin with the same word
            lines.append(
                f'hf upload "$repository-${{name#"$begun"}}" {variant.format}/{variant.name} .'
            )
    lines += [
        f"# {variant.name} failed: {'; '.join(variant.failed)}"
        for variant in variants
        if variant.failed
    ]
    return "\n".join(lines) + "\n"
