"""Chat templates: every place that a loader takes one from, against the source's.

transformers prefers ``chat_template.jinja`` and the files of ``additional_chat_templates``, older readers the key of
``tokenizer_config.json`` or ``chat_template.json``. Tools move a template from one to the other: so whichever places
an artifact has must say what the source says, and nothing may be there under a name that the source does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from quantforge.formats.gguf.special import template_key
from quantforge.verification.beside.facts import Beside, Pair
from quantforge.verification.beside.trees import plain, shown
from quantforge.verification.findings import Report
from quantforge_calibration.chat_templates import (
    DEFAULT,
    FILE,
    KEY,
    LAYOUTS,
    choose,
    is_template,
    stated,
)
from quantforge_calibration.source_error import SourceError


def check_templates(report: Report, pair: Pair, *, restated: bool = False) -> None:
    """Report every template that is not the source's, is missing, or is there in addition.

    ``restated``: one side is a GGUF file: it holds what transformers takes, under names that a key can have.
    """
    items = _taken if restated else _stated
    own, other = [*items(pair.own)], [*items(pair.other)]
    expected: dict[str, list[str]] = {}
    for _, name, text in other:
        expected.setdefault(name, []).append(text)
    for place, name, text in own:
        told = dict.fromkeys(
            found for where, called, found in other if (where, called) == (place, name)
        )
        allowed = list(told) or expected.get(name, [])
        if not allowed:
            report.add(
                "side-files",
                plain(place),
                f"a chat template {shown(name)} that the source does not have",
            )
        elif text not in allowed:
            where = "" if name == DEFAULT else f" {shown(name)}"
            report.add(
                "side-files",
                plain(place),
                f"the chat template{where} is not the source's: {_first(text, allowed[0])}",
            )
    for name in expected.keys() - {called for _, called, _ in own}:
        report.add("side-files", FILE, f"the chat template {shown(name)} of the source is missing")


def _first(own: str, other: str) -> str:
    """Describe the first place at which two texts differ."""
    count = next(
        (n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b),
        min(len(own), len(other)),
    )
    return f"{shown(own[count : count + 24])} at character {count}, the source has {shown(other[count : count + 24])}"


def _taken(beside: Beside) -> Iterator[tuple[str, str, str]]:
    """Yield the templates that transformers takes, as `_stated` does; none where a file is damaged."""
    try:
        found = choose(beside.files, "")
    except (
        SourceError
    ):  # a directory is compared place by place; a file cannot hold what is damaged
        return
    for name, text in found.named.items():
        if text:
            yield found.place, name if name == DEFAULT else template_key(name), _without_end(text)


def _stated(beside: Beside) -> Iterator[tuple[str, str, str]]:
    """Yield every template with its place and its name, without the last newline, which Jinja drops."""
    for place in sorted(beside.files, key=lambda name: (name not in LAYOUTS, name)):
        if place not in LAYOUTS and not is_template(place):
            continue
        try:
            found = [*stated(place, beside.files[place], place)]
        except (
            SourceError
        ):  # no templates as transformers reads them: they have to be the same all the same
            value = beside.readable(place).get(KEY) if place.endswith(".json") else None
            text = beside.files[place].decode(errors="backslashreplace")
            found = [(DEFAULT, text if value is None else json.dumps(value, default=repr))]
        yield from ((place, name, _without_end(text)) for name, text in found)


def _without_end(text: str) -> str:
    return text.removesuffix("\n")
