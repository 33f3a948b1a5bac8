"""Contradictions between configuration, settings and tokenizer of one model: found without a source as well."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from quantforge.architectures.match import Role
from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError
from quantforge.verification.beside.config_groups import cautions
from quantforge.verification.beside.facts import Beside, DocumentError, beside, parse, tower
from quantforge.verification.beside.foreign import COPIES
from quantforge.verification.beside.quantization import contradictions, disagreements
from quantforge.verification.beside.tokenizer_tree import CONFIG, NAME, REPEATED, contradicting
from quantforge.verification.beside.trees import plain, shown
from quantforge.verification.findings import Report
from quantforge.verification.opening import Artifact
from quantforge.verification.structure import tokens_of
from quantforge_calibration.chat_templates import DEFAULT, choose
from quantforge_calibration.source_error import SourceError
from quantforge_files.roles import SETTINGS

_MARKER = re.compile(r"<\|[A-Za-z0-9_]{1,40}\|>")
_ROLES = ("bos", "eos", "pad", "unk")
_SHOWN = 6


def check_within(report: Report, artifact: Artifact) -> None:
    """Report what contradicts itself beside the weights."""
    if not report.path.is_dir():
        return
    try:
        own = beside(artifact)
    except InputError as error:
        report.add("unreadable", plain(error.file or ""), error.message)
        return
    for text in contradictions(own.config, own.tensors):
        report.add("settings", "config.json", text)
    for text in cautions(own.config, artifact.layouts):
        report.warn("settings", "config.json", text)
    _check_copies(report, own)
    _check_class(report, own.config)
    rows = min(
        (t.stored.shape[0] for t in artifact.matched.tensors if t.role is Role.EMBEDDING),
        default=None,
    )
    if rows is not None:
        for place, text in _beyond(own, rows):
            report.add("settings", place, text)
    _check_tokens(report, own)


def _check_copies(report: Report, own: Beside) -> None:
    """Check files that describe the quantization again."""
    for name in sorted(COPIES):
        place = report.path / name
        if not place.is_file():
            continue
        try:
            copy = parse(FILES.read(place, SETTINGS, report.path))
        except (InputError, DocumentError) as error:
            report.add("settings", name, f"is damaged: {plain(str(error))}")
            continue
        for text in disagreements(copy, own.config):
            report.add("settings", name, text)


def _check_class(report: Report, config: Mapping[str, Any]) -> None:
    """Check that the class that is named is one of the family."""
    stated, model_type = config.get("architectures"), config.get("model_type")
    name = stated[0] if isinstance(stated, list) and stated else None
    families = _families()
    known = families.get(name, set()) if isinstance(name, str) else set()
    if known and isinstance(model_type, str) and model_type not in known:
        of = ", ".join(sorted(known)[:3])
        report.add(
            "settings",
            "config.json",
            f"architectures = {shown(name)} is of {of}, model_type is {shown(model_type)}",
        )


@cache
def _families() -> dict[str, set[str]]:
    """Return the families of every class of transformers."""
    from transformers.models.auto import modeling_auto

    found: dict[str, set[str]] = {}
    for key, names in vars(modeling_auto).items():
        if key.startswith("MODEL_") and key.endswith("_MAPPING_NAMES"):
            for family, classes in names.items():
                for name in (classes,) if isinstance(classes, str) else classes:
                    found.setdefault(name, set()).add(family)
    return found


def _beyond(own: Beside, rows: int) -> Iterator[tuple[str, str]]:
    """Yield ids of special tokens for which the embedding has no row."""
    places = (
        ("config.json", tower(own.config)),
        ("generation_config.json", own.readable("generation_config.json")),
    )
    for place, document in places:
        for key, value in document.items():
            if key.endswith("_token_id"):
                for number in value if isinstance(value, list) else [value]:
                    if isinstance(number, int) and not -1 <= number < rows:
                        yield (
                            place,
                            f"{plain(key)} = {shown(number)}, the embedding has {rows} rows",
                        )


def _check_tokens(report: Report, own: Beside) -> None:
    """Check names of tokens, and ids of ends, against the vocabulary."""
    try:
        tokens = tokens_of(own.readable(NAME))
    except (AttributeError, KeyError, TypeError, ValueError):
        return
    for name in sorted(REPEATED & own.files.keys()):
        for text in contradicting(own, name)[:_SHOWN]:
            report.add("settings", name, text)
    settings = own.readable(CONFIG)
    texts: dict[str, Any] = {}
    for role in _ROLES:
        value = settings.get(f"{role}_token")
        texts[role] = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(texts[role], str) and texts[role] not in tokens:
            report.warn(
                "settings", CONFIG, f"{role}_token = {shown(texts[role])} is no token of {NAME}"
            )
    end = tokens.get(texts["eos"]) if isinstance(texts["eos"], str) else None
    ends = [
        number
        for document in (tower(own.config), own.readable("generation_config.json"))
        for value in [document.get("eos_token_id")]
        for number in (value if isinstance(value, list) else [value])
        if isinstance(number, int)
    ]
    if end is not None and ends and end not in ends:
        report.warn("settings", CONFIG, f"eos_token has id {end}, text would end at {shown(ends)}")
    try:
        templates = choose(own.files, "")
    except SourceError:  # nothing renders them
        return
    for name, template in templates.named.items():
        marks = _MARKER.findall(template)
        strange = sorted({mark for mark in marks if mark not in tokens})
        if strange and any(mark in tokens for mark in marks):
            shown_marks = ", ".join(strange[:_SHOWN])
            where = templates.place if name == DEFAULT else f"{templates.place}: {shown(name)}"
            report.warn("settings", where, f"{shown_marks}: no token(s) of {NAME}")
