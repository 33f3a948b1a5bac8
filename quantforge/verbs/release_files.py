"""Files of a release beside its variants: report, figures in cards, manifest, checksums and upload commands."""

from __future__ import annotations

import glob
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.hub import resolve
from quantforge.errors import InputError, IntegrityError
from quantforge.formats.opening import open_model
from quantforge.planning.cited_files import common_adapter
from quantforge.planning.quality_gates import beyond
from quantforge.planning.release_spec import REPORTS, ReleaseSpec, ReleaseVariant
from quantforge.plans import Plan
from quantforge.results import manifest
from quantforge.results.card import loading
from quantforge.results.card_figures import CARD, HERE, has_figures, write_figures, write_loading
from quantforge.results.publish import chats
from quantforge.settings import Settings
from quantforge.verbs.evaluate_models import evaluate
from quantforge.verbs.folder_cards import write_folder_card
from quantforge.verbs.release_place import MANIFEST_NAME, SCHEMA, SPEC, SUMS, UPLOAD, renew
from quantforge.verbs.scored_text import text_name
from quantforge.verbs.upload_script import ReleasedVariant, repository_of, upload_script
from quantforge_files.roles import MANIFEST

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation

_FIGURES = ("kl_mean", "kl_se", "perplexity", "perplexity_increase", "top1_agreement")


def finish(
    place: Path,
    asked: ReleaseSpec,
    made: Sequence[tuple[ReleaseVariant, Path, Plan]],
    source: Mapping[str, Any],
    settings: Settings,
) -> tuple[ReleasedVariant, ...]:
    """Score the variants, unless that is done, and write what stands beside them.

    Args:
        place: the directory of the release.
        asked: what it consists of.
        made: each variant, where it is, and its plan.
        source: files of the source, by `files_of_source`.
        settings: how to run.

    Raises:
        IntegrityError: a file of a variant is not what the variant's manifest states.
        QuantForgeError: as `evaluate` and `save`.
    """
    digests = _digests([out for _, out, _ in made])
    key = _key(asked, made, source)
    scored, found = _scored(place, asked, [out for _, out, _ in made], key, settings)
    variants = tuple(
        _released(variant, out, plan, scored.get(variant.name, {})) for variant, out, plan in made
    )
    for _, out, plan in made:
        if out.is_dir():
            named = repository_of(asked.card.repository, out) or HERE
            write_loading(out, loading(plan, named, chat=chats(out)))
    _write_cards(asked, variants, found)
    document = {
        "schema": SCHEMA,
        "source": dict(source),
        "versions": manifest.versions(),
        "evaluation": {"key": key, "figures": scored} if scored else None,
        "variants": [variant.document() for variant in variants],
    }
    _write(place / MANIFEST_NAME, json.dumps(document, indent=2, sort_keys=True) + "\n")
    _write(place / UPLOAD, upload_script(asked.card.repository, variants))
    _write(place / SUMS, _sums(place, asked, variants, digests))
    return variants


def reports_of(place: Path, asked: ReleaseSpec) -> list[Path]:
    """Return where the reports of a release are; none where nothing is scored."""
    kinds = asked.scoring.reports if asked.scoring.text else ()
    return [place / f"evaluation.{kind}" for kind in kinds]


def _write(path: Path, text: str) -> None:
    renew(path, text.encode())


def _digests(outs: Sequence[Path]) -> dict[Path, str]:
    """Return the SHA-256 digests of what the manifests of variants list, but for cards; errors as `finish`.

    ``taken``: a command may have moved weight files away, of which the manifest is believed.
    """
    found = {}
    for out in outs:
        root = out if out.is_dir() else out.parent
        document = manifest.read(out) or {}
        for name, entry in document["outputs"].items():
            if name == CARD:
                continue
            found[root / name] = manifest.sha256(root / name, root)
            if found[root / name] != entry["sha256"]:
                whole = f"{shlex.quote(str(out))}{'' if out.is_dir() else '*'}"
                raise IntegrityError(
                    f"{root / name}: is not what its manifest states, and is not published",
                    f"move the variant away: mv {whole} ELSEWHERE; the same command makes it again",
                    file=str(root / name),
                )
    return found


def _key(
    asked: ReleaseSpec, made: Sequence[tuple[ReleaseVariant, Path, Plan]], source: Mapping[str, Any]
) -> str:
    """Return the digest of what decides the figures: source, variants, text (its content) and versions."""
    outputs = [
        {
            name: entry
            for name, entry in (manifest.read(out) or {})["outputs"].items()
            if name != CARD
        }
        for _, out, _ in made
    ]
    told = [
        source,
        outputs,
        asdict(asked.scoring),
        asked.scoring.text and text_name(asked.scoring.text),
        manifest.versions(),
        [one.name for one, *_ in made],
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _scored(
    place: Path, asked: ReleaseSpec, outs: Sequence[Path], key: str, settings: Settings
) -> tuple[dict[str, Any], Evaluation | None]:
    """Return the figures of every variant by its name, and the evaluation unless they are those of an earlier run."""
    scoring = asked.scoring
    if not scoring.text:
        return {}, None
    reports = reports_of(place, asked)
    beside = [out.with_name(CARD) for out in outs if out.is_file()]
    try:
        earlier = read_object(place / MANIFEST_NAME, MANIFEST, place)["evaluation"]
        cards = [out for out in outs if out.is_dir()]
        whole = all(path.is_file() for path in (*reports, *beside)) and all(map(has_figures, cards))
        if earlier["key"] == key and whole:
            return dict(earlier["figures"]), None
    except (InputError, KeyError, TypeError):
        pass  # not measured yet
    merged = common_adapter(one.recipe.adapter for one in asked.variants)
    found = evaluate(
        asked.model, outs, replace(settings, adapter=merged),
        text=scoring.text, windows=scoring.windows, length=scoring.length, speed=scoring.speed,
    )  # fmt: skip
    from quantforge.evaluation.report import render

    for kind, path in zip(scoring.reports, reports, strict=True):
        _write(path, render(found, REPORTS[kind]))
    rows = zip(asked.variants, found.rows[1:], strict=True)
    return {one.name: {name: row[name] for name in _FIGURES} for one, row in rows}, found


def _write_cards(
    asked: ReleaseSpec, variants: Sequence[ReleasedVariant], found: Evaluation | None
) -> None:
    """Write the card of a folder of files, but for those beyond a gate, and put new figures into all cards."""
    files = [one for one in variants if one.out.is_file() and not one.failed]
    for folder in dict.fromkeys(one.out.parent for one in files):
        mine = [one for one in files if one.out.parent == folder]
        told = {one.out.name: one.figures["kl_mean"] for one in mine if one.figures}
        source = open_model(resolve(asked.model, offline=True))
        outs = [one.out for one in mine]
        repository = repository_of(asked.card.repository, outs[0])
        write_folder_card(folder, told, source, asked.card.base_model, outs, repository)
    if found is None:
        return
    from quantforge.evaluation.card_section import index, section

    failed = {str(one.out) for one in variants if one.out.is_file() and one.failed}
    shown = replace(found, rows=tuple(row for row in found.rows if row["path"] not in failed))
    folders = [one.out.parent for one in files] + [one.out for one in variants if one.out.is_dir()]
    for place in dict.fromkeys(folders):
        write_figures(place, section(shown, place), index(shown, place))


def _released(
    variant: ReleaseVariant, out: Path, plan: Plan, figures: Mapping[str, Any]
) -> ReleasedVariant:
    values = {**figures, "weight_bytes": plan.output_bytes}
    failed = beyond(variant.gates, values)
    return ReleasedVariant(
        variant.name, out, plan.format, plan.method, plan.output_bytes, figures, failed
    )


def _sums(
    place: Path,
    asked: ReleaseSpec,
    variants: Sequence[ReleasedVariant],
    digests: Mapping[Path, str],
) -> str:
    """Return a list for ``sha256sum -c``: files of the variants and those beside them, and no others."""
    paths = {place / SPEC, place / MANIFEST_NAME, place / UPLOAD, *reports_of(place, asked)}
    for one in variants:
        if one.out.is_dir():
            paths |= {path for path in one.out.rglob("*") if path.is_file()}
            paths |= {path for path in digests if path.is_relative_to(one.out)}
        else:
            card = one.out.with_name(CARD)
            beside = one.out.parent.glob(f"{glob.escape(one.out.name)}.*")
            paths |= {one.out, *beside, *([card] if card.is_file() else [])}
    kept = sorted(path.relative_to(place).as_posix() for path in paths if path.name[0] != ".")
    known = {name: digests.get(place / name) for name in kept}
    return "".join(
        f"{digest or manifest.sha256(place / name, place)}  {name}\n"
        for name, digest in known.items()
    )
