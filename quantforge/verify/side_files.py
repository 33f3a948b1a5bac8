"""What lies beside the weights, against the source: configuration, tokenizer, chat template, licences.

A release of ours carries these files byte for byte. Other tools write them anew through transformers, so that for them
only a difference in meaning counts: another token, another template, another constant of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge import manifest
from quantforge.checkpoint.reader import LICENCES, is_licence
from quantforge.verify.artifact import Artifact, Source
from quantforge.verify.beside.configuration import check_configuration
from quantforge.verify.beside.facts import Pair, beside
from quantforge.verify.beside.foreign import row_of
from quantforge.verify.findings import Report
from quantforge.verify.structure import tokens_of

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token", "add_eos_token")
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
TEMPLATE = "chat_template.jinja"
# Whoever saves a tokenizer or a model with transformers writes these; each is compared by its own rule.
_WRITTEN = frozenset(
    {"generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
     "tokenizer_config.json", TEMPLATE}
)  # fmt: skip


def check_side_files(report: Report, artifact: Artifact, source: Source) -> None:
    """Compare everything beside the weights with the source."""
    pair = Pair(beside(artifact), beside(source), report.format)
    if report.path.is_dir() and source.checkpoint.path.is_dir():
        check_configuration(report, pair)
    own, other = pair.own.files, pair.other.files
    if not own and not report.path.is_dir():
        return
    strict = manifest.read(report.path) is not None and report.path.is_dir()
    for name in sorted(other):
        if name not in own:
            _missing(report, name)
        elif own[name] != other[name] and strict and source.checkpoint.path.is_dir():
            report.add("side-files", name, "is not the source's, byte for byte")
    if source.checkpoint.path.is_dir():
        _check_extra(report, sorted(own.keys() - other.keys() - _WRITTEN))
    _check_tokenizer(report, own, other)
    _check_template(report, own, other)


def _check_extra(report: Report, names: list[str]) -> None:
    """Files that a loader reads and the source does not have."""
    for name in names:
        row = row_of(name)
        if row is not None and not is_licence(name):
            report.add("foreign", name, f"{row.does}; the source has no such file")


def _missing(report: Report, name: str) -> None:
    """Files that another may stand for are not missed here."""
    if name in {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}:
        report.add("side-files", name, "the source has it, the artifact does not")
    elif report.path.is_dir() and any(Path(name).match(pattern) for pattern in LICENCES):
        report.warn("side-files", name, "the source has it, the artifact does not")


def _check_tokenizer(report: Report, own: Mapping[str, bytes], other: Mapping[str, bytes]) -> None:
    name = "tokenizer.json"
    first, second = _parsed(own, name), _parsed(other, name)
    if name not in own or not second:
        return
    try:
        tokens, expected = tokens_of(first), tokens_of(second)
        same_merges = _merges(first) == _merges(second)
    except (AttributeError, KeyError, TypeError, ValueError):
        report.add("side-files", name, "is no tokenizer")
        return
    if differ := sorted(
        key for key in tokens.keys() | expected.keys() if tokens.get(key) != expected.get(key)
    ):
        text = f"{len(differ)} token(s) differ from the source, e.g. {differ[0]!r}"
        report.add("side-files", name, text)
    if not same_merges:
        report.add("side-files", name, "the merges are not the source's")
    if report.path.is_dir():
        for part in PARTS:
            if first.get(part) != second.get(part):
                report.add("side-files", name, f"{part} is not the source's")


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Merges in one spelling; two are in use."""
    merges = tokenizer["model"].get("merges") or []
    return [item if isinstance(item, str) else " ".join(item) for item in merges]


def _check_template(report: Report, own: Mapping[str, bytes], other: Mapping[str, bytes]) -> None:
    name = "tokenizer_config.json"
    first, second = _parsed(own, name), _parsed(other, name)
    if _template(own, first) != _template(other, second):
        place = TEMPLATE if TEMPLATE in own else name
        report.add("side-files", place, "the chat template is not the source's")
    for key in SPECIAL:
        if key in first and key in second and _text(first[key]) != _text(second[key]):
            report.add("side-files", name, f"{key} is not the source's")


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> object:
    """The chat template, wherever it lies; a file of its own takes precedence."""
    if TEMPLATE in files:
        return files[TEMPLATE].decode(errors="replace").rstrip("\n")
    found = config.get("chat_template")
    return found.rstrip("\n") if isinstance(found, str) else found


def _text(token: object) -> object:
    return token.get("content") if isinstance(token, Mapping) else token


def _parsed(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
