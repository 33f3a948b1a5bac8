"""Chat templates: every place that a loader takes one from, against the source's.

transformers prefers ``chat_template.jinja`` and the files of ``additional_chat_templates``, older readers the key of
``tokenizer_config.json`` or ``chat_template.json``. Tools move a template from one to the other: so whichever places
an artifact has must say what the source says, and nothing may be there under a name that the source does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from quantforge.checkpoint.reader import TEMPLATES
from quantforge.verification.beside.facts import Beside, Pair
from quantforge.verification.beside.trees import plain, shown
from quantforge.verification.findings import Report

OWN_FILE, OLDER_FILE, SETTINGS = (
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer_config.json",
)
KEY, DEFAULT = "chat_template", "default"
PLACES = (OWN_FILE, OLDER_FILE, SETTINGS, "processor_config.json")


def check_templates(report: Report, pair: Pair, *, named: bool = True) -> None:
    """Report every template that is not the source's, is missing, or is there in addition.

    ``named``: look at templates of any name, not at the default one alone.
    """
    own, other = (
        [item for item in _stated(beside) if named or item[1] == DEFAULT]
        for beside in (pair.own, pair.other)
    )
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
        report.add(
            "side-files", OWN_FILE, f"the chat template {shown(name)} of the source is missing"
        )


def _first(own: str, other: str) -> str:
    """Describe the first place at which two texts differ."""
    count = next(
        (n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b),
        min(len(own), len(other)),
    )
    return f"{shown(own[count : count + 24])} at character {count}, the source has {shown(other[count : count + 24])}"


def _stated(beside: Beside) -> Iterator[tuple[str, str, str]]:
    """Yield every template with its place and its name, without the last newline, which Jinja drops."""
    for place in PLACES:
        if place == OWN_FILE:
            found: Any = _text(beside.files, place)
        elif place == OLDER_FILE:
            found = _unwrapped(beside, place)
        else:
            found = beside.readable(place).get(KEY)
        yield from ((place, name, text.removesuffix("\n")) for name, text in _named(found))
    for place in sorted(beside.files):
        path = PurePosixPath(place)
        if len(path.parts) == 2 and path.parts[0] == TEMPLATES:
            yield place, path.stem, (_text(beside.files, place) or "").removesuffix("\n")


def _named(found: Any) -> Iterator[tuple[str, str]]:
    if isinstance(found, str):
        yield DEFAULT, found
    elif isinstance(found, Mapping):
        yield from ((str(name), _as_text(text)) for name, text in found.items())
    elif isinstance(found, list):
        for item in found:
            named = item if isinstance(item, Mapping) else {}
            yield str(named.get("name")), _as_text(named.get("template"))
    elif found is not None:
        yield DEFAULT, _as_text(found)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def _unwrapped(beside: Beside, place: str) -> Any:
    return beside.readable(place).get(KEY)


def _text(files: Mapping[str, bytes], name: str) -> str | None:
    return files[name].decode(errors="backslashreplace") if name in files else None
