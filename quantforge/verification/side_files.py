"""Files beside the weights, against the source: configuration, tokenizer, chat templates, generation, licences.

A release of ours carries these files byte for byte. Other tools write them anew through transformers, so that for them
only a difference in meaning counts, which the modules of `quantforge.verification.beside` find.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from quantforge.architectures.positions import embedding_rows
from quantforge.checkpoint.reader import is_licence
from quantforge.results import manifest
from quantforge.verification.beside import tokenizer_tree as tokenizer
from quantforge.verification.beside.facts import Pair, beside
from quantforge.verification.beside.foreign import row_of
from quantforge.verification.beside.generation import NAME as GENERATION
from quantforge.verification.beside.generation import check_generation
from quantforge.verification.beside.gguf_keys import check_gguf_keys
from quantforge.verification.beside.model_configuration import check_configuration
from quantforge.verification.beside.processors import check_processors, is_processor
from quantforge.verification.beside.templates import check_templates
from quantforge.verification.beside.tower_file import check_tower
from quantforge.verification.beside.trees import plain
from quantforge.verification.findings import Report
from quantforge.verification.opening import Artifact, Original
from quantforge.verification.structure import tokens_of
from quantforge_calibration.chat_templates import FOLDER, LAYOUTS

# Each is compared by its own rule, also where only one side has it.
_COMPARED = {*tokenizer.REPEATED, tokenizer.NAME, tokenizer.CONFIG, GENERATION, *LAYOUTS}


def check_side_files(report: Report, artifact: Artifact, source: Original) -> None:
    """Compare everything beside the weights with the source."""
    pair = Pair(beside(artifact), beside(source), report.format)
    if not report.path.is_dir():
        check_gguf_keys(report, artifact, source)
        check_tower(report, source)
    if not report.path.is_dir() or not source.checkpoint.path.is_dir():
        _check_restated(report, pair, embedding_rows(artifact.checkpoint.config))
        return
    check_configuration(report, pair)
    check_generation(report, pair)
    check_templates(report, pair)
    tokenizer.check_tokenizer(report, pair, source.checkpoint.path)
    check_processors(report, pair)
    _check_others(report, pair)


def _check_others(report: Report, pair: Pair) -> None:
    """Check files that are carried as they are: missing, changed, added."""
    own, other = pair.own.files, pair.other.files
    ours = manifest.read(report.path) is not None
    for name in sorted(own.keys() | other.keys()):
        if name not in own:
            _missing(report, name)
        elif name not in other:
            row = row_of(name)
            if (
                row is not None
                and (name not in _COMPARED or is_processor(name))
                and not _template(name)
                and not is_licence(name)
            ):
                report.add("foreign", plain(name), f"{row.does}; the source has no such file")
        elif own[name] != other[name] and (ours or not _by_meaning(name)):
            report.add("side-files", plain(name), "is not the source's, byte for byte")


def _by_meaning(name: str) -> bool:
    return name in _COMPARED or _template(name) or is_processor(name)


def _template(name: str) -> bool:
    return name.startswith(f"{FOLDER}/")


def _missing(report: Report, name: str) -> None:
    """Report a file that is missing, except those for which another may stand."""
    if name in {tokenizer.NAME, tokenizer.CONFIG}:
        report.add("side-files", name, "the source has it, the artifact does not")
    elif is_licence(name) or (name not in _COMPARED and not _template(name)):
        report.warn("side-files", plain(name), "the source has it, the artifact does not")


def _check_restated(report: Report, pair: Pair, rows: int | None) -> None:
    """Check tokens, merges and template where one side is a GGUF file, whose tokenizer is restated.

    A GGUF file holds no tokens past the ``rows`` of the embedding, nor merges that make them.
    """
    name = tokenizer.NAME
    first, second = pair.own.readable(name), pair.other.readable(name)
    if name not in pair.own.files or not second:
        return
    try:
        tokens, expected = tokens_of(first), tokens_of(second)
        past = {
            text
            for text, number in (tokens | expected).items()
            if rows is not None and number >= rows
        }
        same_merges = _merges(first, past) == _merges(second, past)
    except (AttributeError, KeyError, TypeError, ValueError):
        report.add("side-files", name, "is no tokenizer")
        return
    if differ := sorted(
        key
        for key in (tokens.keys() | expected.keys()) - past
        if tokens.get(key) != expected.get(key)
    ):
        text = f"{len(differ)} token(s) differ from the source, e.g. {differ[0]!r}"
        report.add("side-files", name, text)
    if not same_merges:
        report.add("side-files", name, "the merges are not the source's")
    check_templates(report, pair, restated=True)


def _merges(tokenizer: Mapping[str, Any], past: Set[str]) -> list[str]:
    """Return merges in one spelling (two are in use), without those that make a token in ``past``."""
    merges = tokenizer["model"].get("merges") or []
    texts = (item if isinstance(item, str) else " ".join(item) for item in merges)
    return [text for text in texts if text.replace(" ", "", 1) not in past]
