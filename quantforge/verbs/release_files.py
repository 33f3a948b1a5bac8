"""Files of a release beside its variants: report, figures in cards, manifest, checksums and the script to upload it."""

from __future__ import annotations

import glob
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.disk import save
from quantforge.checkpoint.foreign_json import read_object
from quantforge.errors import InputError, IntegrityError
from quantforge.planning.cited_files import common_adapter
from quantforge.planning.release_spec import REPORTS, ReleaseSpec
from quantforge.results import manifest
from quantforge.results.card import loading
from quantforge.results.card_figures import CARD, HERE, has_figures, write_figures, write_loading
from quantforge.results.publish import chats
from quantforge.verbs.evaluate_models import evaluate
from quantforge.verbs.finished_result import made_again_after
from quantforge.verbs.folder_cards import write_folder_card
from quantforge.verbs.scored_text import text_name
from quantforge.verbs.variants import Variants
from quantforge_files.roles import MANIFEST

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation

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


def finish(place: Path, asked: ReleaseSpec, variants: Variants) -> tuple[ReleasedVariant, ...]:
    """Score the variants, unless that is done, and write what lies beside them.

    Args:
        place: the directory of the release.
        asked: what it consists of.
        variants: which are all there.

    Raises:
        IntegrityError: a file of a variant is not what the variant's manifest states.
        QuantForgeError: as `evaluate` and `save`.
    """
    outs = {name: job.out for name, job in variants.jobs.items()}
    documents = {out: manifest.read(out) or {} for out in outs.values()}
    digests = _digests(documents)
    key = _key(asked, variants, documents)
    figures, found = _scored(place, asked, variants, key)
    released = []
    for one in asked.variants:
        out, plan, scored = outs[one.name], variants.jobs[one.name].planned.plan, figures.get(one.name, {})  # fmt: skip
        failed = one.gates.failed({**scored, "weight_bytes": plan.output_bytes})
        released.append(
            ReleasedVariant(
                one.name, out, plan.format, plan.method, plan.output_bytes, scored, failed
            )
        )
        if out.is_dir():
            named = repository_of(asked.card.repository, out) or HERE
            write_loading(out, loading(plan, named, chat=chats(out)))
    _write_cards(asked, variants, released, found)
    document = {
        "schema": SCHEMA,
        "source": dict(variants.files),
        "versions": manifest.versions(),
        "evaluation": {"key": key, "figures": figures} if figures else None,
        "variants": [one.document() for one in released],
    }
    _write(place / MANIFEST_NAME, json.dumps(document, indent=2, sort_keys=True) + "\n")
    _write(place / UPLOAD, upload_script(asked.card.repository, released))
    _write(place / SUMS, _sums(place, asked, [*outs.values()], digests))
    return tuple(released)


def reports_of(place: Path, asked: ReleaseSpec) -> list[Path]:
    """Return where the reports of a release are; none where nothing is scored."""
    kinds = asked.scoring.reports if asked.scoring.text else ()
    return [place / f"evaluation.{kind}" for kind in kinds]


def renew(path: Path, data: bytes) -> None:
    """Write a file, in place of an earlier one; one that has these bytes stays as it is. Errors as `save`."""
    digest = hashlib.sha256(data).hexdigest()
    same = path.is_file() and not path.is_symlink() and path.stat().st_size == len(data)
    if not same or manifest.sha256(path, path.parent) != digest:
        save(path, data, overwrite=True)


def _write(path: Path, text: str) -> None:
    renew(path, text.encode())


def _digests(documents: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """Return the SHA-256 digests of what the manifests of variants list, but for cards; errors as `finish`."""
    found = {}
    for out, document in documents.items():
        root = out if out.is_dir() else out.parent
        for name, entry in document["outputs"].items():
            if name == CARD:
                continue
            found[root / name] = manifest.sha256(root / name, root)
            if found[root / name] != entry["sha256"]:
                raise IntegrityError(
                    f"{root / name}: is not what its manifest states, and is not published",
                    f"move the variant away: {made_again_after(out)}; the same command makes it again",
                    file=str(root / name),
                )
    return found


def _key(
    asked: ReleaseSpec, variants: Variants, documents: Mapping[Path, Mapping[str, Any]]
) -> str:
    """Return the digest of what decides the figures: source, variants, text (its content) and versions."""
    outputs = [
        {name: entry for name, entry in document["outputs"].items() if name != CARD}
        for document in documents.values()
    ]
    decides = [
        variants.files,
        outputs,
        asdict(asked.scoring),
        asked.scoring.text and text_name(asked.scoring.text),
        manifest.versions(),
        [*variants.jobs],
    ]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _scored(
    place: Path, asked: ReleaseSpec, variants: Variants, key: str
) -> tuple[dict[str, Any], Evaluation | None]:
    """Return the figures of every variant by its name, and the evaluation unless they are those of an earlier run."""
    scoring = asked.scoring
    if not scoring.text:
        return {}, None
    outs, reports = [job.out for job in variants.jobs.values()], reports_of(place, asked)
    cards = {out.with_name(CARD) for out in outs if out.is_file()}
    try:
        earlier = read_object(place / MANIFEST_NAME, MANIFEST, place)["evaluation"]
        whole = all(path.is_file() for path in (*reports, *cards))
        whole = whole and all(has_figures(out) for out in outs if out.is_dir())
        if earlier["key"] == key and whole:
            return dict(earlier["figures"]), None
    except (InputError, KeyError, TypeError):
        pass  # not measured yet
    merged = common_adapter(one.recipe.adapter for one in asked.variants)
    found = evaluate(
        asked.model, outs, replace(variants.settings, adapter=merged),
        text=scoring.text, windows=scoring.windows, length=scoring.length, speed=scoring.speed,
    )  # fmt: skip
    from quantforge.evaluation.report import render

    for kind, path in zip(scoring.reports, reports, strict=True):
        _write(path, render(found, REPORTS[kind]))
    rows = zip(variants.jobs, found.rows[1:], strict=True)
    return {name: {figure: row[figure] for figure in _FIGURES} for name, row in rows}, found


def _write_cards(
    asked: ReleaseSpec,
    variants: Variants,
    released: Sequence[ReleasedVariant],
    found: Evaluation | None,
) -> None:
    """Write the card of the folder of files, but for those beyond a gate, and put new figures into all cards."""
    files = [one for one in released if one.out.is_file() and not one.failed]
    if files:
        figures = {one.out.name: one.figures["kl_mean"] for one in files if one.figures}
        outs = [one.out for one in files]
        repository = repository_of(asked.card.repository, outs[0])
        folder, base = outs[0].parent, asked.card.base_model
        write_folder_card(folder, figures, variants.source, base, outs, repository)
    if found is None:
        return
    from quantforge.evaluation.card_section import index, section

    failed = {str(one.out) for one in released if one.out.is_file() and one.failed}
    shown = replace(found, rows=tuple(row for row in found.rows if row["path"] not in failed))
    folders = [one.out.parent for one in files] + [one.out for one in released if one.out.is_dir()]
    for place in dict.fromkeys(folders):
        write_figures(place, section(shown, place), index(shown, place))


def _sums(
    place: Path, asked: ReleaseSpec, outs: Sequence[Path], digests: Mapping[Path, str]
) -> str:
    """Return a list for ``sha256sum -c``: files of the variants and those beside them, and no others."""
    paths = {place / SPEC, place / MANIFEST_NAME, place / UPLOAD, *reports_of(place, asked)}
    for out in outs:
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
